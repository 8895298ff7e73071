"""Which weights are held as codes: what is asked for, what is stored, and what kernels can."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.quantization import FP8, INT4, INT8, computed_quantization
from kernels.cpu.backend import CPU_KERNELS
from kernels.select import choose_capabilities
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint, pack_checkpoint, quantize_checkpoint
from tests.workers.conftest import config_of
from tests.workers.test_grouped import FORMATS, SHAPE, stored_model
from workers.configuration import reason_to_unpack, resolve
from workers.loading import load_model
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

CPU = torch.device("cpu")
WITH_EXPERTS = Shape(
    name="experts",
    hidden=128,
    extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
)


def resolved(model_dir: Path, device: str = "cpu", **options: Any) -> ResolvedConfig:
    """Without graphs, which not every backend has."""
    model = ModelConfig.from_dir(model_dir)
    backend = choose_capabilities(device, options.get("attention_backend", "auto"))
    return resolve(EngineConfig(enforce_eager=True, **options), model, model_dir, device, backend)


def write_experts(model_dir: Path, name: str) -> None:
    """A model with experts that says it is stored in a format."""
    make_checkpoint(model_dir, WITH_EXPERTS)
    raw = json.loads((model_dir / "config.json").read_text())
    raw["quantization_config"] = FORMATS[name][0]
    (model_dir / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("form", "size"), [(INT4, "100"), (FP8, "102")], ids=lambda value: str(value)
)
def test_groups_that_are_no_whole_words_are_refused(tmp_path: Path, form: str, size: str) -> None:
    make_checkpoint(tmp_path, Shape(name="narrow", intermediate=int(size)))
    multiple = 8 if form == INT4 else 4
    refusal = f"'{form}' is not possible for matrices of 64, 64, {size} .* multiples of {multiple}"
    with pytest.raises(ConfigError, match=refusal):
        resolved(tmp_path, quantization=form)


def test_what_cannot_be_kept_is_widened(tmp_path: Path) -> None:
    """Groups in another order, 8 bits, rows of half a word, experts, GPUs without kernels, and
    where other codes are asked for.
    """
    stored_model(tmp_path, "float_channel", Shape(name="narrow", intermediate=102))
    assert resolved(tmp_path).quantization is None
    for name in ("awq_128", "fp8_bfloat16"):
        write_experts(tmp_path, name)
        assert resolved(tmp_path).quantization is None
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=4, group_size=64, ordered=False)
    assert resolved(tmp_path).quantization is None
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=8, group_size=64)
    assert resolved(tmp_path).quantization is None
    for name, other in (("pack_32", FP8), ("fp8_bfloat16", INT4)):
        stored_model(tmp_path, name)
        assert resolved(tmp_path).quantization is not None
        from_user = resolved(tmp_path, quantization=other).quantization
        assert from_user == computed_quantization(other)


@pytest.mark.parametrize(("name", "form"), [("pack_32", INT4), ("fp8_bfloat16", FP8)])
def test_codes_are_kept_on_gpus_too(tmp_path: Path, name: str, form: str) -> None:
    stored_model(tmp_path, name)
    quantization = resolved(tmp_path, "cuda", attention_backend="triton").quantization
    assert quantization is not None and quantization.name == form and quantization.is_stored
    make_checkpoint(tmp_path, SHAPE)
    options = {"attention_backend": "triton", "quantization": form}
    assert resolved(tmp_path, "cuda", **options).quantization == computed_quantization(form)


@pytest.mark.parametrize(("name", "form"), [("pack_32", INT4), ("fp8_bfloat16", FP8)])
def test_on_a_gpu_the_reference_holds_no_codes_in_groups(
    tmp_path: Path, name: str, form: str
) -> None:
    """It would widen whole matrices in every step."""
    stored_model(tmp_path, name)
    assert resolved(tmp_path, "cuda", attention_backend="reference").quantization is None
    with pytest.raises(ConfigError, match=f"'{form}' is not possible on device 'cuda'"):
        resolved(tmp_path, "cuda", attention_backend="reference", quantization=form)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("form", [INT4, FP8])
def test_stored_8_bit_codes_are_not_rounded_to_others(
    tmp_path: Path, device: str, form: str
) -> None:
    make_checkpoint(tmp_path, SHAPE)
    quantize_checkpoint(tmp_path)
    match = f"'{form}' is not possible for this checkpoint: it holds 8-bit .* Leave quantization"
    with pytest.raises(ConfigError, match=match):
        resolved(tmp_path, device, attention_backend="reference", quantization=form)


def test_a_refusal_names_what_the_backend_can_do(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPE)
    advice = "Choose one of them, or quantization 'int4' or 'fp8', or leave quantization out$"
    with pytest.raises(ConfigError, match=advice):
        resolved(tmp_path, "cuda", attention_backend="triton", quantization=INT8)


def test_a_refusal_advises_fewer_ranks_only_where_there_are_several(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="narrow", intermediate=102, kv_heads=2))
    options = {"attention_backend": "triton", "quantization": INT4}
    with pytest.raises(ConfigError, match=r"multiples of 8\. Leave quantization out$"):
        resolved(tmp_path, "cuda", **options)
    with pytest.raises(ConfigError, match="Choose a smaller tensor_parallel_size, or leave"):
        resolved(tmp_path, "cuda", **options, tensor_parallel_size=2)


def test_unpacked_codes_have_a_reason(tmp_path: Path) -> None:
    def reason(device: str = "cpu", name: str = "reference", **options: Any) -> str | None:
        return reason_to_unpack(resolved(tmp_path, device, attention_backend=name, **options))

    stored_model(tmp_path, "fp8_bfloat16")
    assert reason() is None
    assert reason("cuda", "triton") is None
    assert reason("cuda", "reference") == (
        "kernel backend 'reference' has no products with 'fp8' on device 'cuda'"
    )
    assert reason(quantization="int8") == "quantization 'int8' was asked for"
    stored_model(tmp_path, "float_channel", Shape(name="narrow", intermediate=102))
    assert reason() == "groups of a rank are not whole words of codes"
    model = make_checkpoint(tmp_path, SHAPE)
    assert reason() is None, "nothing is stored as codes"
    pack_checkpoint(tmp_path, model, bits=4, group_size=64, ordered=False)
    assert reason() == "inputs of a group do not follow one another (desc_act, actorder)"
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=8, group_size=64)
    assert reason() == "codes have 8 bits"
    write_experts(tmp_path, "fp8_bfloat16")
    assert reason() == "the model has experts"


def test_a_rank_says_that_stored_codes_are_rounded_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=4, group_size=64, ordered=False)
    config = config_of(tmp_path, quantization=INT4, spares="off")
    with caplog.at_level(logging.WARNING):
        load_model(config, TensorParallelGroup(0, 1, CPU), CPU_KERNELS, Progress())
    assert "unpacked and rounded to other codes (int4), because inputs of a group" in caplog.text


@pytest.mark.parametrize(("dtype", "is_told"), [("auto", True), ("float32", False)])
def test_who_has_float16_on_a_processor_with_bfloat16_is_told_of_it(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    is_told: bool,
) -> None:
    make_checkpoint(tmp_path, SHAPE)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "float16"}))
    capabilities = dataclasses.replace(
        CPU_KERNELS.capabilities, fast_dtypes=("float32", "bfloat16")
    )
    monkeypatch.setattr(CPU_KERNELS, "capabilities", capabilities)
    with caplog.at_level(logging.WARNING):
        config = config_of(tmp_path, dtype=dtype, spares="off")
        load_model(config, TensorParallelGroup(0, 1, CPU), CPU_KERNELS, Progress())
    assert config.dtype == "float32"
    assert ("dtype bfloat16 is faster" in caplog.text) is is_told


@pytest.mark.parametrize("spares", ["off", "warm"])
def test_packing_moves_the_counters_of_a_rank(tmp_path: Path, spares: str) -> None:
    """So that a rank that packs for long is not taken for a stuck one."""
    model = make_checkpoint(tmp_path, SHAPE)
    progress = Progress()
    config = config_of(tmp_path, spares=spares)
    load_model(config, TensorParallelGroup(0, 1, CPU), CPU_KERNELS, progress)
    num_parts = 8 * model.config.num_hidden_layers + 3  # and the embedding, a norm and the head
    assert progress.num_packed_parts == num_parts and progress.loaded_bytes
