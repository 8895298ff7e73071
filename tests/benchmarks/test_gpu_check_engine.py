"""The engine in the GPU check, with small sizes: what differs is told, and a row that fails leaves
the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_check_engine,
    gpu_check_model,
    gpu_check_ranks,
    gpu_check_steps,
    gpu_check_tokens,
    gpu_large,
)
from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_engine import TINY, Parts, near_zero, open_engine
from benchmarks.gpu_check_sampling import KINDS
from configs.model import ModelConfig
from configs.quantization import computed_quantization
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.reference.fp8 import from_fp8
from kernels.reference.grouped import MIDDLE_INT4_CODE
from tests.benchmarks.gpu_check_small import small
from tests.kernels.gpu_device import DEVICE
from workers.models.weights import WeightSlice
from workers.parallel.group import TensorParallelGroup
from workers.sampling.sampler import Sampler


def test_tokens_of_16_bits_must_begin_as_those_of_the_reference() -> None:
    want = [list(range(10 * number, 10 * number + 6)) for number in range(10)]
    row = gpu_check_tokens.verdict_on(small(), want, want, "bfloat16")
    assert row["passed"] and row["equal"] == 1
    others = [[token + 1 for token in output] for output in want]
    row = gpu_check_tokens.verdict_on(small(), others, want, "bfloat16")
    assert not row["passed"] and row["equal"] == 0 and row["differ"] == row["requests"] == 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_that_do_not_vary_do_not_pass(dtype: str) -> None:
    want = [[1, 2, 3] for _ in range(10)]
    assert not gpu_check_tokens.verdict_on(small(), want, want, dtype)["passed"]


def test_a_step_is_told_by_kinds_of_kernels_and_gaps() -> None:
    spans = [
        ("decode_kernel", 0.0, 10.0),
        ("nvjet_tst_64x8", 10.0, 30.0),
        ("ampere_bf16_s16816gemm_bf16_128x64", 40.0, 44.0),
        ("_add_rms_norm", 44.0, 46.0),
        ("_row_best", 43.0, 50.0),  # beside the others
        ("Memcpy HtoD (Pinned -> Device)", 60.0, 61.0),
        ("_multiply_tile", 61.0, 64.0),
    ]
    row = gpu_check_steps.parts_of([(n, 1000 * b, 1000 * e) for n, b, e in spans], steps=2)
    assert row == {
        "attention_ms": 5.0,
        "experts_ms": 1.5,
        "sampling_ms": 3.5,
        "elementwise_ms": 1.0,
        "products_ms": 12.0,
        "others_ms": 0.5,
        "gaps_ms": 10.0,
    }


def test_every_kernel_of_ours_has_its_kind() -> None:
    from tests.kernels.test_gpu_compile import launched_kernels

    for module, name in launched_kernels():
        row = gpu_check_steps.parts_of([(name, 0.0, 1000.0)], steps=1)
        kind = next(key for key, ms in row.items() if ms)
        wanted = {"attention": "attention_ms", "sampling": "sampling_ms", "experts": "experts_ms"}
        wanted |= {"elementwise": "elementwise_ms", "tables": "others_ms", "grouped": "products_ms"}
        assert kind == wanted[module.rpartition(".")[2]], name


def test_ranks_must_sample_what_one_rank_does() -> None:
    check, alone = small(), dict[str, Any]()
    way = gpu_check_ranks.Way(small=True, eager=True, shared_memory=True)
    gpu_check_ranks.compare_with_one_rank(check, way, [], alone)
    gpu_check_ranks.compare_with_one_rank(check, way, [alone["tokens"]], alone)
    others = [[token + 1 for token in output] for output in alone["tokens"]]
    gpu_check_ranks.compare_with_one_rank(check, way, [others], alone)
    assert [row["passed"] for row in check.rows] == [False, True, False]


@pytest.mark.parametrize(("kv_cache_dtype", "wanted"), [("auto", "85"), ("fp8_e4m3", "86")])
def test_the_default_model_must_answer(
    kv_cache_dtype: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says 85."""
    monkeypatch.setattr(gpu_check_model, "_ANSWERS", {"What is 47 + 38?": wanted})
    check = Check(device=torch.device("cpu"), small=True, backends={})
    row = gpu_check_model._answers(check, "cpu", kv_cache_dtype)
    assert "85" in row["answers"] and row["passed"] == (wanted == "85")


SIZES: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "num_kv_blocks": 16,
}


def twins(piece: WeightSlice) -> None:
    """Weights as `wide`, with which tokens 2n and 2n + 1 always have the same logit."""
    gpu_check_engine.wide(piece)
    if "embed_tokens" in piece.name:
        piece.target[1::2] = piece.target[::2]


def test_token_may_differ_only_at_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_tokens, "wide", twins)
    check, outputs = small(), dict[str, list[list[int]]]()
    row = gpu_check_tokens._compare(check, outputs, "reference", "float32", "reference", True)
    assert row["passed"] and row["differ"] == 0
    # Of greedy requests, so that the twin of a token is as good: 0 without, 6 with penalties.
    want = outputs["reference"]
    got = [list(output) for output in want]
    for number in (0, 6):
        got[number][2] ^= 1
    row = gpu_check_tokens.verdict_on(check, got, want, "float32")
    assert (row["passed"], row["differ"], row["near_ties"], row["first"]) == (True, 2, 2, [2, 2])
    got[6][2] ^= 2
    row = gpu_check_tokens.verdict_on(check, got, want, "float32")
    assert (row["passed"], row["differ"], row["near_ties"]) == (False, 2, 1)
    # More requests than a few do not differ by rounding, wherever they do.
    got[7][2] ^= 1
    row = gpu_check_tokens.verdict_on(check, got, want, "float32")
    assert (row["passed"], row["differ"], row["near_ties"]) == (False, 3, 0)
    # An output that ends too early is no near tie.
    assert gpu_check_tokens.near_ties(check, {0: (want[0][:2], want[0])}) == []


@pytest.mark.parametrize(("gap", "sampled"), [(2e-5, {1, 2}), (1.1e-4, {1})])
@pytest.mark.parametrize("way", ["greedy", "temperature"])
def test_noise_moves_only_what_rounding_may_move(way: str, gap: float, sampled: set[int]) -> None:
    """With two tokens to choose from, the second of which is worse by the gap; drawn at a
    temperature at which the better one is always drawn unless they change places.
    """
    sampling = dataclasses.replace(KINDS[way], temperature=1e-7 if way == "temperature" else 0.0)
    num_rows = 200
    sampler = Sampler(
        TensorParallelGroup(0, 1, DEVICE), REFERENCE.sampling, 4, 0, 4, num_rows, DEVICE
    )
    for slot in range(num_rows):
        sampler.admit(slot, sampling, [1], 1)
    logits_BV = torch.tensor([[-9.0, gap, 0.0, -9.0]], device=DEVICE).repeat(num_rows, 1)
    with gpu_check_tokens.noisy_logits():
        tokens = sampler.sample(logits_BV, sampler.state.batch(range(num_rows), [1] * num_rows))
    assert set(tokens.token_ids_B.tolist()) == sampled


@pytest.mark.parametrize(("options", "num_steps"), [({}, None), ({"num_steps_ahead": 2}, 2)])
def test_engine_runs_as_many_steps_ahead_as_it_does_for_users(
    options: dict[str, Any], num_steps: int | None
) -> None:
    with open_engine(small(), TINY, "reference", near_zero, **options, **SIZES) as parts:
        engine, _, config = parts
        assert engine.num_steps_ahead == config.num_steps_ahead
        assert num_steps in (None, engine.num_steps_ahead)


def test_row_after_one_that_fails_has_a_fresh_engine() -> None:
    check, opened, engines = small(), list[str](), list[str]()

    @contextmanager
    def open_one() -> Iterator[Any]:
        opened.append(f"engine {len(opened)}")
        yield opened[-1], None, None

    def passes(parts: Parts) -> Row:
        engines.append(str(parts[0]))
        return {"passed": True}

    def fails(parts: Parts) -> Row:
        engines.append(str(parts[0]))
        raise RuntimeError("out of memory")

    rows = [("a", passes), ("b", fails), ("c", passes), ("d", passes)]
    start_s = gpu_check_engine.add_rows(check, open_one, rows)
    assert [row["passed"] for row in check.rows] == [True, False, True, True]
    assert engines == ["engine 0", "engine 0", "engine 1", "engine 1"] and len(start_s) == 2


@pytest.mark.parametrize("form", [None, "int4", "fp8"])
def test_weights_for_measuring_time_are_small_numbers(form: str | None) -> None:
    shape, pieces = TINY | {"hidden_size": 128, "intermediate_size": 128}, list[WeightSlice]()

    def fill(piece: WeightSlice) -> None:
        near_zero(piece)
        pieces.append(piece)

    with open_engine(small(), shape, "reference", fill, quantization=form, **SIZES) as parts:
        gpu_check_engine.add(parts[0], 0, [5, 6, 7], 4)
        assert len(gpu_check_engine.run_all(parts[0])["0"]) == 4
    for piece in pieces:
        values = piece.target.float()
        if piece.scale is not None and piece.zeros is None:
            values = from_fp8(piece.target) * piece.scale.flatten()[0]
        if piece.zeros is not None and piece.scale is not None:  # codes are 0 to 15
            assert (piece.zeros == MIDDLE_INT4_CODE).all()
            assert float(piece.scale.max()) * MIDDLE_INT4_CODE == pytest.approx(0.05, rel=0.01)
            assert piece.target.unique().numel() > 10
        else:
            assert 0.04 < float(values.abs().max()) <= 0.0501 and float(values.std()) > 0.02
    num_scaled = sum(piece.scale is not None for piece in pieces)
    assert (num_scaled > 0) == (form is not None)


def test_experts_that_some_row_has_are_read() -> None:
    shape = TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    model = ModelConfig.from_dict(shape | {"moe_intermediate_size": 4096, "norm_topk_prob": True})
    check = small()
    check.ceilings = dataclasses.replace(check.ceilings, flops_per_s=1e20)  # bound by memory
    one, two, many = (
        gpu_check_steps.floor_of_step_ms(check, model, "bfloat16", batch, 0)
        for batch in (1, 2, 1000)
    )
    assert two / one == pytest.approx(2 - 2 / 8, rel=0.01)
    assert many / one == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(("form", "bytes_per_code"), [("int4", 1 / 2), ("fp8", 1)])
def test_floor_of_a_step_with_codes_has_a_word_per_group(form: str, bytes_per_code: float) -> None:
    check, model = small(), ModelConfig.from_dict(TINY)
    plain, in_codes = (
        gpu_check_steps.floor_of_step_ms(check, model, "bfloat16", 1, 0, quantization)
        for quantization in (None, computed_quantization(form))
    )
    assert in_codes / plain == pytest.approx((bytes_per_code + 4 / 128) / 2)


def test_large_shape_whose_rows_do_not_fit_still_tells_its_cache() -> None:
    line = gpu_large.measure(small(), "tiny", TINY, "auto", (5000, 2, 2, 8))
    assert line["cache_tokens"] == 4096 and line["start_s"] > 0
    assert not any("rows" in name for name in line)
