"""The GPU check with small sizes: every section is completed, and wrong kernels do not pass."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_check,
    gpu_check_attention,
    gpu_check_common,
    gpu_check_experts,
    gpu_check_numerics,
    gpu_check_speed,
    gpu_check_verdicts,
)
from benchmarks.gpu_check_cache import ARCHIVE
from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_process import run_section
from kernels.gpu import attention as gpu_attention
from kernels.gpu.backend import TRITON_KERNELS as TRITON
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from tests.benchmarks.gpu_check_small import refusing, small
from tests.kernels.gpu_device import DEVICE
from tests.kernels.replaced import Replaced

ROOT = Path(__file__).parents[2]


# Those whose processes are started below; a process takes longer to import torch than a section.
IN_PROCESSES = ["machine", "speed"]


def test_sections_report_and_pass_in_their_own_processes(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--small", "--out", str(out)]
    command += ["--triton-cache", str(tmp_path / "earlier"), "--sections", *IN_PROCESSES]
    # The user's cache may hold kernels.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    if DEVICE.type != "cuda":  # one thread for each process, of which several run at a time
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert list(record["sections"]) == IN_PROCESSES
    assert record["times_are_real"] is (DEVICE.type == "cuda")
    for name, section in record["sections"].items():
        assert section["rows"] and not section["failed"] and section["ended_early"] is None, name
    assert (record["compiled_kernels"] > 0) is (DEVICE.type == "cuda")
    archive = [tmp_path / ARCHIVE] if DEVICE.type == "cuda" else []
    assert sorted(tmp_path.iterdir()) == [out, *archive]
    tables = done.stdout.partition("all of it")[2]
    assert all(f"{name}: " in tables for name in IN_PROCESSES)


@pytest.mark.parametrize(
    "name", [name for name in gpu_check.SECTIONS if name not in (*IN_PROCESSES, "sanitizer")]
)
def test_section_reports_and_passes(name: str, tmp_path: Path) -> None:
    section, limit_s = gpu_check.SECTIONS[name]
    part = tmp_path / "part.json"
    run_section(small(), section, part, time.monotonic() + 5 * limit_s)
    found = json.loads(part.read_text())
    assert found["rows"] and not found["failed"] and found["ended_early"] is None, found
    assert f"{name}: " in gpu_check.table({name: found}, brief=True)


def test_all_sections_run_within_nine_minutes_unless_others_are_named() -> None:
    assert sum(gpu_check.SECTIONS[name][1] for name in gpu_check.DEFAULT_SECTIONS) <= 535


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_that_a_kernel_leaves_as_it_was_holds_no_number(dtype: torch.dtype) -> None:
    with gpu_check_verdicts.poisoned():
        assert torch.empty(100, dtype=dtype, device=DEVICE).isnan().all()
        assert (
            torch.empty(100, dtype=torch.int64, device=DEVICE) == torch.iinfo(torch.int64).max
        ).all()
    assert not torch.are_deterministic_algorithms_enabled()


def off_by_a_hundredth(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: kernel(*args) * 1.01


def unwritten(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: torch.empty_like(kernel(*args))


def stores_everywhere(*args: Any) -> torch.Tensor:
    """Writes zeros even where no slot points."""
    store: Callable[..., torch.Tensor] = TRITON.qk_norm_rope_store
    q_THD = store(*args)
    for cache in args[-3:-1]:
        cache.nan_to_num_(nan=0.0)
    return q_THD


def reads_too_far(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, attn: Any, scale: float
) -> Any:
    """The last token of each row sees one token too many."""
    return TRITON.paged_attention(
        q, k_cache, v_cache, dataclasses.replace(attn, seq_lens_B=attn.seq_lens_B + 1), scale
    )


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (gpu_check_numerics.elementwise, {"rms_norm": off_by_a_hundredth(TRITON.rms_norm)}),
        (gpu_check_numerics.elementwise, {"silu_and_mul": unwritten(TRITON.silu_and_mul)}),
        (
            gpu_check_numerics.elementwise,
            {"add_rms_norm": lambda x, r, w, eps: (TRITON.rms_norm(x + r, w, eps), x)},
        ),
        (gpu_check_numerics.store, {"qk_norm_rope_store": stores_everywhere}),
        (
            gpu_check_attention.attention,
            {"paged_attention": off_by_a_hundredth(TRITON.paged_attention)},
        ),
        (gpu_check_attention.attention, {"paged_attention": reads_too_far}),
    ],
)
def test_wrong_kernel_does_not_pass(part: Callable[..., None], wrong: dict[str, Any]) -> None:
    kernels = Replaced(TRITON, **wrong)
    check = small(kernels)
    part(check, *(["triton"] if part is gpu_check_attention.attention else []), kernels)
    failed = {row["name"].split()[0] for row in check.rows if not row["passed"]}
    assert failed == {"triton" if part is gpu_check_attention.attention else next(iter(wrong))}


@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        ({"mlp": off_by_a_hundredth(TRITON.experts.mlp)}, {"mlp"}),
        ({"mlp": unwritten(TRITON.experts.mlp)}, {"mlp"}),
        ({"mlp": lambda x, shares, ids, w: TRITON.experts.mlp(x, shares, ids ^ 1, w)}, {"mlp"}),
        ({"route": lambda x, k, norms, _: TRITON.experts.route(x, k, norms, None)}, {"route"}),
    ],
)
def test_wrong_experts_do_not_pass(wrong: dict[str, Any], failed: set[str]) -> None:
    check = small(Replaced(TRITON, experts=Replaced(TRITON.experts, **wrong)))
    gpu_check_experts.experts(check)
    assert {row["name"].split()[0] for row in check.rows if not row["passed"]} == failed


def record_launches(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, bool]]:
    """Kernel, M, and whether decode writes nothing but its output; kernels then do nothing."""
    launched: set[tuple[str, int, bool]] = set()

    def recorder(name: str) -> Any:
        class Recorder:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return lambda *args, **constants: launched.add(
                    (name, constants["TILE_M"], args[4] is args[3])
                )

        return Recorder()

    monkeypatch.setattr(gpu_attention, "prefill_kernel", recorder("prefill"))
    monkeypatch.setattr(gpu_attention, "decode_kernel", recorder("decode"))
    monkeypatch.setattr(gpu_attention, "_num_sms", lambda device: 132)
    return launched


def test_small_batches_divide_a_row_and_use_the_large_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all that CUDA's checkers run."""
    divided = gpu_check_attention.SMALL_BATCHES["parts"]
    attn = divided.metadata(torch.arange(30), 16, TRITON, 1, DEVICE)
    assert attn.decode_parts is not None and int(attn.decode_parts.part_start_B1.diff().max()) > 2
    launched = record_launches(monkeypatch)
    check = small()
    gpu_check_attention.attention(check, "triton", TRITON)
    assert {("prefill", 128, False), ("decode", 16, False)} < launched


@pytest.mark.parametrize("case", gpu_check_attention.ATTENTION_CASES)
def test_batches_reach_every_way_of_launching_attention(
    case: tuple[int, int, int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 132 multiprocessors that a CPU is assumed to have."""
    launched = record_launches(monkeypatch)
    heads, kv_heads, dim, block_size = case[0], case[1], case[2], case[3] or 16
    one_part: list[int] = []
    for batch in gpu_check_attention.BATCHES.values():
        num_blocks = sum(-(-seq_len // block_size) for seq_len in batch.seq_lens)
        attn = batch.metadata(torch.arange(num_blocks), block_size, TRITON, kv_heads, DEVICE)
        if attn.decode_parts is not None:
            one_part.append(int((attn.decode_parts.part_start_B1.diff() == 1).sum()))
        cache = torch.empty(
            num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE
        )
        q_THD = torch.empty(sum(batch.query_lens), heads, dim, dtype=torch.bfloat16, device=DEVICE)
        gpu_attention.paged_attention(q_THD, cache, cache, attn, 1.0)
    # Decode always uses scratch memory, for rows of one part and of several.
    assert launched == {("prefill", 64, False), ("prefill", 128, False), ("decode", 16, False)}
    assert min(one_part) < 5 and (max(one_part) > 50 or kv_heads == 2)


@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        (gpu_check_numerics._same_best, "row_best", lambda best: (best[0], best[1] + 1, best[2])),
        (gpu_check_numerics._same_lists, "list_nearest", lambda entries: entries + 1),
        (gpu_check_numerics._same_histograms, "gap_histogram", lambda counts: counts * 2),
        (gpu_check_numerics._same_weights, "block_weights", lambda sums: (sums[0] // 2, sums[1])),
        (gpu_check_numerics._same_picks, "pick_column", lambda columns: columns + 1),
        (
            lambda kernels, _: gpu_check_numerics._same_draws(small(), kernels),
            "target_weight",
            lambda weights: weights + 1,
        ),
    ],
)
def test_wrong_sampling_does_not_pass(
    part: Callable[..., Row], name: str, change: Callable[..., Any]
) -> None:
    gaps = gpu_check_numerics._gap_rows(small(), gpu_check_numerics._logits(small(), "ties", 140))
    kernel = getattr(TRITON.sampling, name)
    wrong = Replaced(TRITON.sampling, **{name: lambda *args: change(kernel(*args))})
    assert not part(wrong, gaps)["passed"]


def test_time_of_flash_attn_is_told_as_a_multiple_of_ours() -> None:
    check = small(flash_attn=REFERENCE)
    gpu_check_speed.speed(check)
    rows = [row for row in check.rows if "flash_attn_us" in row]
    assert rows and all(row["of_flash_attn"] > 0 and row.get("share", 1) > 0 for row in rows)


def test_input_that_stays_in_the_cache_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "on_gpu", True)
    properties = SimpleNamespace(L2_cache_size=60 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_check_common.share(small(), 2**10, 2.0, 4.0) == {"cached": True}
    for num_bytes in (2**20, 2**26, 2**32):
        assert gpu_check_common.share(small(), num_bytes, 2.0, 4.0) == {"share": 0.5}


def test_shape_that_a_backend_refuses_is_left_out_with_its_reason() -> None:
    other = refusing(REFERENCE, "head_dim 64 is not possible")
    check = small(flash_attn=other)
    gpu_check_attention.attention(check, "flash_attn", other)
    assert [row["note"] for row in check.rows] == ["head_dim 64 is not possible"]
    gpu_check_speed.speed(check)
    mixed = next(row for row in check.rows if row["name"].startswith("mixed"))
    assert mixed["flash_attn"] == "head_dim 64 is not possible"
    assert "flash_attn_us" not in mixed and mixed["block_16_us"] > 0


@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "runs"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.6", False), ("3.7.1", "2.4.6", True)],
)
def test_interpreter_that_cannot_run_with_this_numpy_says_so(
    triton_version: str, numpy_version: str, runs: bool
) -> None:
    problem = gpu_check.interpreter_problem(triton_version, numpy_version)
    assert problem is None if runs else problem is not None and "numpy<2.4" in problem
