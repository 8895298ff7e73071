"""The sweep over launches of attention, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_sweep import line_of
from tests.kernels.gpu_device import DEVICE

ROOT = Path(__file__).parents[2]


def test_every_launch_is_timed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "made" / "sweep.json"
    command = [sys.executable, "-m", "benchmarks.gpu_sweep", "--small", "--out", str(out)]
    environment = os.environ | ({} if DEVICE.type == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in rows), rows
    launches = {
        row["name"]: [r["launch"] for r in rows if r["name"] == row["name"]] for row in rows
    }
    assert all(labels[0] == "as chosen" for labels in launches.values())
    assert {"heads adjacent", "places adjacent"} < set(launches["decode 16 bits 3 x 40"])
    assert len(launches["decode fp8 3 x 40"]) >= 5 and len(launches["prefill 20"]) == 2
    assert done.stdout.splitlines()[1:] == [line_of(row) for row in rows]
    assert record["times_are_real"] is (DEVICE.type == "cuda")
