"""The benchmarks of a streamed token run the real engine over ranks that only wait."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.several_apis import run_apis
from configs.paths import SOURCE_ROOT

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def token_cost() -> Iterator[subprocess.Popen[bytes]]:
    """A benchmark that runs beside the other test."""
    options = ("--way", "streams", "--rows", "16", "--tokens", "150")
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.token_cost", *options],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,  # its processes are found by their session
    ) as program:
        yield program
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


@pytest.mark.usefixtures("token_cost")
def test_streams_of_two_api_processes_are_measured_by_process() -> None:
    args = argparse.Namespace(step_ms=10.0, rows=16, tokens=100, steps_ahead=3)
    line = run_apis(args, num_apis=2)
    assert 16 * 50 < line.pop("tokens") <= 16 * 101  # chunks: one begins an answer
    assert set(line) == {"api", "driver", "rank"} and min(line.values()) > 0


def test_streams_of_waiting_ranks_are_measured_by_process(
    token_cost: subprocess.Popen[bytes],
) -> None:
    printed, _ = token_cost.communicate(timeout=120)
    assert token_cost.returncode == 0
    line = json.loads(printed)
    assert 0 < line["share_of_device"] <= 1.05
    assert min(line[f"{kind}_us"] for kind in ("api", "driver", "rank")) > 0
