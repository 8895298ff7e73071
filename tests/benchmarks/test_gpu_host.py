"""What a GPU costs the host, with tiny shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tests.kernels.gpu_device  # noqa: F401
from benchmarks import gpu_host


def test_every_call_and_stage_is_timed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["gpu_host", "--small", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu_host.main()
    assert not ended.value.code
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    calls = {name: row for name, row in rows.items() if "us" in row}
    steps = {name: row for name, row in rows.items() if "step_ms" in row}
    assert calls.keys() | steps.keys() == rows.keys()
    assert "upload of 4 arrays" in calls and "eager, batch 2, greedy" in steps
    assert all(0 < row["least"] <= row["us"] for row in calls.values())
    stages = ("prepare_ms", "forward_ms", "sample_ms")
    assert all(row[stage] > 0 for row in steps.values() for stage in stages)
