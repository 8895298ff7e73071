"""The engine in the GPU check, with small sizes: what differs is told, and a row that fails leaves
the others.
"""

from __future__ import annotations

import dataclasses
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
from kernels.gpu import backend
from kernels.gpu.backend import TRITON_KERNELS as TRITON
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from tests.benchmarks.gpu_check_small import refusing, small
from tests.kernels.gpu_device import DEVICE
from tests.kernels.replaced import Replaced
from tests.workers.fake_gpu import FakeGpu
from workers.models.weights import WeightSlice
from workers.parallel.group import TensorParallelGroup
from workers.sampling.sampler import Sampler


def test_backend_with_other_tokens_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Replaced(TRITON, silu_and_mul=lambda gate_up: -TRITON.silu_and_mul(gate_up))
    monkeypatch.setattr(backend, "TRITON_KERNELS", wrong)
    check = small(wrong)
    gpu_check_tokens.tokens(check)
    assert "float32 triton eager" in {
        row["name"] for row in check.rows if not row.get("passed", True)
    }


def test_tokens_of_16_bits_must_begin_as_those_of_the_reference() -> None:
    outputs: dict[str, list[list[int]]] = {}
    rows = [
        gpu_check_tokens._compare(small(), outputs, name, "bfloat16", "reference", True)
        for name in ("a", "b")
    ]
    assert all(row["passed"] and row["equal"] == 1 for row in rows)
    outputs["a"] = [[token + 1 for token in output] for output in outputs["a"]]
    row = gpu_check_tokens._compare(small(), outputs, "b", "bfloat16", "reference", True)
    assert not row["passed"] and row["equal"] == 0 and row["differ"] == row["requests"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has graphs of its own")
def test_tokens_through_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("workers.worker.open_device", lambda kind, index: gpu)
    monkeypatch.setattr("workers.worker.find_kernels", lambda config: gpu.recordable(TRITON))
    outputs: dict[str, list[list[int]]] = {}
    rows = [
        gpu_check_tokens._compare(small(), outputs, str(eager), "float32", "triton", eager)
        for eager in (True, False)
    ]
    assert all(row["passed"] for row in rows) and len(outputs) == 2
    assert sum(graph.num_replays for graph in gpu.graphs) > 0


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
        wanted |= {"elementwise": "elementwise_ms", "tables": "others_ms", "int4": "products_ms"}
        assert kind == wanted[module.rpartition(".")[2]], name


def test_ranks_whose_weights_do_not_fit_together_do_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is another process, and has the right weights."""
    by_name = gpu_check_ranks.by_name

    def by_other_names(piece: WeightSlice) -> None:
        by_name(dataclasses.replace(piece, name=f"{piece.name}'"))

    monkeypatch.setattr(gpu_check_ranks, "by_name", by_other_names)
    check = small()
    gpu_check_ranks.two_ranks(check)
    failed = [row["name"] for row in check.rows if not row.get("passed", True)]
    assert failed == ["eager: as one rank"], check.rows


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_default_model_must_answer(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check(device=torch.device("cpu"), small=True, backends={})
    row = gpu_check_model._answers(check, "cpu", kv_cache_dtype)
    assert row["passed"] and "85" in row["answers"]
    monkeypatch.setattr(gpu_check_model, "_ANSWERS", {"What is 47 + 38?": "86"})
    assert not gpu_check_model._answers(check, "cpu", kv_cache_dtype)["passed"]


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

    def compare(name: str) -> Row:
        return gpu_check_tokens._compare(check, outputs, name, "float32", "reference", True)

    assert compare("reference")["differ"] == 0
    # Of greedy requests, so that the twin of a token is as good: 0 without, 6 with penalties.
    want = outputs["reference"] = [list(output) for output in outputs["reference"]]
    exact = [list(output) for output in want]
    for number in (0, 6):
        want[number][2] ^= 1
    row = compare("tie")
    assert (row["passed"], row["differ"], row["near_ties"], row["first"]) == (True, 2, 2, [2, 2])
    want[6][2] ^= 2
    row = compare("no tie")
    assert (row["passed"], row["differ"], row["near_ties"]) == (False, 2, 1)
    # More requests than a few do not differ by rounding, wherever they do.
    want[:] = exact
    for number in (0, 6, 7):
        want[number][2] ^= 1
    row = compare("many")
    assert (row["passed"], row["differ"], row["near_ties"]) == (False, 3, 0)


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


def test_output_that_ends_too_early_is_no_near_tie() -> None:
    check, outputs = small(), dict[str, list[list[int]]]()
    gpu_check_tokens._compare(check, outputs, "reference", "float32", "reference", True)
    whole = outputs["reference"][0]
    assert gpu_check_tokens.near_ties(check, {0: (whole[:2], whole)}) == []


@pytest.mark.parametrize(("options", "num_steps"), [({}, None), ({"num_steps_ahead": 2}, 2)])
def test_engine_runs_as_many_steps_ahead_as_it_does_for_users(
    options: dict[str, Any], num_steps: int | None
) -> None:
    with open_engine(small(), TINY, "reference", near_zero, **options, **SIZES) as parts:
        engine, _, config = parts
        assert engine.num_steps_ahead == config.num_steps_ahead
        assert num_steps in (None, engine.num_steps_ahead)


def test_row_after_one_that_fails_has_a_fresh_engine() -> None:
    check, engines = small(), []

    def passes(parts: Parts) -> Row:
        engines.append(parts[0])
        gpu_check_engine.add(parts[0], 0, [1, 2, 3], 2)
        return {"passed": len(gpu_check_engine.run_all(parts[0])) == 1}

    def fails(parts: Parts) -> Row:
        engines.append(parts[0])
        gpu_check_engine.add(parts[0], 0, [1, 2, 3], 2)
        raise RuntimeError("out of memory")

    start_s = gpu_check_engine.add_rows(
        check,
        lambda: open_engine(check, TINY, "reference", near_zero, **SIZES),
        [("a", passes), ("b", fails), ("c", passes), ("d", passes)],
    )
    assert [row["passed"] for row in check.rows] == [True, False, True, True]
    assert engines[0] is engines[1] and engines[2] is engines[3] is not engines[0]
    assert len(start_s) == 2


def test_floor_of_a_step_counts_the_bytes_of_its_cache() -> None:
    """The cache of 8-bit numbers is half as large, and the weights are the same."""
    floors = []
    for dtype in ("auto", "fp8_e4m3"):
        check = small()
        options: dict[str, Any] = {"kv_cache_dtype": dtype, "enforce_eager": True}
        gpu_check_steps._decode_steps(check, TINY, dtype, (2,), **options)
        floors.append(check.rows[0]["floor_ms"])
    cache_ms = 1000 * 2 * 8 * 2 * 1 * 64 / small().ceilings.memory_bytes_per_s  # one byte each
    assert floors[0] - floors[1] == pytest.approx(cache_ms, rel=0.01)


@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_blocks_are_counted_in_the_size_of_the_backend(backend_name: str) -> None:
    check = small(reference=REFERENCE)
    size = check.backends[backend_name].capabilities.default_block_size
    assert gpu_check_engine.blocks_for(check, backend_name, [1, size, size + 1]) == 4


def test_large_shape_whose_rows_do_not_fit_still_tells_its_cache() -> None:
    line = gpu_large.measure(small(), "tiny", TINY, "auto", (5000, 2, 2, 8))
    assert line["cache_tokens"] == 4096 and line["start_s"] > 0
    assert not any("rows" in name for name in line)


def test_backend_that_refuses_the_default_model_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(check: Check, backend: str, kv_cache_dtype: str) -> Row:
        return {"passed": backend == "triton"}

    monkeypatch.setattr(Check, "on_gpu", True)
    monkeypatch.setattr(gpu_check_model, "_answers", answer)
    check = small(other=refusing(REFERENCE, "head_dim 32 is not possible"))
    gpu_check_model.answers(check)
    ours, others = check.rows[:2], check.rows[2:]
    assert [row["name"] for row in ours] == [
        "default model, triton, cache auto",
        "default model, triton, cache fp8_e4m3",
    ]
    assert all(row["passed"] for row in ours)
    assert [row["note"] for row in others] == ["head_dim 32 is not possible"] * 2
    assert others[0]["name"] == "default model, other, cache auto"
