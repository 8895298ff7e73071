"""Work on threads of its own neither waits without bound nor holds up the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

import cluster.api.app as app
from cluster.api.app import MAX_WAITING_TRACES
from cluster.api.runner import MAX_WAITING_TOKENIZATIONS, NUM_TOKENIZE_THREADS
from cluster.api.threads import BoundedThreadPool
from scheduler.errors import OverloadedError
from scheduler.messages import EngineStats
from tests.cluster.api.scripted import (
    TOKENIZER,
    ScriptedEngine,
    echo_number,
    make_api,
    serve,
    wait_until,
)


def test_a_call_returns_what_its_work_returns_or_raises() -> None:
    async def check() -> None:
        queue = BoundedThreadPool("testing", 1)
        assert await queue.run(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            await queue.run(lambda: 1 / 0)

    asyncio.run(check())


def test_a_call_beyond_the_queue_is_refused_until_another_ends() -> None:
    async def check() -> None:
        queue, gate = BoundedThreadPool("testing", 1, max_waiting_calls=1), threading.Event()
        calls = [asyncio.ensure_future(queue.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 requests for testing"):
            await queue.run(gate.wait)
        gate.set()
        await asyncio.gather(*calls)
        assert await queue.run(gate.wait)

    asyncio.run(check())


def test_a_canceled_call_leaves_the_queue_unless_it_runs() -> None:
    async def check() -> None:
        queue, gate = BoundedThreadPool("testing", 1, max_waiting_calls=1), threading.Event()
        running, waiting = (asyncio.ensure_future(queue.run(gate.wait)) for _ in range(2))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0)
        queue.check_room()
        running.cancel()
        third = asyncio.ensure_future(queue.run(gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            queue.check_room()
        gate.set()
        assert await third

    asyncio.run(check())


def test_an_engine_that_hangs_is_asked_for_its_counters_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "MAX_STATS_AGE_S", 0.0)
    monkeypatch.setattr(app, "API_STATS_TIMEOUT_S", 0.01)
    engine, gate = ScriptedEngine(echo_number, step_s=0.0), threading.Event()
    stats = engine.stats

    def hang() -> EngineStats:
        assert gate.wait(10)
        return stats()

    async def check() -> None:
        api = make_api(engine)
        monkeypatch.setattr(api._client, "stats", hang)
        for _ in range(5):
            with pytest.raises(OverloadedError, match="did not answer"):
                await api.stats()
        assert len(api._stats_threads.calls) == 1
        gate.set()
        monkeypatch.setattr(app, "API_STATS_TIMEOUT_S", 10.0)
        assert await api.stats() == stats()

    asyncio.run(check())
    engine.close()


@contextmanager
def many(work: Callable[[], httpx.Response], count: int) -> Iterator[list[Future[httpx.Response]]]:
    """Sends requests at the same time."""
    with ThreadPoolExecutor(count) as threads:
        yield [threads.submit(work) for _ in range(count)]


def statuses_of(calls: list[Future[httpx.Response]]) -> list[int]:
    return [call.result().status_code for call in calls if call.done()]


def test_a_burst_of_texts_to_tokenize_is_refused_and_holds_up_no_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, encode = threading.Event(), TOKENIZER.encode

    def slow(text: str, most: int | None = None) -> list[int]:
        if text.startswith("long"):
            gate.wait(20)
        return encode(text, most)

    monkeypatch.setattr(TOKENIZER, "encode", slow)
    count = NUM_TOKENIZE_THREADS + MAX_WAITING_TOKENIZATIONS + 5
    with serve() as server:
        url = server.url

        def tokenize() -> httpx.Response:
            return httpx.post(f"{url}/tokenize", json={"prompt": "long text"}, timeout=30)

        with many(tokenize, count) as calls:
            wait_until(
                lambda: (
                    len(server.api.runner.tokenize_threads.calls)
                    == NUM_TOKENIZE_THREADS + MAX_WAITING_TOKENIZATIONS
                )
            )
            prompt = {"prompt": "Hi", "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/completions", json=prompt, timeout=10)
            assert answer.status_code == 200
            wait_until(lambda: statuses_of(calls) == [503] * 5)
            gate.set()
        assert statuses_of(calls).count(200) == NUM_TOKENIZE_THREADS + MAX_WAITING_TOKENIZATIONS


def test_a_burst_of_traces_is_refused_and_leaves_the_server_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    with serve() as server:
        url = server.url

        def slow(seconds: float) -> list[object]:
            gate.wait(20)
            return []

        monkeypatch.setattr(server.api._client, "records", slow)
        count = 1 + MAX_WAITING_TRACES + 3
        with many(lambda: httpx.get(f"{url}/debug/trace", timeout=30), count) as calls:
            wait_until(lambda: len(server.api._trace_threads.calls) == 1 + MAX_WAITING_TRACES)
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
            wait_until(lambda: statuses_of(calls) == [503] * 3)
            gate.set()
        assert statuses_of(calls).count(200) == 1 + MAX_WAITING_TRACES
