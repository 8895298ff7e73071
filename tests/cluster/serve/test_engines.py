"""Several engines of one application: which one gets a request, and what happens if one is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cluster.client.outputs import Generation, OutputFollower
from cluster.serve.pool import EnginePool
from scheduler.messages import EngineStats
from tests.cluster.processes import processes, wait_until
from tests.cluster.serve.served import LONG, num_leases, stats_of, wait_until_idle
from tests.scheduler.helpers import make_request

pytestmark = [pytest.mark.engine, pytest.mark.programs]


def test_requests_that_are_aborted_at_any_time_are_counted_nowhere(
    served: tuple[str, Any], loop: asyncio.AbstractEventLoop
) -> None:
    """Whether the lease is being requested, chosen or granted. The number of open requests decides
    where the next one goes.
    """
    from ray import serve

    url, _ = served
    rng = random.Random(0)

    async def make() -> EnginePool:
        engines = serve.get_deployment_handle("engine", "eagleray")
        return EnginePool(engines, block_size=16, answer_limit_s=5.0, lease_limit_s=60.0)

    with ThreadPoolExecutor(8) as threads:
        pool = asyncio.run_coroutine_threadsafe(make(), loop).result(5)

        def submit_and_abort(number: int) -> None:
            request = make_request(f"aborted {number}", [1, 2, 3], max_tokens=900)
            one = Generation(None, [OutputFollower(request, 0, None, None)])
            threading.Timer(rng.random() * 0.03, pool.abort, ([one],)).start()
            pool.submit([one])
            one.done_future.result(10)

        list(threads.map(submit_and_abort, range(300)))
        table = pool._leases._table
        assert len(table._engines) == 2
        assert (
            not pool._routed_requests
            and not table._engine_by_request
            and not +table._num_open_requests_by_engine
        )
        wait_until_idle(url, 10.0)


def engine_stats() -> list[EngineStats]:
    """The counters of each engine."""
    from ray import serve

    engines = serve.get_deployment_handle("engine", "eagleray")
    found: list[EngineStats] = engines.broadcast("stats").results(timeout_s=10)
    return found


def test_metrics_speak_for_all_replicas(served: tuple[str, Any]) -> None:
    url, _ = served
    httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).raise_for_status()
    numbers, engines = stats_of(url), engine_stats()
    assert len(engines) == 2 == numbers["eagleray_ready"]
    assert numbers["eagleray_kv_blocks"] == sum(each.num_blocks for each in engines)
    assert numbers["eagleray_num_requests_running"] == 0 < numbers["eagleray_steps_total"]


def num_admitted() -> dict[str, int]:
    """How many requests each engine has had."""
    from ray import serve

    handle = serve.get_app_handle("eagleray")
    statuses = handle.engine_statuses.remote().result(timeout_s=10)
    return {status.replica_id: status.num_admitted for status in statuses}


def engine_of(url: str, session: str) -> str:
    """The engine that a session goes to."""
    before = num_admitted()
    headers = {"x-session-id": session}
    httpx.post(f"{url}/v1/completions", json={"prompt": session, "max_tokens": 1}, headers=headers)
    return next(name for name, count in num_admitted().items() if count != before[name])


def talk(url: str, salt: str, session_of: Callable[[int, int], str | None]) -> int:
    """Eight conversations of six turns, all at once; the number of tokens found in the cache."""
    cached = [0] * 8

    def conversation(number: int) -> None:
        messages: list[Any] = []
        for turn in range(6):
            words = " ".join(f"{number * 100 + turn * 7 + i} apples and" for i in range(6))
            messages.append({"role": "user", "content": f"{words} what is 47 + 38?"})
            session = session_of(number, turn)
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={"messages": messages, "max_tokens": 20, "seed": 1, "cache_salt": salt},
                headers={"x-session-id": session} if session else {},
                timeout=60,
            ).json()
            cached[number] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append(answer["choices"][0]["message"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(conversation, range(8)))
    return sum(cached)


def test_conversations_find_what_they_have_cached(served: tuple[str, Any]) -> None:
    url, _ = served
    one = talk(url, "one", lambda number, turn: "one")
    names = {engine_of(url, f"session {number}"): f"session {number}" for number in range(6)}
    sessions = list(names.values())
    assert len(sessions) == 2
    alternating = talk(url, "in turn", lambda number, turn: sessions[(number + turn) % 2])
    routed = talk(url, "routed", lambda number, turn: None)
    print(f"cached tokens: one engine {one}, two {routed}, in turn {alternating}")
    assert one > 3000 and routed >= 0.9 * one, (one, routed, alternating)
    assert alternating < 0.9 * one, "otherwise this shows nothing"


def test_no_engine_gets_much_more_than_the_others(served: tuple[str, Any]) -> None:
    url, _ = served
    before = num_admitted()

    def ask(number: int) -> None:
        body = {"prompt": f"{number} is a number " * 10, "max_tokens": 10}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ask, range(100)))
    counts = [count - before[name] for name, count in num_admitted().items()]
    print(f"requests per engine: {counts}")
    assert sum(counts) == 100 and max(counts) <= 1.5 * 50, counts
    wait_until_idle(url, 10.0)


class StreamError(Exception):
    """An event of a stream says that it has ended with an error."""


LASTING = LONG | {"max_tokens": 200, "temperature": 1.0}


@pytest.fixture(scope="module")
def undisturbed(served: tuple[str, Any]) -> dict[int, list[str]]:
    """The tokens of eight requests, by seed."""
    url, _ = served

    def tokens(seed: int) -> list[str]:
        asked = LASTING | {"seed": seed}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=90).json()
        found: list[str] = answer["choices"][0]["logprobs"]["tokens"]
        return found

    with ThreadPoolExecutor(8) as threads:
        return dict(enumerate(threads.map(tokens, range(8))))


@pytest.mark.parametrize("lost", ["replica", "driver", "driver that hangs", "every driver"])
def test_requests_of_a_lost_engine_go_on_at_another(
    served: tuple[str, Any], undisturbed: dict[int, list[str]], lost: str
) -> None:
    """They keep the tokens they have: clients notice only a pause."""
    import ray
    from ray.util import list_named_actors

    url, _ = served
    texts: dict[int, list[str]] = {number: [] for number in range(8)}

    def stream(number: int) -> None:
        asked = LASTING | {"stream": True, "seed": number}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=90) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    logprobs = event["choices"][0]["logprobs"]
                    texts[number] += logprobs["tokens"] if logprobs else []

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, number) for number in range(8)]
        wait_until(lambda: all(len(parts) > 3 for parts in texts.values()), "streaming", 30)
        assert min(num_leases()) > 0, "both are in use"
        if lost == "replica":
            [*_, name] = [
                each
                for each in list_named_actors(all_namespaces=True)
                if each["name"].startswith("SERVE_REPLICA::eagleray#engine#")
            ]
            ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))
        else:
            drivers = sorted(processes("ray::Driver"))
            for driver in drivers if lost == "every driver" else drivers[-1:]:
                os.kill(driver, signal.SIGSTOP if lost.endswith("hangs") else signal.SIGKILL)
        had = {number: len(parts) for number, parts in texts.items()}
        began = time.monotonic()
        is_served = lost != "every driver"
        assert httpx.get(f"{url}/health", timeout=5).status_code == (200 if is_served else 503)
        assert stats_of(url)["eagleray_ready"] >= is_served
        assert time.monotonic() - began < 5
        for each in streams:
            each.result(90)
    assert texts == undisturbed
    assert sum(len(parts) > had[number] for number, parts in texts.items()) > 4
    wait_until(lambda: stats_of(url)["eagleray_ready"] == 2, "a new engine", 60)
    wait_until_idle(url, 10.0)


@pytest.mark.parametrize("lost", ["ray::ServeReplica:eagleray:api", "ray::ProxyActor"])
def test_a_process_that_answers_http_is_replaced_and_the_engines_go_on(
    served: tuple[str, Any], lost: str
) -> None:
    """The connections that it had end, and so do their requests."""
    url, _ = served
    wait_until(lambda: stats_of(url)["eagleray_ready"] == 2, "both engines", 30)
    engines, [answering] = processes("ray::Driver", "ray::RankActor"), processes(lost)
    with (
        httpx.stream(
            "POST", f"{url}/v1/completions", json=LASTING | {"stream": True}, timeout=30
        ) as got,
        pytest.raises((httpx.TransportError, StreamError)),
    ):
        for number, line in enumerate(got.iter_lines()):
            if "error" in line:
                raise StreamError(line)
            if number == 4:
                os.kill(answering, signal.SIGKILL)

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(lambda: answering not in processes(lost) and answers(), "the next one", 40)
    httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=30).raise_for_status()
    assert engines == processes("ray::Driver", "ray::RankActor")
    wait_until(lambda: not any(num_leases()), "the end of the leases of the lost process", 30)
