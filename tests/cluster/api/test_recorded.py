"""Requests as real programs sent them, with shortened texts, are answered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.api.scripted import LIMITS, Server, serve

BODIES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
PATHS = {"claude_code": "/v1/messages", "codex": "/v1/responses"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sizes = dataclasses.replace(LIMITS, max_model_len=8192)
    with serve(lambda _: "<think>\nI add.\n</think>\n\nIt is 85.", sizes=sizes) as running:
        yield running


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.stem)
def test_a_recorded_request_is_answered(server: Server, body: Path) -> None:
    [path] = [path for program, path in PATHS.items() if body.stem.startswith(program)]
    fields = json.loads(body.read_text()) | {"stream": False}
    whole = httpx.post(server.url + path, json=fields)
    assert whole.status_code == 200, whole.text
    streamed = httpx.post(server.url + path, json=fields | {"stream": True})
    assert streamed.status_code == 200 and "event: error" not in streamed.text
    last = "message_stop" if path == "/v1/messages" else "response.completed"
    assert f"event: {last}\n" in streamed.text
