"""What the peers of a comparison are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peer_flash_attn, peer_workload
from benchmarks.gpu_runs_table import compared, engines_of
from cluster.client.tokenizer import Tokenizer
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from tests.kernels.test_flash_attn import WHEEL, install
from workers.models.checkpoint import expected_tensors


def adapter(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> peer_flash_attn.FlashAttn2:
    """Over the stand-in of the wheel, which reads pages only; keys in a row go to the reference."""
    install(monkeypatch, WHEEL)
    options = {"packed": peer_flash_attn.reference().packed} | replaced
    return dataclasses.replace(peer_flash_attn.flash_attn_3(), **options)


def test_flash_attention_3_answers_calls_of_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention = adapter(monkeypatch)
    assert "FlashAttention-3" in attention.version
    assert attention.check(torch.device("cpu"), torch.bfloat16) < 0.01


@pytest.mark.parametrize("function", ["paged", "packed"])
def test_wrong_attention_is_refused(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    right = getattr(adapter(monkeypatch), function)
    attention = adapter(monkeypatch, **{function: lambda *args: right(*args) * 1.05})
    with pytest.raises(RuntimeError, match="attention is off by"):
        attention.check(torch.device("cpu"), torch.bfloat16)


def test_workload_is_the_one_of_nano_vllm_and_what_bench_reads_is_the_same(tmp_path: Path) -> None:
    prompts, lengths = peer_workload.draw()
    assert (len(prompts), sum(lengths)) == (256, 133_966)
    peer_workload.write_workload(tmp_path / "workload.jsonl", small=False)
    lines = [json.loads(line) for line in (tmp_path / "workload.jsonl").read_text().splitlines()]
    assert [line["prompt_token_ids"] for line in lines] == prompts
    assert [line["sampling_params"]["max_tokens"] for line in lines] == lengths


def test_model_holds_every_tensor_and_a_tokenizer(tmp_path: Path) -> None:
    size = peer_workload.write_model(tmp_path, "tiny")
    shapes = expected_tensors(ModelConfig.from_dir(tmp_path)).values()
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    assert 2 * numbers <= size < 2 * numbers + 10_000
    tokenizer, default = Tokenizer(tmp_path), Tokenizer(DEFAULT_MODEL_DIR)
    text = "<|im_start|>user\nWhat is 47 + 38?<|im_end|>"
    assert tokenizer.encode(text) == default.encode(text)
    assert tokenizer.text_bytes is not None
    texts = [*map(tokenizer.text_bytes, range(512, peer_workload.TINY["vocab_size"]))]
    assert all(texts) and len(set(texts)) == len(texts)


def test_engines_are_compared_with_nano_vllm(tmp_path: Path) -> None:
    rows = [{"name": "published: x", "tokens_per_s": 1}]
    rows.append({"name": "0.6B triton", "tokens_per_s": 300.0, "total_s": 1})
    record = {"sections": {"throughput": {"rows": rows}}}
    (tmp_path / "gpu_check.json").write_text(json.dumps(record))
    ours = {"engine": "eagleray", "output_tokens_per_s": 250.0}
    theirs = {"engine": "nano-vLLM", "attention": "FA3", "output_tokens_per_s": 200.0}
    steps = [
        {"name": "ray_bench_triton", "lines": [ours]},
        {"name": "nano_vllm", "lines": [theirs]},
        {"name": "serve", "lines": [theirs]},
    ]
    assert compared(list(engines_of({"steps": steps}, tmp_path)))[1:] == [
        ["Eagleray, in one process", "300", "1.50", "triton"],
        ["Eagleray, through Ray", "250", "1.25", "triton"],
        ["nano-vLLM", "200", "1.00", "FA3"],
    ]
