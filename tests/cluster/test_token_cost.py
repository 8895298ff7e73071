"""The benchmarks of a streamed token run the real engine over ranks that only wait."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from benchmarks.several_apis import run_apis
from configs.paths import SOURCE_ROOT

pytestmark = pytest.mark.engine


def test_streams_of_waiting_ranks_are_measured_by_process() -> None:
    options = ("--way", "streams", "--rows", "16", "--tokens", "150")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.token_cost", *options],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,  # its processes are found by their session
        check=True,
        timeout=120,
    )
    line = json.loads(done.stdout)
    assert 0 < line["share_of_device"] <= 1.05
    assert min(line[f"{kind}_us"] for kind in ("api", "driver", "rank")) > 0


def test_streams_of_two_api_processes_are_measured_by_process() -> None:
    args = argparse.Namespace(step_ms=10.0, rows=16, tokens=100, steps_ahead=3)
    line = run_apis(args, num_apis=2)
    assert 16 * 50 < line.pop("tokens") <= 16 * 101  # chunks: one begins an answer
    assert set(line) == {"api", "driver", "rank"} and min(line.values()) > 0
