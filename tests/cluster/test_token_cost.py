"""The benchmark of a streamed token runs the real engine over ranks that only wait."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from configs.paths import CHECKOUT

pytestmark = pytest.mark.engine


def test_streams_of_waiting_ranks_are_measured_by_process() -> None:
    options = ("--way", "streams", "--rows", "16", "--tokens", "150")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.token_cost", *options],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        start_new_session=True,  # its processes are found by their session
        check=True,
        timeout=120,
    )
    line = json.loads(done.stdout)
    assert 0 < line["share_of_device"] <= 1.05
    assert min(line[f"{kind}_us"] for kind in ("api", "driver", "rank")) > 0
