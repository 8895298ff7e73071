"""Requests over several engines that come and go. The engines only record what they are sent.

Real engines are in `test_serve.py`; the cases here would take too many deaths there.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

import cluster.serve.pool as pool_module
from cluster.client.outputs import Generation, OutputFollower
from cluster.news import News
from cluster.serve.engine import Lease
from cluster.serve.pool import MAX_MOVES, EnginePool
from cluster.serve.router import Wanted
from scheduler.errors import (
    EaglerayError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
)
from tests.cluster.processes import wait_until
from tests.scheduler.helpers import make_request


class FakeDriver:
    """Takes requests, or raises what it is told to."""

    def __init__(self, name: str) -> None:
        self.name = self._ray_actor_id = name
        self.error: EaglerayError | None = None
        self.has: list[Generation] = []
        self.not_needed: list[Generation] = []
        self.frontend: FakeFrontend | None = None

    def die(self) -> None:
        """Its requests are handed back, on a thread of its own as the poll loop's."""
        assert self.frontend is not None
        self.error = EngineDeadError(f"{self.name} has died")
        had, self.has = self.has, []
        threading.Thread(target=self.frontend.on_dead, args=(had, self.error)).start()


class FakeFrontend:
    def __init__(self, driver: FakeDriver, answer_limit_s: float, on_dead: Any) -> None:
        self.driver, self.on_dead, self.is_closed = driver, on_dead, False
        driver.frontend = self

    def submit(self, generations: list[Generation]) -> None:
        if self.driver.error is not None:
            raise self.driver.error
        self.driver.has += generations

    def abort(self, generations: list[Generation]) -> None:
        self.driver.not_needed += generations
        for generation in generations:
            generation.end()

    def finish(self, generations: list[Generation]) -> None:
        self.driver.not_needed += generations

    def after_news(self, callback: Any) -> None:
        pass

    def follow(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class FakeLeases:
    """Replaces Ray Serve's handle and router. may_choose: until it is set, calls do not reach the
    choice of an engine.
    """

    def __init__(self, *names: str) -> None:
        self.drivers = {name: FakeDriver(name) for name in names}
        self.recovering: set[str] = set()
        self.asked: list[Wanted] = []
        self.num_open = 0
        self.may_choose = asyncio.Event()
        self.may_choose.set()

    def options(self, **_: Any) -> FakeLeases:
        return self

    def remote(self, wanted: Wanted) -> Any:
        self.asked.append(wanted)
        leases = self

        class Stream:
            is_open, is_answered = True, False

            async def __anext__(self) -> Lease:
                await leases.may_choose.wait()
                assert wanted.choose is not None
                name = wanted.choose(leases.drivers.keys())
                self.is_answered = True
                driver = None if name in leases.recovering else leases.drivers[name]
                return Lease(replica=name, driver=driver)

            def __aiter__(self) -> Stream:
                return self

            def cancel(self) -> None:
                assert self.is_answered, "Ray Serve may lose sight of it"
                leases.num_open -= self.is_open
                self.is_open = False

        self.num_open += 1
        return Stream()


def make_pool(
    loop: asyncio.AbstractEventLoop, leases: FakeLeases, monkeypatch: pytest.MonkeyPatch
) -> EnginePool:
    monkeypatch.setattr(pool_module, "Frontend", FakeFrontend)
    monkeypatch.setattr(pool_module, "PAUSE_S", 0.01)

    async def make() -> EnginePool:
        engines: Any = leases
        return EnginePool(engines, block_size=16, answer_limit_s=5.0)

    return asyncio.run_coroutine_threadsafe(make(), loop).result(5)


def generation(name: str) -> Generation:
    """A generation with a session, so that those submitted together go to one engine."""
    follower = OutputFollower(make_request(name, [1, 2, 3]), 0, None, None)
    return Generation(None, [follower], session_id="one")


def test_an_engine_that_is_dead_or_recovers_is_passed_over(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b", "c")
    leases.drivers["a"].error = EngineDeadError("gone")
    leases.recovering.add("b")
    pool = make_pool(loop, leases, monkeypatch)
    one = generation("one")
    pool.submit([one])
    assert leases.drivers["c"].has == [one]
    assert [wanted.avoid for wanted in leases.asked] == [(), ("a",), ("a", "b")]
    one.end()
    wait_until(lambda: leases.num_open == 0, "the lease to end")
    assert not pool._held and not pool._table._of_request


def test_requests_of_an_engine_that_dies_move_with_their_tokens_and_fail_alone(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(loop, leases, monkeypatch)
    both = [generation("one"), generation("two")]
    pool.submit(both)
    first, second = leases.drivers["a"], leases.drivers["b"]
    assert first.has == both
    both[0].take(both[0].outputs[0], News(first_index=0, token_ids=[7, 8], num_cached_tokens=0))
    first.die()
    wait_until(lambda: second.has == both, "the move")
    assert both[0].completions[0].token_ids == [7, 8]
    assert first.frontend is not None
    wait_until(lambda: bool(first.frontend and first.frontend.is_closed), "the old frontend")
    leases.drivers["c"] = FakeDriver("c")
    leases.drivers["c"].error = RequestError("too long for this engine")
    del leases.drivers["a"]
    second.die()
    wait_until(lambda: all(each.done.done() for each in both), "their end")
    with pytest.raises(RequestError, match="too long"):
        both[0].result()


def test_a_request_that_ends_one_engine_after_another_fails(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"e{number}" for number in range(MAX_MOVES + 3)]
    leases = FakeLeases(*names)
    pool = make_pool(loop, leases, monkeypatch)
    poison = generation("poison")
    pool.submit([poison])
    for name in names[: MAX_MOVES + 1]:
        wait_until(lambda name=name: leases.drivers[name].has == [poison], name)  # type: ignore[misc]
        leases.drivers[name].die()
    with pytest.raises(EngineDeadError, match=r"at 6 engines .* e5 has died"):
        poison.done.result(5)
    assert all(not leases.drivers[name].has for name in names[MAX_MOVES + 1 :])


def test_what_is_submitted_together_is_taken_together_or_not_at_all(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a")
    pool = make_pool(loop, leases, monkeypatch)
    leases.drivers["a"].error = RequestError("no")
    both = [generation("one"), generation("two")]
    with pytest.raises(RequestError, match="no"):
        pool.submit(both)
    assert leases.drivers["a"].not_needed == both
    wait_until(lambda: leases.num_open == 0 and not pool._held, "everything to end")


def test_a_request_that_is_aborted_while_it_moves_goes_nowhere(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(loop, leases, monkeypatch)
    one = generation("one")
    pool.submit([one])
    leases.recovering |= {"a", "b"}
    leases.drivers["a"].die()
    wait_until(lambda: len(leases.asked) > 3, "new leases to be asked for")
    pool.abort([one])
    assert one.completions[0].finish_reason == "abort" and one.done.done()
    leases.recovering.clear()
    wait_until(lambda: leases.num_open == 0, "the leases to end")
    assert not leases.drivers["b"].has


def test_a_request_that_is_aborted_before_its_engine_is_chosen_is_not_counted(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(loop, leases, monkeypatch)
    leases.may_choose.clear()
    one = generation("one")
    submitting = threading.Thread(target=pool.submit, args=([one],))
    submitting.start()
    wait_until(lambda: bool(leases.asked), "a lease to be asked for")
    pool.abort([one])
    submitting.join(5)
    assert leases.num_open == 1 and not pool._table._engines
    loop.call_soon_threadsafe(leases.may_choose.set)
    wait_until(lambda: leases.num_open == 0, "the lease to end")
    assert pool._table._engines == {"a", "b"}, "the choice came after the end"
    assert not pool._table._of_request and not +pool._table._num_open


def test_what_a_lease_is_for_travels_without_the_choice() -> None:
    assert pickle.loads(pickle.dumps(Wanted(("a",), lambda names: "b"))) == Wanted(("a",))


def test_requests_that_wait_for_an_engine_hold_no_thread(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    leases.recovering |= {"a", "b"}
    pool = make_pool(loop, leases, monkeypatch)
    many = [generation(f"request {number}") for number in range(100)]

    async def reach() -> int:
        waiting = asyncio.gather(*(pool.reach([each]) for each in many))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        pool.abort(many[:10])
        leases.recovering.clear()
        await waiting
        return len(leases.asked)

    num_asked = asyncio.run_coroutine_threadsafe(reach(), loop).result(10)
    pool.submit(many[5:])
    assert len(leases.asked) == num_asked, "there are leases already"
    has = [each for driver in leases.drivers.values() for each in driver.has]
    assert {id(each) for each in has} == {id(each) for each in many[10:]}
    pool.abort(many)
    wait_until(lambda: leases.num_open == 0 and not pool._held, "everything to end")
    assert not pool._table._of_request


def test_a_wait_for_an_engine_has_an_end(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a")
    leases.recovering.add("a")
    pool = make_pool(loop, leases, monkeypatch)
    monkeypatch.setattr(pool_module, "LEASE_TIMEOUT_S", 0.2)
    with pytest.raises(OverloadedError, match="no engine"):
        pool.submit([generation("one")])
    with pytest.raises(OverloadedError, match="no engine"):
        reaching = pool.reach([generation("two")])
        asyncio.run_coroutine_threadsafe(reaching, loop).result(5)
    wait_until(lambda: leases.num_open == 0 and not pool._held, "everything to end")


def test_a_fault_of_the_pool_ends_the_requests_it_moves(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = FakeLeases("a", "b")
    pool = make_pool(loop, leases, monkeypatch)
    one = generation("one")
    pool.submit([one])

    def broken(*_: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(pool, "_lease", broken)
    leases.drivers["a"].die()
    with pytest.raises(EngineError, match="could not move: AttributeError"):
        one.done.result(5)
