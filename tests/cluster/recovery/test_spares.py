"""When spares are made, and which of them are used, under a clock that the test controls, without
processes.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RaySystemError

from cluster.ranks.group import RankHandle
from cluster.ranks.processes import END_GRACE_S
from cluster.ray_errors import NoAnswerError
from cluster.recovery import spares as spares_module
from cluster.recovery.spares import SPARE_ANSWER_TIMEOUT_S, Spares
from configs.engine import EngineConfig
from scheduler.errors import WorkerError
from workers.memory.inheritance import RankMemoryHandles

MEMORIES = [RankMemoryHandles(weights_hash="a"), RankMemoryHandles(weights_hash="b")]


class FakeRef:
    """The ref of a call, with the answer once there is one."""

    def __init__(self, *answer: Any) -> None:
        self.answer: Future[Any] = Future()
        if answer:
            self.answer.set_result(*answer)

    def future(self) -> Future[Any]:
        return self.answer


class FakeActor:
    """A spare's actor. What it is asked while it warms up waits until it is warm."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.warm_ref: FakeRef | None = None  # once it has been asked to warm up
        self.identify = SimpleNamespace(remote=self._identify)
        self.wait_until_warm = SimpleNamespace(remote=self._wait_until_warm)

    def _identify(self) -> FakeRef:
        is_warming = self.warm_ref is not None and not self.warm_ref.answer.done()
        return FakeRef() if is_warming else FakeRef((self.process, []))

    def _wait_until_warm(self) -> FakeRef:
        self.warm_ref = FakeRef()
        return self.warm_ref

    def fail(self, error: Exception) -> None:
        assert self.warm_ref is not None
        self.warm_ref.answer.set_exception(error)

    def note_warm(self) -> None:
        assert self.warm_ref is not None
        self.warm_ref.answer.set_result(self.process)


class World:
    """A maker that counts the spares of its two ranks."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.config = SimpleNamespace(engine=EngineConfig(spares="warm"))
        self.made_s: list[float] = []
        self.placement = SimpleNamespace(places=lambda: [0, 1])
        self.actors: list[FakeActor] = []
        self.ended: list[Any] = []  # the processes of the spares that were ended
        self.graces_s: list[float] = []

    def create(
        self, place: int, places_if_spare: list[int], inherited_memory: RankMemoryHandles | None
    ) -> Any:
        assert place in places_if_spare and inherited_memory is MEMORIES[place]
        self.made_s.append(self.now_s - 100.0)
        self.actors.append(FakeActor(f"process {len(self.actors)}"))
        return RankHandle(self.actors[-1])

    def run(self, spares: Spares, *, until_s: float) -> None:
        while self.now_s < 100.0 + until_s:
            spares.prepare(MEMORIES)
            self.now_s += 0.5

    def wait(self, refs: list[FakeRef], num_returns: int, timeout: float) -> Any:
        ready_refs = [ref for ref in refs if ref.answer.done()]
        if len(ready_refs) < num_returns:
            self.now_s += timeout
        return ready_refs, [ref for ref in refs if ref not in ready_refs]

    def get(self, ref: FakeRef, timeout: float | None = None) -> Any:
        if not ref.answer.done():
            raise GetTimeoutError
        return ref.answer.result()

    def end_ranks(self, spares: list[RankHandle], grace_s: float = END_GRACE_S) -> None:
        self.ended += [spare.process for spare in spares]
        self.graces_s.append(grace_s)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(spares_module, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(spares_module, "end_ranks", world.end_ranks)
    monkeypatch.setattr(ray, "wait", world.wait)
    monkeypatch.setattr(ray, "get", world.get)
    return world


def spares_in(world: World) -> Spares:
    maker: Any = world
    return Spares(maker)


def test_spares_are_made_after_2_s(world: World) -> None:
    world.run(spares_in(world), until_s=60.0)
    assert world.made_s == [2.0] * 2, "one per rank, once"


def test_spares_that_were_made_are_noted_while_no_others_are_to_be_made(world: World) -> None:
    spares = spares_in(world)
    world.now_s += 10.0
    spares.prepare(MEMORIES, makes_spares=False)
    assert world.made_s == []
    spares.prepare(MEMORIES)
    for actor in world.actors:
        actor.note_warm()
    spares.prepare(MEMORIES, makes_spares=False)
    assert spares.are_warm


def test_the_next_spares_are_made_at_once_after_a_recovery(world: World) -> None:
    """One that comes before there were any takes none, and starts processes of its own."""
    spares = spares_in(world)
    assert spares.take() == []
    spares.prepare(MEMORIES)
    assert world.made_s == [0.0] * 2


def test_an_engine_without_spares_makes_none(world: World) -> None:
    world.config.engine = EngineConfig(spares="off")
    spares = spares_in(world)
    spares.take()
    world.run(spares, until_s=100.0)
    assert world.made_s == []


def test_a_spare_that_cannot_warm_up_is_an_error_that_says_why(world: World) -> None:
    spares = spares_in(world)
    world.run(spares, until_s=5.0)
    world.actors[0].note_warm()
    world.actors[1].fail(RaySystemError("no memory"))
    with pytest.raises(WorkerError, match=r"a spare cannot be used: RaySystemError: .*no memory"):
        spares.prepare(MEMORIES)
    spares.close()
    assert sorted(world.ended) == ["process 0", "process 1"]


def test_a_spare_that_is_not_warm_soon_is_ended_by_its_process(world: World) -> None:
    spares = spares_in(world)
    world.run(spares, until_s=5.0)
    assert not spares.are_warm and spares.warm_spares() == []
    world.actors[0].note_warm()
    spares.prepare(MEMORIES)
    [warm] = spares.warm_spares()
    began_s = world.now_s
    assert spares.take() == [warm, None]
    assert world.ended == ["process 1"] and world.now_s - began_s <= SPARE_ANSWER_TIMEOUT_S
    assert world.graces_s == [0.0], "requests wait"
    assert spares.take() == []


def test_a_spare_that_does_not_answer_is_ended(world: World) -> None:
    spares = spares_in(world)
    world.run(spares, until_s=5.0)
    for actor in world.actors:
        actor.note_warm()
    spares.prepare(MEMORIES)
    assert spares.are_warm
    world.actors[0].identify = SimpleNamespace(remote=FakeRef)
    _, second = spares.warm_spares()
    assert spares.take() == [None, second] and world.ended == ["process 0"]


def test_a_spare_that_does_not_even_end_keeps_no_ranks_from_starting(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any, grace_s: float) -> None:
        raise NoAnswerError("processes [7] did not end within 10 s of SIGKILL")

    monkeypatch.setattr(spares_module, "end_ranks", fail)
    spares = spares_in(world)
    world.run(spares, until_s=5.0)
    assert spares.take() == [None, None]
    assert "a spare does not end: processes [7] did not end" in caplog.text


def test_a_spare_that_ends_late_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_ended = threading.Event()
    has_begun = threading.Event()

    def end_late(_: Any, grace_s: float) -> None:
        has_begun.set()
        has_ended.wait(60.0)

    monkeypatch.setattr(spares_module, "end_ranks", end_late)
    monkeypatch.setattr(spares_module, "SPARE_END_TIMEOUT_S", 0.01)
    spares = spares_in(world)
    world.run(spares, until_s=5.0)
    try:
        assert spares.take() == [None, None]
        assert has_begun.wait(60.0) and not has_ended.is_set()
        assert "a spare has not ended within 0.01 s" in caplog.text
    finally:
        has_ended.set()
