"""What one request may do to others: a hostile one holds the event loop for milliseconds, and takes
little memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from configs.paths import SOURCE_ROOT
from tests.cluster.api.hostile import ANSWERS, ENCODED, HONEST, REQUESTS

MOST_STALL_MS = 100  # 10 to 35 on a quiet processor
MOST_ERROR_BYTES = 4096
MOST_DECODED_MIB = 40  # a body of 8 MiB, and what reading it takes
MOST_MEMORY_MIB = 300  # a text of 8 characters per token of the context takes 120 while encoded

MOST_LEFT_MIB = 200  # by all requests so far


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """The lines of the program, by the names of the requests. What seems to stall is measured up to
    three times, because other programs use the processor too; a stall of our own comes each time.
    """
    lines = measure()
    for _ in range(2):
        stalling = [name for name, line in lines.items() if line["stall_ms"] >= MOST_STALL_MS]
        if not stalling:
            break
        for name, line in measure(*stalling).items():
            lines[name]["stall_ms"] = min(lines[name]["stall_ms"], line["stall_ms"])
    return lines


def measure(*names: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.api.hostile", *names],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_hostile_request_is_answered_without_stalling_others(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    line = measured[name]
    assert line["status"] in (200, 400), line
    assert line["status"] == 200 or line["answer_bytes"] < MOST_ERROR_BYTES, line
    assert line["stall_ms"] < MOST_STALL_MS, line
    assert line["memory_mib"] < MOST_MEMORY_MIB, line


@pytest.mark.parametrize("name", [*HONEST, *ANSWERS])
def test_a_large_request_is_answered_without_stalling_others(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    line = measured[name]
    assert line["status"] == 200, line
    assert line["stall_ms"] < MOST_STALL_MS, line


def test_what_requests_took_is_returned(measured: dict[str, dict[str, Any]]) -> None:
    left = {name: line["left_mib"] for name, line in measured.items()}
    assert max(left.values()) < MOST_LEFT_MIB, left


@pytest.mark.parametrize("name", ["far too many alternatives", "a prompt in far too many outputs"])
def test_an_answer_that_would_be_too_large_is_refused(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    line = measured[name]
    assert line["status"] == 400 and "too many" in line["answer"], line


@pytest.mark.parametrize("name", ENCODED)
def test_an_encoded_body_is_decoded_within_the_limit_and_beside_the_event_loop(
    measured: dict[str, dict[str, Any]], name: str
) -> None:
    line = measured[name]
    assert line["status"] == (413 if "bomb" in name else 200), line
    assert line["stall_ms"] < MOST_STALL_MS, line
    assert line["memory_mib"] < MOST_DECODED_MIB, line
