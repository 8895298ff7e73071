"""What a request has taken is free as soon as it is answered."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.api.hostile import send
from tests.cluster.api.scripted import ScriptedEngine, echo_number, make_api

NUM_SENT = 4
BODY_BYTES = 2**20
MOST_LEFT_BYTES = BODY_BYTES  # the scripted engine's thread has its last request until the next
PADDING = " " * BODY_BYTES

MANY = {"prompt": [1] * 1000, "max_tokens": 2, "n": 128}

# By name: path, body, status of the answer.
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "refused before it is parsed": ("/v1/completions", {"prompt": [{}] * 2**18}, 400),
    "refused once it is parsed": ("/v1/completions", {"prompt": "Hi", "stop": ["no"] * 2**17}, 400),
    "refused by the model of its fields": ("/v1/completions", {"prompt": 5, "user": {}}, 400),
    "refused as a job": ("/v1/completions", {"prompt": "Hi", "top_p": 2, "user": "me"}, 400),
    "refused once it is tokens": ("/v1/completions", {"prompt": [1] * 2**17}, 400),
    "refused as a text": ("/tokenize", {"prompt": "Hi", "messages": []}, 400),
    "answered": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, 200),
    "streamed": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "stream": True}, 200),
    "streamed in many outputs": ("/v1/completions", MANY | {"stream": True}, 200),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles of references are left alone: nobody knows when the collector comes for them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def left_bytes(send_once: Callable[[], Any]) -> int:
    """What some requests leave behind, after one that fills caches."""
    await send_once()
    tracemalloc.start()
    try:
        for _ in range(NUM_SENT):
            await send_once()
            await asyncio.sleep(0.05)
        until_s = time.monotonic() + 1.0  # for threads to let go of what they have done
        while tracemalloc.get_traced_memory()[0] >= MOST_LEFT_BYTES and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_free_again_without_the_collector(name: str, no_collector: None) -> None:
    path, fields, expected = BODIES[name]
    body = (json.dumps(fields) + PADDING).encode()

    async def check() -> int:
        engine = ScriptedEngine(echo_number, 0.0)
        api = make_api(engine)

        async def send_once() -> None:
            status, answer = await send(api, path, body)
            assert status == expected, answer

        try:
            return await left_bytes(send_once)
        finally:
            engine.close()

    assert asyncio.run(check()) < MOST_LEFT_BYTES
