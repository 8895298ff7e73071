"""Requests as real programs sent them, with neutral texts, are answered. `python -m tests.clients
--record DIR` writes such files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.api.scripted import LIMITS, Server, serve

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
LAST_EVENTS = {
    "/v1/chat/completions": "data: [DONE]\n",
    "/v1/completions": "data: [DONE]\n",
    "/v1/messages": "event: message_stop\n",
    "/v1/responses": "event: response.completed\n",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sizes = dataclasses.replace(LIMITS, max_model_len=32_768, num_blocks=20_000)
    with serve(lambda _: "<think>\nI add.\n</think>\n\nIt is 85.", sizes=sizes) as running:
        yield running


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_request_is_answered_as_it_asks(server: Server, file: Path) -> None:
    recorded: dict[str, Any] = json.loads(file.read_text())
    path, headers, body = recorded["path"], recorded["headers"], recorded["body"]
    answer = httpx.post(server.url + path, headers=headers, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert LAST_EVENTS[path.partition("?")[0]] in answer.text
        assert '"error":{' not in answer.text
    else:
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.stem.startswith(("claude", "codex"))],
    ids=lambda file: file.stem,
)
def test_a_recorded_request_is_answered_whole_too(server: Server, file: Path) -> None:
    recorded = json.loads(file.read_text())
    body = recorded["body"] | {"stream": False}
    answer = httpx.post(server.url + recorded["path"], json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def test_programs_of_each_api_are_recorded() -> None:
    paths = {json.loads(file.read_text())["path"].partition("?")[0] for file in FILES}
    assert paths >= set(LAST_EVENTS)
