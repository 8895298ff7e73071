"""Which parts of a stream are written without a turn of its request's task."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.api.exchange import Exchange
from tests.cluster.api.scripted import ScriptedEngine, serve

NUM_OUTPUTS = 4


@pytest.fixture
def written_now(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written without a turn."""
    parts: list[bytes] = []
    write = Exchange.send_events_nowait

    def note(exchange: Exchange, data: bytes) -> None:
        parts.append(data)
        write(exchange, data)

    monkeypatch.setattr(Exchange, "send_events_nowait", note)
    return parts


@pytest.fixture
def first_output_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other outputs begin together, once the first one has three tokens: they find the prompt
    in the cache.
    """
    step = ScriptedEngine._step

    def wait_for_first(engine: ScriptedEngine, request_id: str, *entry: Any) -> None:
        generation, output = entry[:2]
        if output is generation.outputs[0] or len(generation.completions[0].token_ids) >= 3:
            step(engine, request_id, *entry)

    monkeypatch.setattr(ScriptedEngine, "_step", wait_for_first)


@pytest.mark.parametrize(
    ("path", "asked", "beginning"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True},
            b'"prompt_token_ids"',
        ),
        ("/v1/completions", {"prompt": "Say:", "return_token_ids": True}, b'"prompt_token_ids"'),
        ("/v1/completions", {"prompt": "Say:", "echo": True}, b"Say:"),
    ],
)
def test_outputs_begin_in_turns_because_each_may_repeat_a_long_prompt(
    path: str,
    asked: dict[str, Any],
    beginning: bytes,
    written_now: list[bytes],
    first_output_is_early: None,
) -> None:
    with serve(step_s=0.02) as server:
        body = asked | {"n": NUM_OUTPUTS, "stream": True, "max_tokens": 8}
        answer = httpx.post(server.url + path, json=body).content
    assert answer.endswith(b"data: [DONE]\n\n") and answer.count(beginning) >= NUM_OUTPUTS
    assert written_now and beginning not in b"".join(written_now)
