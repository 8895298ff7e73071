"""Invalid requests get an answer that says so, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.api import fuzz
from tests.cluster.api.scripted import echo_number, serve
from tests.cluster.processes import wait_until


def test_wrong_requests_are_answered_and_leave_nothing() -> None:
    outcomes = fuzz.run(5000, seed=1)
    assert outcomes["200"] > 50 and outcomes["400"] > 1000, outcomes
    assert outcomes["left while sending"] > 50 and outcomes["left while reading"] > 50, outcomes


@pytest.mark.timeout(200)
def test_requests_made_from_the_document_are_answered(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "schemathesis"
    with serve(echo_number) as server:
        command = [
            *(str(program), "run", f"{server.url}/openapi.json", "--max-examples", "15"),
            *("--checks", "not_a_server_error", "--seed", "1", "--no-color"),
            *("--phases", "fuzzing"),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        # The server may not have noticed yet that the program has left.
        wait_until(
            lambda: server.api.admission.num_open_outputs == 0, "the end of the last request"
        )
