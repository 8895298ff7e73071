"""What Ray Serve is told about a replica whose driver dies, hangs, or cannot be replaced."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import timeouts
from cluster.client import driver_handle
from cluster.client.frontend import Frontend
from cluster.ray_errors import NoAnswerError
from cluster.serve.engine import EngineReplica
from cluster.serve.health import DriverHealth
from cluster.serve.replica import ApiReplica
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from scheduler.errors import EngineDeadError, EngineError, OverloadedError
from scheduler.messages import EngineStats
from tests.cluster.api.test_metrics import stats_of_engine
from tests.cluster.client.test_driver_replaced import MortalDriver, Owner
from tests.cluster.client.test_outputs import Remote
from tests.cluster.processes import wait_until

PERIOD_S = 0.01
Watch = Callable[..., DriverHealth]


class AskedDriver(MortalDriver):
    """Says what it is told to when it is asked for its counters."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Exception | None = None
        self.num_asked = 0
        self.stats = Remote(self._stats)

    def _stats(self) -> None:
        self.num_asked += 1
        if self.answer is not None:
            raise self.answer


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr(driver_handle, "result_of", lambda ref, what, limit_s=0.0: ref())
    owner = Owner()
    owner.drivers = [AskedDriver()]
    return owner


@pytest.fixture
def watch(owner: Owner) -> Iterator[Watch]:
    """Makes the health of an engine with the owner's driver."""
    made: list[tuple[Frontend, DriverHealth]] = []

    def watch(replacement_timeout_s: float = 60.0, period_s: float = PERIOD_S) -> DriverHealth:
        frontend = Frontend(owner.drivers[0], replace=owner.replace)
        frontend.driver_handle.watch_end()
        health = DriverHealth(frontend.driver_handle, replacement_timeout_s, period_s)
        made.append((frontend, health))
        return made[-1][1]

    yield watch
    owner.go.set()
    for frontend, health in made:
        health.close()
        frontend.close()


def first(owner: Owner) -> AskedDriver:
    driver = owner.drivers[0]
    assert isinstance(driver, AskedDriver)
    return driver


def test_a_replica_is_healthy_while_its_driver_is_replaced_however_long_that_takes(
    owner: Owner, watch: Watch
) -> None:
    health = watch()
    owner.go.clear()
    first(owner).die()
    wait_until(lambda: bool(owner.told), "the replacement to begin")
    began_s = time.monotonic()
    for _ in range(20):
        health.check()
        time.sleep(PERIOD_S)
    assert time.monotonic() - began_s < 5, "it answers at once"
    owner.go.set()
    wait_until(lambda: len(owner.drivers) == 2, "the next driver")
    health.check()


def test_a_driver_that_hangs_without_requests_is_replaced(owner: Owner, watch: Watch) -> None:
    health = watch()
    first(owner).answer = NoAnswerError("no answer within 20 s")
    wait_until(lambda: len(owner.drivers) == 2, "the next driver")
    health.check()


def test_a_replica_is_not_healthy_when_its_engine_says_that_it_has_stopped(
    owner: Owner, watch: Watch
) -> None:
    health = watch()
    health.check()
    first(owner).answer = EngineDeadError("the engine has stopped: a bug")
    wait_until(lambda: not health._thread.is_alive(), "it to be asked no more")
    with pytest.raises(EngineDeadError, match="a bug"):
        health.check()


def test_an_engine_that_stops_for_good_is_known_to_have_before_its_driver_is_asked(
    owner: Owner, watch: Watch
) -> None:
    health = watch(period_s=60.0)
    health.check()
    first(owner).end.set_exception(EngineDeadError("the engine has stopped: a bug"))
    with pytest.raises(EngineDeadError, match="a bug"):
        health.check()
    assert first(owner).num_asked == 0 and owner.told == [], "it is not replaced"


def test_a_replica_is_not_healthy_when_no_driver_could_be_started(
    owner: Owner, watch: Watch
) -> None:
    owner.may_replace = False
    health = watch()
    first(owner).die()
    wait_until(lambda: bool(owner.told), "the attempt")

    def is_dead() -> bool:
        try:
            health.check()
        except EngineDeadError as error:
            return "no driver could be started" in str(error)
        return False

    wait_until(is_dead, "Ray Serve to hear of it")
    time.sleep(5 * PERIOD_S)
    assert len(owner.told) == 1, "nothing else is tried"


def test_a_replica_is_not_healthy_when_the_replacement_never_ends(
    owner: Owner, watch: Watch
) -> None:
    owner.go.clear()
    health = watch(replacement_timeout_s=0.2)
    first(owner).answer = NoAnswerError("no answer within 20 s")
    wait_until(lambda: bool(owner.told), "the replacement to begin")
    time.sleep(0.3)
    with pytest.raises(EngineDeadError, match=r"was not replaced within 0\.2 s"):
        health.check()


@pytest.mark.parametrize("answer", [EngineError("a fault there"), ValueError("a bug here")])
def test_an_error_of_one_question_is_no_death(
    owner: Owner, watch: Watch, answer: Exception
) -> None:
    first(owner).answer = answer
    health = watch()
    wait_until(lambda: first(owner).num_asked > 3, "several questions")
    health.check()


def test_the_answer_waits_for_no_question(owner: Owner, watch: Watch) -> None:
    goes_on = threading.Event()
    asked = threading.Event()

    def hang() -> None:
        asked.set()
        goes_on.wait(10)

    first(owner).stats = Remote(hang)
    health = watch()
    assert asked.wait(5)
    began_s = time.monotonic()
    health.check()
    assert time.monotonic() - began_s < 1
    goes_on.set()


@pytest.mark.parametrize("kind", [EngineReplica, ApiReplica])
def test_a_replica_that_ends_before_it_has_started_ends_without_an_error(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise EngineError("the start fails")

    monkeypatch.setattr(sys.modules[kind.__module__], "end_with_parent", fail)
    end = kind.__del__
    monkeypatch.delattr(kind, "__del__")  # which Python would call, too, but nobody would await

    async def start_and_end() -> None:
        replica = object.__new__(kind)
        with pytest.raises(EngineError, match="the start fails"):
            await replica.__init__(ServeConfig())
        await end(replica)

    asyncio.run(start_and_end())


BUSY = stats_of_engine(step_age_s=0.1)
IDLE = replace(BUSY, num_running=0)


@pytest.mark.parametrize(
    "answers",
    [
        [BUSY, OverloadedError("it is being replaced"), NoAnswerError("it hangs"), BUSY, IDLE],
        [BUSY, EngineDeadError("the engine has stopped")],
    ],
)
def test_an_engine_waits_for_its_requests_also_while_its_driver_does_not_answer(
    answers: list[EngineStats | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = iter(answers)

    def stats() -> EngineStats:
        answer = next(unread)
        if isinstance(answer, Exception):
            raise answer
        return answer

    end = EngineReplica.__del__
    monkeypatch.delattr(EngineReplica, "__del__")
    replica: Any = object.__new__(EngineReplica)
    replica._has_started, replica._drain_limit_s, replica._stats_call = True, 60.0, None
    replica._engine = SimpleNamespace(frontend=SimpleNamespace(stats=stats))
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    monkeypatch.setattr("cluster.serve.engine.asyncio.sleep", sleep)
    asyncio.run(end(replica))
    assert not list(unread)
    assert len(sleeps) == len(answers), "the news of the last request has no time"


def test_an_api_to_which_no_engine_comes_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(timeouts, "CALL_TIMEOUT_S", 0.0)
    config = ServeConfig(engine=EngineConfig(start_timeout_s=0.1))
    replica: Any = SimpleNamespace()
    setup: Any = SimpleNamespace()
    engines: Any = SimpleNamespace(limits=SimpleNamespace(remote=never))
    message = r"no engine came within 0\.1 s.* longer wait_for_nodes_s.* longer start_timeout_s"
    with pytest.raises(EngineDeadError, match=message):
        asyncio.run(ApiReplica._connect_to_engines(replica, config, setup, engines))


def test_after_ray_was_shut_down_nobody_is_asked(owner: Owner) -> None:
    """A call would start a new Ray."""
    frontend = Frontend(owner.drivers[0], is_ray_connected=lambda: False, replace=owner.replace)
    with pytest.raises(EngineDeadError):
        frontend.driver_handle.check()
    assert first(owner).num_asked == 0
    frontend.close()
