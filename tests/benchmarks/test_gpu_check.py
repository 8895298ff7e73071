"""The GPU check in small: every section runs to its end, and what is wrong does not pass."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_check_engine, gpu_check_numerics, gpu_check_speed
from benchmarks.gpu_check_common import Check
from kernels.backend import REFERENCE, Kernels
from kernels.gpu import backend
from kernels.gpu.backend import TRITON
from tests.kernels.gpu_device import DEVICE
from tests.workers.fake_gpu import FakeGpu

ROOT = Path(__file__).parents[2]


def small(kernels: Kernels = TRITON) -> Check:
    torch.manual_seed(0)
    return Check(device=DEVICE, small=True, backends={"triton": kernels})


def test_every_section_reports_and_passes(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--small", "--out", str(out)]
    environment = os.environ | ({} if DEVICE.type == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert list(record["sections"]) == list(gpu_check.SECTIONS)
    assert record["times_are_real"] is (DEVICE.type == "cuda")
    for name, section in record["sections"].items():
        assert section["rows"] and not section["failed"] and section["ended_early"] is None, name
    tables = done.stdout.partition("all of it")[2]
    assert all(f"{name}: " in tables for name in gpu_check.SECTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_that_a_kernel_leaves_as_it_was_holds_no_number(dtype: torch.dtype) -> None:
    with gpu_check_numerics.poisoned():
        assert torch.empty(100, dtype=dtype, device=DEVICE).isnan().all()
        assert (torch.empty(100, dtype=torch.int64, device=DEVICE) == torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def off_by_a_hundredth(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: kernel(*args) * 1.01


def unwritten(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: torch.empty_like(kernel(*args))


def stores_everywhere(*args: Any) -> torch.Tensor:
    """Zeros where no slot says so."""
    store: Callable[..., torch.Tensor] = TRITON.qk_norm_rope_store
    q_THD = store(*args)
    for cache in args[-3:-1]:
        cache.nan_to_num_(nan=0.0)
    return q_THD


def reads_too_far(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, attn: Any, scale: float) -> Any:
    """The last token of each row sees one more."""
    return TRITON.paged_attention(q, k_cache, v_cache, dataclasses.replace(attn, seq_lens_B=attn.seq_lens_B + 1), scale)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (gpu_check_numerics.elementwise, {"rms_norm": off_by_a_hundredth(TRITON.rms_norm)}),
        (gpu_check_numerics.elementwise, {"silu_and_mul": unwritten(TRITON.silu_and_mul)}),
        (gpu_check_numerics.elementwise, {"add_rms_norm": lambda x, r, w, eps: (TRITON.rms_norm(x + r, w, eps), x)}),
        (gpu_check_numerics.store, {"qk_norm_rope_store": stores_everywhere}),
        (gpu_check_numerics.attention, {"paged_attention": off_by_a_hundredth(TRITON.paged_attention)}),
        (gpu_check_numerics.attention, {"paged_attention": reads_too_far}),
    ],
)
def test_wrong_kernel_does_not_pass(part: Callable[..., None], wrong: dict[str, Any]) -> None:
    kernels = dataclasses.replace(TRITON, **wrong)
    check = small(kernels)
    part(check, *(["triton"] if part is gpu_check_numerics.attention else []), kernels)
    failed = {row["name"].split()[0] for row in check.rows if not row["passed"]}
    assert failed == {"triton" if part is gpu_check_numerics.attention else next(iter(wrong))}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("row_best", lambda logits: (lambda best: (best[0], best[1] + 1, best[2]))(TRITON.sampling.row_best(logits))),
        ("list_nearest", lambda gaps, k, most: TRITON.sampling.list_nearest(gaps, k, most) + 1),
        ("gap_histogram", lambda *args: TRITON.sampling.gap_histogram(*args) * 2),
        ("block_weights", lambda gaps, limit: TRITON.sampling.block_weights(gaps, limit - 1.0)),
        ("pick_column", lambda gaps, limit, sums, index: TRITON.sampling.pick_column(gaps, limit, sums, index + 1)),
    ],
)
def test_wrong_sampling_does_not_pass(name: str, wrong: Callable[..., Any]) -> None:
    gaps = gpu_check_numerics._gap_rows(small(), gpu_check_numerics._logits(small(), "ties", 140))
    part = {
        "row_best": gpu_check_numerics._same_best, "list_nearest": gpu_check_numerics._same_lists,
        "gap_histogram": gpu_check_numerics._same_histograms, "block_weights": gpu_check_numerics._same_weights,
        "pick_column": gpu_check_numerics._same_picks,
    }[name]  # fmt: skip
    assert not part(dataclasses.replace(TRITON.sampling, **{name: wrong}), gaps)["passed"]


def test_backend_with_other_tokens_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(TRITON, silu_and_mul=lambda gate_up: -TRITON.silu_and_mul(gate_up))
    monkeypatch.setattr(backend, "TRITON", wrong)
    check = small(wrong)
    gpu_check_engine.tokens(check)
    assert "float32 triton eager" in {row["name"] for row in check.rows if not row.get("passed", True)}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has graphs of its own")
def test_tokens_through_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("workers.worker.open_device", lambda kind: gpu)
    monkeypatch.setattr("workers.worker.find_kernels", lambda config: gpu.recordable(TRITON))
    outputs: dict[str, list[list[int]]] = {}
    rows = [
        gpu_check_engine._compare(small(), outputs, str(eager), "float32", "triton", eager) for eager in (True, False)
    ]
    assert all(row["passed"] for row in rows) and len(outputs) == 2
    assert sum(graph.num_replays for graph in gpu.graphs) > 0


def test_time_of_flash_attn_is_told_as_a_multiple_of_ours() -> None:
    check = small()
    check.backends["flash_attn"] = REFERENCE
    gpu_check_speed.speed(check)
    rows = [row for row in check.rows if "flash_attn_us" in row]
    assert rows and all(row["of_flash_attn"] > 0 and row["share"] > 0 for row in rows)


def test_section_out_of_time_keeps_its_rows_and_a_broken_one_says_why() -> None:
    def slow(check: Check) -> None:
        check.add("first", lambda: {"passed": True})
        check.add("second", lambda: time.sleep(20) or {})  # type: ignore[func-returns-value]

    def broken(check: Check) -> None:
        check.add("raises", lambda: dict[str, Any]()["x"])
        check.add("goes on", lambda: {"passed": True})
        raise RuntimeError("no such device")

    section = gpu_check.run_section(small(), slow, 0.2)
    assert [row["name"] for row in section["rows"]] == ["first"] and "stopped after" in section["ended_early"]
    section = gpu_check.run_section(small(), broken, 5.0)
    assert (section["failed"], section["ended_early"]) == (["raises"], "RuntimeError: no such device")
    assert "KeyError" in section["rows"][0]["error"] and section["rows"][1]["passed"]
    assert "raises" in gpu_check.table({"broken": section}, brief=True)
