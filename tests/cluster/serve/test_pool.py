"""Requests over several engines that come and go, and whose drivers only record what they get.

Real engines are in `test_serve.py`; the cases here would take too many deaths there.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

import cluster.serve.leases as leases_module
import cluster.serve.pool as pool_module
from cluster.client import driver_handle
from cluster.client.client import Client
from cluster.client.outputs import Generation, OutputFollower
from cluster.engine.frontends import FrontendRecords
from cluster.ray_errors import NoAnswerError
from cluster.serve.engine import Lease
from cluster.serve.pool import MAX_MOVES, EnginePool
from cluster.serve.router import LeaseRequest
from scheduler.errors import (
    EngineDeadError,
    EngineError,
    EngineLostError,
    OverloadedError,
    RequestError,
)
from scheduler.messages import EngineStats, Request
from tests.cluster.api.test_metrics import stats_of_engine
from tests.cluster.client.test_client import Notes
from tests.cluster.client.test_driver_replaced import MortalDriver, aborted, tokens_of
from tests.cluster.client.test_outputs import LIMITS, WAIT_S, Remote
from tests.cluster.processes import wait_until
from tests.scheduler.helpers import make_request

ANSWER_LIMIT_S = 4.0  # of the recording engines; a busy machine may stand still for a second


class FakeDriver(MortalDriver):
    """Takes requests as a real one does, unless it hangs or is told to refuse them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = self._ray_actor_id = name
        self.records = FrontendRecords(timeout_s=60.0)
        self.hangs = False
        self.goes_on = threading.Event()

    @property
    def has(self) -> list[str]:
        """The names of the requests that it has taken."""
        return [request.request_id.partition("~")[0] for request in self.requests]

    def _submit(self, frontend_id: str, requests: list[Request]) -> int:
        if self.hangs and not self.goes_on.wait(ANSWER_LIMIT_S):
            raise NoAnswerError(f"{self.name} hangs")
        if self.refusal is None:
            self.records.register_requests(frontend_id, requests, LIMITS)
        return super()._submit(frontend_id, requests)


class FakeLeases:
    """Replaces Ray Serve's handle and router. may_choose: until it is set, calls do not reach the
    choice of an engine. Calls to all replicas find none.
    """

    def __init__(self, *names: str) -> None:
        self.drivers = {name: FakeDriver(name) for name in names}
        self.recovering: set[str] = set()
        self.asked: list[LeaseRequest] = []
        self.num_open = 0
        self.may_choose = asyncio.Event()
        self.may_choose.set()

    def options(self, **_: Any) -> FakeLeases:
        return self

    def remote(self, lease_request: LeaseRequest) -> Any:
        self.asked.append(lease_request)
        self.num_open += 1
        return FakeStream(self, lease_request)

    def broadcast(self, *_: object) -> FakeLeases:
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID("engine"))


class FakeStream:
    """Replaces the response of one call."""

    def __init__(self, leases: FakeLeases, lease_request: LeaseRequest) -> None:
        self.leases, self.lease_request = leases, lease_request
        self.is_open, self.is_answered = True, False

    async def __anext__(self) -> Lease:
        await self.leases.may_choose.wait()
        assert self.lease_request.choose is not None
        name = self.lease_request.choose(self.leases.drivers.keys())
        self.is_answered = True
        driver = None if name in self.leases.recovering else self.leases.drivers[name]
        return Lease(replica_id=name, driver=driver)

    def __aiter__(self) -> FakeStream:
        return self

    def cancel(self) -> None:
        assert self.is_answered, "Ray Serve may lose sight of it"
        self.leases.num_open -= self.is_open
        self.is_open = False


class MakePool(Protocol):
    def __call__(self, leases: FakeLeases, lease_limit_s: float = 60.0) -> EnginePool: ...


@pytest.fixture
def make_pool(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePool]:
    monkeypatch.setattr(driver_handle, "result_of", lambda ref, what, limit_s=0.0: ref())
    for module in (pool_module, leases_module):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    pools: list[EnginePool] = []

    def make_pool(leases: FakeLeases, lease_limit_s: float = 60.0) -> EnginePool:
        async def make() -> EnginePool:
            engines: Any = leases
            return EnginePool(
                engines, block_size=16, answer_limit_s=5.0, lease_limit_s=lease_limit_s
            )

        pools.append(asyncio.run_coroutine_threadsafe(make(), loop).result(5))
        return pools[-1]

    yield make_pool
    for frontend in [sender.frontend for pool in pools for sender in pool._senders.values()]:
        frontend.close()
        frontend.join(WAIT_S)


def generation(name: str, session: str = "one") -> Generation:
    """A generation with a session, so that those submitted together go to one engine."""
    follower = OutputFollower(make_request(name, [1, 2, 3]), 0, None, None)
    return Generation(None, [follower], session_id=session)


def test_an_engine_that_is_dead_or_recovers_is_passed_over(make_pool: MakePool) -> None:
    leases = FakeLeases("a", "b", "c")
    leases.drivers["a"].refusal = EngineDeadError("gone")
    leases.recovering.add("b")
    pool = make_pool(leases)
    one = generation("one")
    pool.submit([one])
    assert leases.drivers["c"].has == ["one"]
    assert [lease_request.avoided_replica_ids for lease_request in leases.asked] == [
        (),
        ("a",),
        ("a", "b"),
    ]
    one.end()
    wait_until(lambda: leases.num_open == 0, "the lease to end")
    assert not pool._routed_requests and not pool._leases._table._engine_by_request


def test_a_request_that_has_ended_is_free_without_the_collector(make_pool: MakePool) -> None:
    leases = FakeLeases("a")
    pool = make_pool(leases)
    gc.disable()
    try:
        one = generation("one")
        pool.submit([one])
        pool.abort([one])
        wait_until(lambda: leases.num_open == 0, "the lease to end")
        ended = weakref.ref(one)
        del one
        wait_until(lambda: ended() is None, "the request to be free")
    finally:
        gc.enable()


def test_requests_of_an_engine_that_dies_move_with_their_tokens_and_fail_alone(
    make_pool: MakePool,
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    both = [generation("one"), generation("two")]
    pool.submit(both)
    first, second = leases.drivers["a"], leases.drivers["b"]
    assert first.has == ["one", "two"]
    first.put("one", 0, 7, 8)
    wait_until(lambda: both[0].completions[0].token_ids == [7, 8], "its tokens")
    first.die()
    wait_until(lambda: sorted(second.has) == ["one", "two"], "the move")
    assert sorted(map(tokens_of, second.requests)) == [[], [7, 8]]
    assert list(pool._senders) == ["b"]
    leases.drivers["c"] = FakeDriver("c")
    leases.drivers["c"].refusal = RequestError("too long for this engine")
    del leases.drivers["a"]
    second.die()
    wait_until(lambda: all(each.done_future.done() for each in both), "their end")
    with pytest.raises(RequestError, match="too long"):
        both[0].result()


def test_nothing_is_kept_of_an_engine_that_its_requests_may_have_stopped(
    make_pool: MakePool,
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    one = generation("one")
    pool.submit([one])
    driver, death = leases.drivers["a"], EngineDeadError("the engine has stopped: a bug")
    driver.end.set_exception(death)
    driver.put("one", 0, finish_reason="error", error=death)
    with pytest.raises(EngineDeadError, match="a bug"):
        one.done_future.result(WAIT_S)
    wait_until(lambda: not pool._senders, "its sender to be gone")
    assert not leases.drivers["b"].has


def test_nothing_is_kept_of_an_engine_that_stops_without_requests(make_pool: MakePool) -> None:
    leases = FakeLeases("a")
    pool = make_pool(leases)
    one = generation("one")
    pool.submit([one])
    pool.abort([one])
    leases.drivers["a"].end.set_exception(EngineLostError("the engine has stopped: no ranks"))
    wait_until(lambda: not pool._senders, "its sender to be gone")


def test_a_request_that_ends_one_engine_after_another_fails(make_pool: MakePool) -> None:
    names = [f"e{number}" for number in range(MAX_MOVES + 3)]
    leases = FakeLeases(*names)
    pool = make_pool(leases)
    poison = generation("poison")
    pool.submit([poison])
    for name in names[: MAX_MOVES + 1]:
        wait_until(lambda name=name: leases.drivers[name].has == ["poison"], name)  # type: ignore[misc]
        leases.drivers[name].die()
    with pytest.raises(EngineDeadError, match=r"at 6 engines .* the driver has died"):
        poison.done_future.result(5)
    assert all(not leases.drivers[name].has for name in names[MAX_MOVES + 1 :])


def test_what_is_submitted_together_is_taken_together_or_not_at_all(make_pool: MakePool) -> None:
    leases = FakeLeases("a")
    pool = make_pool(leases)
    leases.drivers["a"].refusal = RequestError("no")
    both = [generation("one"), generation("two")]
    with pytest.raises(RequestError, match="no"):
        pool.submit(both)
    wait_until(lambda: aborted(leases.drivers["a"]) == {"one", "two"}, "it to be told")
    wait_until(lambda: leases.num_open == 0 and not pool._routed_requests, "everything to end")


def test_a_request_that_is_aborted_while_it_moves_goes_nowhere(make_pool: MakePool) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    one = generation("one")
    pool.submit([one])
    leases.recovering |= {"a", "b"}
    leases.drivers["a"].die()
    wait_until(lambda: len(leases.asked) > 3, "new leases to be asked for")
    pool.abort([one])
    assert one.completions[0].finish_reason == "abort" and one.done_future.done()
    leases.recovering.clear()
    wait_until(lambda: leases.num_open == 0, "the leases to end")
    assert not leases.drivers["b"].has


def test_a_request_that_is_aborted_before_its_engine_is_chosen_is_not_counted(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    leases.may_choose.clear()
    one = generation("one")
    submitting = threading.Thread(target=pool.submit, args=([one],))
    submitting.start()
    wait_until(lambda: bool(leases.asked), "a lease to be asked for")
    routed_request = pool._routed_requests[id(one)]
    pool.abort([one])
    submitting.join(5)
    assert routed_request.has_ended() and leases.num_open == 1 and not pool._leases._table._engines
    loop.call_soon_threadsafe(leases.may_choose.set)
    wait_until(lambda: leases.num_open == 0, "the lease to end")
    assert pool._leases._table._engines == {"a", "b"}, "the choice came after the end"
    assert (
        not pool._leases._table._engine_by_request
        and not +pool._leases._table._num_open_requests_by_engine
    )


def test_a_request_whose_client_leaves_before_an_engine_is_chosen_goes_nowhere_and_is_free(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    leases.may_choose.clear()
    builder: Any = Notes()
    client = Client(builder, pool, pool.send)

    async def come_and_leave() -> None:
        coming = asyncio.create_task(client.submit_async([[1]]))
        while not leases.asked:
            await asyncio.sleep(0.01)
        coming.cancel()
        await asyncio.wait([coming])

    gc.disable()
    try:
        asyncio.run_coroutine_threadsafe(come_and_leave(), loop).result(5)
        [request] = builder.built
        wait_until(lambda: request() is None, "the request to be free")
    finally:
        gc.enable()
    assert leases.num_open == 1 and not pool._routed_requests
    loop.call_soon_threadsafe(leases.may_choose.set)
    wait_until(lambda: leases.num_open == 0, "the lease to end")
    assert not any(driver.has for driver in leases.drivers.values())
    assert not pool._leases._table._engine_by_request


def test_what_a_lease_is_for_travels_without_the_choice() -> None:
    assert pickle.loads(pickle.dumps(LeaseRequest(("a",), lambda names: "b"))) == LeaseRequest(
        ("a",)
    )


def test_requests_that_wait_for_an_engine_hold_no_thread(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool
) -> None:
    leases = FakeLeases("a", "b")
    leases.recovering |= {"a", "b"}
    pool = make_pool(leases)
    many = [generation(f"request {number}") for number in range(100)]
    num_threads = threading.active_count()

    async def send() -> None:
        waiting = asyncio.gather(*(pool.send([each]) for each in many))
        await asyncio.sleep(0.1)
        assert not waiting.done() and threading.active_count() <= num_threads
        pool.abort(many[:10])
        leases.recovering.clear()
        await waiting

    asyncio.run_coroutine_threadsafe(send(), loop).result(10)
    has = [each for driver in leases.drivers.values() for each in driver.has]
    assert sorted(has) == sorted(f"request {number}" for number in range(10, 100))
    pool.abort(many)
    wait_until(lambda: leases.num_open == 0 and not pool._routed_requests, "everything to end")
    assert not pool._leases._table._engine_by_request


def test_a_wait_for_an_engine_has_an_end(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool
) -> None:
    leases = FakeLeases("a")
    leases.recovering.add("a")
    pool = make_pool(leases, lease_limit_s=0.2)
    with pytest.raises(OverloadedError, match="no engine"):
        pool.submit([generation("one")])
    with pytest.raises(OverloadedError, match="no engine"):
        sending = pool.send([generation("two")])
        asyncio.run_coroutine_threadsafe(sending, loop).result(5)
    wait_until(lambda: leases.num_open == 0 and not pool._routed_requests, "everything to end")


def test_while_there_is_no_engine_whoever_asks_for_its_state_is_told_so(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool
) -> None:
    pool = make_pool(FakeLeases())
    with pytest.raises(OverloadedError, match="no engine answers; try again later"):
        pool.stats()
    with pytest.raises(OverloadedError, match="no engine answers; try again later"):
        pool.records(1.0)
    assert asyncio.run_coroutine_threadsafe(pool.all_stats(), loop).result(5) == []


def test_an_engine_that_hangs_does_not_hide_the_counters_of_the_others(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`answers_in_time` waits for it as long as it may."""

    class Call:
        def __init__(self, answer: EngineStats | None) -> None:
            self.answer = answer

        async def get_async(self) -> EngineStats | None:
            if self.answer is None:
                await asyncio.Event().wait()
            return self.answer

    async def calls() -> list[Any]:
        return [Call(None), Call(counters)]

    counters, leases = stats_of_engine(step_age_s=0.1), FakeLeases()
    monkeypatch.setattr(leases, "_fetch_replica_results_async", calls)
    monkeypatch.setattr(pool_module, "POOL_STATS_TIMEOUT_S", 0.1)
    pool = make_pool(leases)
    assert pool.stats().num_free_blocks == counters.num_free_blocks


def test_an_api_that_has_not_heard_of_any_engine_waits_for_none(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle waits until Ray Serve's controller has told it of replicas."""
    leases = FakeLeases()
    monkeypatch.setattr(leases, "_fetch_replica_results_async", asyncio.Event().wait)
    monkeypatch.setattr(pool_module, "POOL_STATS_TIMEOUT_S", 0.1)
    all_stats = make_pool(leases).all_stats()
    assert asyncio.run_coroutine_threadsafe(all_stats, loop).result(5) == []


def test_a_request_comes_back_to_an_engine_that_still_runs_it(make_pool: MakePool) -> None:
    """The engine hung for a while, and its abort may come late or never."""
    leases = FakeLeases("a")
    pool = make_pool(leases)
    one, other = generation("one"), generation("other")
    driver, errors = leases.drivers["a"], [NoAnswerError("no answer to a poll")]
    poll = driver._poll

    def hang_once(*arguments: Any) -> bytes:
        if errors:
            raise errors.pop()
        return poll(*arguments)

    driver.poll = Remote(hang_once)
    pool.submit([one])
    wait_until(lambda: driver.has == ["one", "one"], "the return")
    assert not one.done_future.done()
    pool.submit([other])
    assert [request.request_id for request in driver.requests] == ["one", "one~1", "other"]


def test_a_request_whose_sending_got_no_answer_is_new_to_the_engine_that_did_take_it(
    make_pool: MakePool,
) -> None:
    """The driver leaves out what it has from this frontend, and ends it by the abort that follows
    the lost answer: a request that comes back under its old id would never get a token.
    """
    leases = FakeLeases("a")
    pool = make_pool(leases)
    driver, one = leases.drivers["a"], generation("one")
    submit = driver._submit

    def lose_the_first_answer(*arguments: Any) -> int:
        number = submit(*arguments)
        if len(driver.requests) == 1:
            raise NoAnswerError("it was carried out, but the answer was lost")
        return number

    driver.submit = Remote(lose_the_first_answer)
    pool.submit([one])
    assert [request.request_id for request in driver.requests] == ["one", "one~1"]


@pytest.mark.parametrize("num_to_hung", [18, 200])
def test_an_engine_that_hangs_delays_no_request_to_another(
    loop: asyncio.AbstractEventLoop, make_pool: MakePool, num_to_hung: int
) -> None:
    leases = FakeLeases("hung")
    pool = make_pool(leases)
    builder: Any = Notes()
    client = Client(builder, pool, pool.send)
    hung, healthy = leases.drivers["hung"], FakeDriver("healthy")
    hung.hangs = True

    async def main() -> float:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.create_task(client.submit_async([[n]])) for n in range(num_to_hung)]
        await asyncio.sleep(0.3)
        leases.drivers = {"healthy": healthy, "hung": hung}
        began_s = time.monotonic()
        await client.submit_async("healthy")
        took_s = time.monotonic() - began_s
        assert not any(each.done() for each in waiting)
        await asyncio.gather(*waiting)  # once the hung engine has not answered, all go on
        return took_s

    began_s = time.monotonic()
    took_s = asyncio.run_coroutine_threadsafe(main(), loop).result(30)
    assert took_s < ANSWER_LIMIT_S / 2, took_s
    assert time.monotonic() - began_s < 2.5 * ANSWER_LIMIT_S
    assert len(healthy.has) == num_to_hung + 1


def test_an_engine_that_hangs_delays_no_request_that_moves(make_pool: MakePool) -> None:
    leases = FakeLeases("first")
    pool = make_pool(leases)
    many = [generation(f"request {number}", f"session {number}") for number in range(8)]
    for each in many:
        pool.submit([each])
    first, hung, healthy = leases.drivers["first"], FakeDriver("hung"), FakeDriver("healthy")
    hung.hangs = True
    leases.drivers = {"hung": hung, "healthy": healthy}
    began_s = time.monotonic()
    first.die()
    wait_until(lambda: len(healthy.has) >= 4, "those that the hung engine did not get")
    assert time.monotonic() - began_s < ANSWER_LIMIT_S / 2
    wait_until(lambda: len(healthy.has) == 8, "the others")
    assert time.monotonic() - began_s < 2 * ANSWER_LIMIT_S


def test_a_request_that_could_not_move_in_time_runs_nowhere_although_an_engine_has_taken_it(
    make_pool: MakePool,
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases, lease_limit_s=2.0)
    one = generation("one")
    pool.submit([one])
    slow = leases.drivers["b"]
    slow.hangs = True
    leases.drivers["a"].die()
    with pytest.raises(OverloadedError, match="no engine answered"):
        one.done_future.result(WAIT_S)
    slow.goes_on.set()
    wait_until(lambda: slow.has == ["one"] and "one~1" in aborted(slow), "it to be told")
    assert not pool._senders["b"].frontend._outstanding_requests, "it would be polled forever"


def test_a_fault_of_the_pool_ends_the_requests_it_moves(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(leases)
    one = generation("one")
    pool.submit([one])

    async def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(pool._leases, "lease", broken)
    leases.drivers["a"].die()
    with pytest.raises(EngineError, match="could not move: AttributeError"):
        one.done_future.result(5)
