"""The GPU check with small sizes: every section is completed, and wrong kernels do not pass."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_check,
    gpu_check_common,
    gpu_check_engine,
    gpu_check_model,
    gpu_check_numerics,
    gpu_check_ranks,
    gpu_check_speed,
)
from benchmarks.gpu_check_common import Check, attention_of, with_parts
from benchmarks.gpu_check_process import Section, run_section
from kernels.gpu import attention as gpu_attention
from kernels.gpu import backend
from kernels.gpu.backend import TRITON_KERNELS as TRITON
from kernels.interface import Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from tests.kernels.gpu_device import DEVICE
from tests.kernels.replaced import Replaced
from tests.workers.fake_gpu import FakeGpu
from workers.models.weights import WeightSlice

ROOT = Path(__file__).parents[2]


def small(kernels: Kernels = TRITON) -> Check:
    torch.manual_seed(0)
    return Check(device=DEVICE, small=True, backends={"triton": kernels})


def test_every_section_reports_and_passes(tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--small", "--out", str(out)]
    environment = os.environ | ({} if DEVICE.type == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert list(record["sections"]) == list(gpu_check.SECTIONS)
    assert record["times_are_real"] is (DEVICE.type == "cuda")
    for name, section in record["sections"].items():
        assert section["rows"] and not section["failed"] and section["ended_early"] is None, name
    assert sum(limit_s for _, limit_s in gpu_check.SECTIONS.values()) <= 535
    assert list(tmp_path.iterdir()) == [out]
    tables = done.stdout.partition("all of it")[2]
    assert all(f"{name}: " in tables for name in gpu_check.SECTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_that_a_kernel_leaves_as_it_was_holds_no_number(dtype: torch.dtype) -> None:
    with gpu_check_numerics.poisoned():
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
            gpu_check_numerics.attention,
            {"paged_attention": off_by_a_hundredth(TRITON.paged_attention)},
        ),
        (gpu_check_numerics.attention, {"paged_attention": reads_too_far}),
    ],
)
def test_wrong_kernel_does_not_pass(part: Callable[..., None], wrong: dict[str, Any]) -> None:
    kernels = Replaced(TRITON, **wrong)
    check = small(kernels)
    part(check, *(["triton"] if part is gpu_check_numerics.attention else []), kernels)
    failed = {row["name"].split()[0] for row in check.rows if not row["passed"]}
    assert failed == {"triton" if part is gpu_check_numerics.attention else next(iter(wrong))}


@pytest.mark.parametrize("case", gpu_check_numerics._ATTENTION_CASES)
def test_batches_reach_every_way_of_launching_attention(
    case: tuple[int, int, int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the 132 multiprocessors that a CPU is assumed to have."""
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
    heads, kv_heads, dim, block_size = case[0], case[1], case[2], case[3] or 16
    one_part: list[int] = []
    for seq_lens, query_lens in gpu_check_numerics._BATCHES.values():
        num_blocks = sum(-(-seq_len // block_size) for seq_len in seq_lens)
        attn = attention_of(seq_lens, query_lens, torch.arange(num_blocks), block_size, DEVICE)
        attn = with_parts(attn, query_lens, TRITON, kv_heads)
        if attn.decode is not None:
            one_part.append(int((attn.decode.start_B1.diff() == 1).sum()))
        cache = torch.empty(
            num_blocks, block_size, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE
        )
        q_THD = torch.empty(sum(query_lens), heads, dim, dtype=torch.bfloat16, device=DEVICE)
        gpu_attention.paged_attention(q_THD, cache, cache, attn, 1.0)
    # Decode always uses scratch memory, for rows of one part and of several.
    assert launched == {("prefill", 64, False), ("prefill", 128, False), ("decode", 16, False)}
    assert min(one_part) < 5 and (max(one_part) > 50 or kv_heads == 2)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "row_best",
            lambda logits: (lambda best: (best[0], best[1] + 1, best[2]))(
                TRITON.sampling.row_best(logits)
            ),
        ),
        ("list_nearest", lambda gaps, k, most: TRITON.sampling.list_nearest(gaps, k, most) + 1),
        ("gap_histogram", lambda *args: TRITON.sampling.gap_histogram(*args) * 2),
        ("block_weights", lambda gaps, limit: TRITON.sampling.block_weights(gaps, limit - 1.0)),
        (
            "pick_column",
            lambda gaps, limit, sums, index: TRITON.sampling.pick_column(
                gaps, limit, sums, index + 1
            ),
        ),
        (
            "draw_index",
            lambda seeds, places, kept, rank: TRITON.sampling.draw_index(
                seeds, places, kept, rank + 1
            ),
        ),
    ],
)
def test_wrong_sampling_does_not_pass(name: str, wrong: Callable[..., Any]) -> None:
    gaps = gpu_check_numerics._gap_rows(small(), gpu_check_numerics._logits(small(), "ties", 140))
    part = {
        "row_best": gpu_check_numerics._same_best,
        "list_nearest": gpu_check_numerics._same_lists,
        "gap_histogram": gpu_check_numerics._same_histograms,
        "block_weights": gpu_check_numerics._same_weights,
        "pick_column": gpu_check_numerics._same_picks,
        "draw_index": lambda kernels, gaps: gpu_check_numerics._same_draws(small(), kernels),
    }[name]
    assert not part(Replaced(TRITON.sampling, **{name: wrong}), gaps)["passed"]


def test_backend_with_other_tokens_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Replaced(TRITON, silu_and_mul=lambda gate_up: -TRITON.silu_and_mul(gate_up))
    monkeypatch.setattr(backend, "TRITON_KERNELS", wrong)
    check = small(wrong)
    gpu_check_engine.tokens(check)
    assert "float32 triton eager" in {
        row["name"] for row in check.rows if not row.get("passed", True)
    }


def test_tokens_of_16_bits_must_begin_as_those_of_the_reference() -> None:
    outputs: dict[str, list[list[int]]] = {}
    rows = [
        gpu_check_engine._compare(small(), outputs, name, "bfloat16", "reference", True)
        for name in ("a", "b")
    ]
    assert all(row["passed"] and row["equal"] == 1 for row in rows)
    outputs["a"] = [[token + 1 for token in output] for output in outputs["a"]]
    row = gpu_check_engine._compare(small(), outputs, "b", "bfloat16", "reference", True)
    assert not row["passed"] and row["equal"] == 0 and row["differ"] == row["requests"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has graphs of its own")
def test_tokens_through_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("workers.worker.open_device", lambda kind, index: gpu)
    monkeypatch.setattr("workers.worker.find_kernels", lambda config: gpu.recordable(TRITON))
    outputs: dict[str, list[list[int]]] = {}
    rows = [
        gpu_check_engine._compare(small(), outputs, str(eager), "float32", "triton", eager)
        for eager in (True, False)
    ]
    assert all(row["passed"] for row in rows) and len(outputs) == 2
    assert sum(graph.num_replays for graph in gpu.graphs) > 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_default_model_must_answer(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check(device=torch.device("cpu"), small=True, backends={})
    row = gpu_check_model._answers(check, "cpu", kv_cache_dtype)
    assert row["passed"] and "85" in row["answers"]
    monkeypatch.setattr(gpu_check_model, "_ANSWERS", {"What is 47 + 38?": "86"})
    assert not gpu_check_model._answers(check, "cpu", kv_cache_dtype)["passed"]


@pytest.mark.parametrize(("code", "passed"), [(0, True), (99, False)])
def test_what_a_checker_reports_counts(tmp_path: Path, code: int, passed: bool) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '=== ERROR SUMMARY: {code} errors'\nexit {code}\n")
    tool.chmod(0o755)
    row = gpu_check_model._run_tool(str(tool), "memcheck", 5.0)
    assert row == {"said": f"=== ERROR SUMMARY: {code} errors", "rows": 0, "passed": passed}


def test_a_step_is_told_by_kinds_of_kernels_and_gaps() -> None:
    spans = [
        ("decode_kernel", 0.0, 10.0),
        ("nvjet_tst_64x8", 10.0, 30.0),
        ("ampere_bf16_s16816gemm_bf16_128x64", 40.0, 44.0),
        ("_add_rms_norm", 44.0, 46.0),
        ("_row_best", 43.0, 50.0),  # beside the others
        ("Memcpy HtoD (Pinned -> Device)", 60.0, 61.0),
    ]
    row = gpu_check_engine.parts_of([(n, 1000 * b, 1000 * e) for n, b, e in spans], steps=2)
    assert row == {
        "attention_ms": 5.0,
        "sampling_ms": 3.5,
        "elementwise_ms": 1.0,
        "products_ms": 12.0,
        "others_ms": 0.5,
        "gaps_ms": 10.0,
    }


def test_every_kernel_of_ours_has_its_kind() -> None:
    from tests.kernels.test_gpu_compile import launched_kernels

    for module, name in launched_kernels():
        row = gpu_check_engine.parts_of([(name, 0.0, 1000.0)], steps=1)
        kind = next(key for key, ms in row.items() if ms)
        wanted = {"attention": "attention_ms", "sampling": "sampling_ms"}
        wanted |= {"elementwise": "elementwise_ms", "tables": "others_ms"}
        assert kind == wanted[module.rpartition(".")[2]], name


def test_time_of_flash_attn_is_told_as_a_multiple_of_ours() -> None:
    check = small()
    check.backends["flash_attn"] = REFERENCE
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


def section_of(part: Path, run: Callable[[Check], None], limit_s: float) -> Section:
    run_section(small(), run, part, time.monotonic() + limit_s)
    section: Section = json.loads(part.read_text())
    return section


def test_section_out_of_time_keeps_its_rows_and_a_broken_one_says_why(tmp_path: Path) -> None:
    part = tmp_path / "part.json"

    def slow(check: Check) -> None:
        check.add("first", lambda: {"passed": True})
        assert [row["name"] for row in json.loads(part.read_text())["rows"]] == ["first"]
        check.add("second", lambda: time.sleep(20) or {})  # type: ignore[func-returns-value]

    def broken(check: Check) -> None:
        check.add("raises", lambda: dict[str, Any]()["x"])
        check.add("goes on", lambda: {"passed": True})
        raise RuntimeError("no such device")

    section = section_of(part, slow, 0.2)
    assert [row["name"] for row in section["rows"]] == ["first"] and "out of time" in section[
        "ended_early"
    ]
    section = section_of(part, broken, 5.0)
    assert (section["failed"], section["ended_early"]) == (
        ["raises"],
        "RuntimeError: no such device",
    )
    assert "KeyError" in section["rows"][0]["error"] and section["rows"][1]["passed"]
    assert "raises" in gpu_check.table({"broken": section}, brief=True)


def test_end_of_time_that_a_destructor_swallows_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __del__(self) -> None:
            time.sleep(0.5)

    def swallows(check: Check) -> None:
        slow = Slow()
        del slow  # Python drops exceptions raised here
        check.add("swallowed", lambda: {"passed": True})
        time.sleep(20)

    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    section = section_of(tmp_path / "part.json", swallows, 0.2)
    assert len(dropped) == 1
    assert section["rows"] and "out of time" in section["ended_early"] and section["seconds"] < 5


# Sections without torch, which start at once. Each adds a row, then ends in its own way.
ENDINGS = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "left": "print('cannot go on', file=sys.stderr); os._exit(3)",
    "silent": "os._exit(0)",
    "fine": "pass",
}
SECTION = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks.gpu_check_process import run_section

def section(check):
    check.rows.append({{"name": "first", "passed": True}})
    check.on_row()
    {ending}
    check.rows.append({{"name": "last", "passed": True}})

run_section(SimpleNamespace(rows=[], on_row=None), section, Path(sys.argv[1]), float(sys.argv[2]))
"""


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


def test_process_that_dies_or_hangs_keeps_its_rows_and_the_next_sections_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu_check, "_MARGIN_S", 0.0)
    out = tmp_path / "made" / "out.json"
    known: list[list[str]] = []

    def command(name: str, part: Path, until_s: float) -> list[str]:
        known.append(list(json.loads(out.read_text())["sections"]) if out.exists() else [])
        return [
            sys.executable,
            "-c",
            SECTION.format(ending=ENDINGS[name]),
            str(part),
            str(until_s + 60),
        ]

    record: dict[str, Any] = {"sections": {}}
    gpu_check.run_sections(record, dict.fromkeys(ENDINGS, 5.0), out, command)
    sections = json.loads(out.read_text())["sections"]
    assert known == [list(ENDINGS)[:place] for place in range(len(ENDINGS))]
    assert {name: section["ended_early"] for name, section in sections.items()} == {
        "killed": "SIGKILL",
        "stopped": "hung and was killed",
        "left": "exit code 3: cannot go on",
        "silent": "has not ended",
        "fine": None,
    }
    rows = {name: [row["name"] for row in section["rows"]] for name, section in sections.items()}
    assert rows == {name: ["first"] for name in ENDINGS} | {"fine": ["first", "last"]}
    assert "cannot go on" in capfd.readouterr().err and list(out.parent.iterdir()) == [out]


def test_section_that_never_starts_says_so(tmp_path: Path) -> None:
    (tmp_path / "out_part.json").write_text(
        '{"rows": [{"name": "of another"}], "failed": [], "ended_early": null}'
    )
    command = [sys.executable, "-c", "raise SystemExit('no such module')"]
    record: dict[str, Any] = {"sections": {}}
    gpu_check.run_sections(record, {"speed": 30.0}, tmp_path / "out.json", lambda *_: command)
    assert record["sections"]["speed"]["ended_early"] == "exit code 1: no such module"
    assert record["sections"]["speed"]["rows"] == []


def test_later_sections_are_told_the_measured_ceilings() -> None:
    rows = [{"name": "device"}, {"name": "ceilings", "tb_per_s": 4.3, "tflop_per_s": 790.0}]
    command = partial(gpu_check.command_of, name="speed", part=Path("part.json"), until_s=7.5)
    told = command({"small": True, "sections": {"machine": {"rows": rows}}})
    assert told[-4:] == ["--tb-per-s", "4.3", "--tflop-per-s", "790.0"] and "--small" in told
    assert "--tb-per-s" not in command({"small": False, "sections": {}})
