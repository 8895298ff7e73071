"""The sweep over launches of attention, with tiny shapes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_sweep
from benchmarks.gpu_check_speed import Pool
from benchmarks.gpu_sweep import Case, best_of, line_of
from kernels.gpu.attention_launch import LaunchConfig
from tests.benchmarks.gpu_check_small import small
from tests.kernels.gpu_device import DEVICE


def test_every_launch_is_timed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "sweep.json"
    monkeypatch.setattr(sys, "argv", ["gpu_sweep", "--small", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu_sweep.main()
    assert not ended.value.code
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in rows), rows
    launches = {
        row["name"]: [r["launch"] for r in rows if r["name"] == row["name"]] for row in rows
    }
    assert all(labels[0] == "as chosen" for labels in launches.values())
    assert {"4 warps, 4 stages", "9 programs per processor"} < set(
        launches["decode 16 bits 3 x 40"]
    )
    assert len(launches["decode fp8 3 x 40"]) >= 5 and len(launches["prefill 20"]) == 2
    assert all(row["passed"] and row["roundings"] <= 4 for row in rows)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines == [*map(line_of, rows), "", "best", *best_of(rows)]
    assert record["times_are_real"] is (DEVICE.type == "cuda")


def test_a_launch_with_another_output_or_an_error_is_marked() -> None:
    check = small()
    case = Case(name="prefill 20", heads=(2, 1, 64), block_size=16, seq_lens=[20], query_lens=[20])

    def broken(launch: LaunchConfig) -> LaunchConfig:
        raise RuntimeError("no registers left")

    launches: dict[str, Callable[[LaunchConfig], LaunchConfig]] = {
        "as chosen": lambda launch: launch,
        "broken": broken,
    }
    pool, until_s = Pool.allocate(check), time.monotonic() + 600
    gpu_sweep._add_launches(check, pool, case, launches, [], until_s)
    assert [row["passed"] for row in check.rows] == [True, False]
    gpu_sweep._add_launches(check, pool, case, launches, [], time.monotonic())
    assert len(check.rows) == 2, "no launch is timed once its time is over"
    other = torch.ones(20, 2, 64, dtype=check.dtype, device=check.device)
    row = gpu_sweep._compared(
        check, Pool.allocate(check), case, "other", lambda *_: other, [other * 1.01]
    )
    assert not row["passed"]
    assert "WRONG" in line_of(check.rows[0] | row)


def test_the_best_launch_of_a_batch_is_one_that_is_right() -> None:
    row = {"name": "prefill 20", "heads": "2/1 x 64", "block": 16, "floor_us": 1.0}
    rows = [
        row | {"launch": "as chosen", "us": 6.0, "passed": True},
        row | {"launch": "wrong", "us": 1.0, "passed": False, "roundings": 90.0},
        row | {"launch": "other", "us": 4.0, "passed": True},
        {"name": "prefill 20", "error": "no registers left", "passed": False},
    ]
    [line] = best_of(rows)
    assert line.startswith(line_of(rows[2])) and line.endswith("as chosen: x 1.50")
