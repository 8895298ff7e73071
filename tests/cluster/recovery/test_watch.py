"""What counts as dead, as stuck, and as merely slow, under a clock that the test controls."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.recovery import watch as watch_module
from cluster.recovery.watch import IDLE_HEARTBEAT_S, Watch
from cluster.timeouts import HEARTBEAT_S, RANK_ANSWER_TIMEOUT_S
from workers.progress import Progress

STUCK_AFTER_S = 5.0


class FakeRank:
    """An actor whose answers are given by the test."""

    def __init__(self) -> None:
        self.ends: list[Future[None]] = []
        self.asked: list[Future[Progress]] = []
        self.at = Progress(phase="steps")
        self.answers = True
        self.actor = SimpleNamespace(
            wait_for_end=SimpleNamespace(remote=lambda: SimpleNamespace(future=self._follow)),
            progress=SimpleNamespace(remote=lambda: SimpleNamespace(future=self._ask)),
        )
        self.process = None

    @property
    def ended(self) -> Future[None]:
        """The last call that waits for its end."""
        return self.ends[-1]

    def _follow(self) -> Future[None]:
        self.ends.append(Future())
        return self.ended

    def _ask(self) -> Future[Progress]:
        asked: Future[Progress] = Future()
        self.asked.append(asked)
        if self.answers:
            asked.set_result(replace(self.at))
        return asked


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.ranks = [FakeRank(), FakeRank()]
        self.woken = 0
        group: Any = SimpleNamespace(ranks=self.ranks)
        self.watch = Watch(group, self.wake, STUCK_AFTER_S, clock=lambda: self.now_s)

    def wake(self) -> None:
        self.woken += 1

    def run(self, seconds: float, busy_since_s: float | None = None) -> str | None:
        """Look at every heartbeat, and return the first thing that is wrong."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += HEARTBEAT_S
            if (why := self.watch.find_fault(busy_since_s)) is not None:
                return why
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(watch_module, "describe_process", lambda process: "state S (sleeping)")
    return World()


def test_a_death_wakes_the_supervisor_and_names_the_rank(world: World) -> None:
    world.ranks[1].ended.set_exception(RuntimeError("worker exited\nwith details"))
    assert world.woken == 1 and not world.watch.all_ranks_answer
    assert world.watch.find_fault(None) == "rank 1 died: worker exited"


def test_a_death_that_the_kernel_tells_is_not_waited_for(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="eagleray.driver")
    world.watch._note_exit(1)
    assert world.woken == 1 and not world.watch.all_ranks_answer
    assert world.watch.find_fault(None) == "rank 1 died: its process is ending"
    world.ranks[1].ended.set_exception(RuntimeError("too little memory"))
    assert "Ray says of rank 1: too little memory" in caplog.text


def test_a_lost_call_that_waits_for_the_end_is_made_again_and_not_a_death(world: World) -> None:
    for num_lost in range(1, 4):
        world.ranks[1].ended.set_exception(ActorUnavailableError("lost", None))
        assert world.woken == num_lost and world.watch.all_ranks_answer
        assert world.watch.find_fault(None) is None
        assert [len(rank.ends) for rank in world.ranks] == [1, 1 + num_lost]
    world.ranks[1].ended.set_exception(ActorDiedError())
    assert not world.watch.all_ranks_answer
    why = world.watch.find_fault(None)
    assert why is not None and why.startswith("rank 1 died: The actor died")


def test_an_idle_group_that_answers_is_fine_for_ever(world: World) -> None:
    assert world.run(20 * STUCK_AFTER_S) is None and world.watch.all_ranks_answer


def test_a_rank_on_this_node_without_work_is_asked_seldom_unless_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped: set[int] = set()
    monkeypatch.setattr(watch_module, "processes_on_this_node", lambda processes: {0: 40, 1: 41})
    monkeypatch.setattr(watch_module, "watch_local_processes", lambda processes, ended: None)
    monkeypatch.setattr(
        watch_module, "is_local_process_stopped", lambda process: process in stopped
    )
    world = World()
    world.watch = Watch(world.watch.group, world.wake, 1.0, clock=lambda: world.now_s)
    assert world.run(10 * IDLE_HEARTBEAT_S) is None
    assert [len(rank.asked) for rank in world.ranks] == [10, 10]
    assert world.run(IDLE_HEARTBEAT_S, busy_since_s=world.now_s + 10) is None
    assert len(world.ranks[0].asked) == 10 + IDLE_HEARTBEAT_S / HEARTBEAT_S
    stopped.add(41)
    world.ranks[1].answers = False
    began_s = world.now_s
    assert (
        world.run(HEARTBEAT_S + RANK_ANSWER_TIMEOUT_S) is None and not world.watch.all_ranks_answer
    )
    why = world.run(10.0)
    assert why is not None and why.startswith("rank 1 has not answered for 1 s")
    assert world.now_s - began_s <= 1.0 + 3 * HEARTBEAT_S


def test_a_step_may_take_any_time_while_counters_move(world: World) -> None:
    began_s = world.now_s
    while world.now_s < began_s + 10 * STUCK_AFTER_S:
        world.ranks[0].at.enter_layer(0)  # rank 1 waits for it
        assert world.run(0.9 * STUCK_AFTER_S, busy_since_s=began_s) is None


def test_a_load_may_take_any_time_while_bytes_come(world: World) -> None:
    began_s = world.now_s
    for rank in world.ranks:
        rank.at.phase = "load"
    while world.now_s < began_s + 10 * STUCK_AFTER_S:
        world.ranks[1].at.loaded_bytes += 2**20
        assert world.run(0.9 * STUCK_AFTER_S, busy_since_s=began_s) is None


def test_work_that_does_not_move_names_the_rank_that_is_behind(world: World) -> None:
    world.ranks[0].at = Progress(phase="steps", step_id=7, layer=3, num_all_reduces=40)
    world.ranks[1].at = Progress(phase="steps", step_id=7, layer=2, num_all_reduces=39)
    began_s = world.now_s
    why = world.run(3 * STUCK_AFTER_S, busy_since_s=began_s)
    assert why is not None and why.startswith(
        "rank 1 has not moved for 5 s (at step 7, layer 2)\nrank 0 at step 7, layer 3: "
    )
    assert world.now_s - began_s <= STUCK_AFTER_S + 3 * HEARTBEAT_S


def test_results_that_come_are_movement_too(world: World) -> None:
    for _ in range(10):
        assert world.run(0.9 * STUCK_AFTER_S, busy_since_s=world.now_s) is None


def test_a_rank_that_does_not_answer_is_soon_not_ready_and_later_stuck(world: World) -> None:
    assert world.run(1.0) is None
    world.ranks[0].answers = False
    assert world.run(HEARTBEAT_S + RANK_ANSWER_TIMEOUT_S) is None
    assert not world.watch.all_ranks_answer
    why = world.run(3 * STUCK_AFTER_S)
    assert why is not None and why.startswith("rank 0 has not answered for 5 s (at step -1, ")


def test_a_rank_that_answers_again_is_fine(world: World) -> None:
    world.ranks[0].answers = False
    assert world.run(0.8 * STUCK_AFTER_S) is None
    world.ranks[0].answers = True
    world.ranks[0].asked[-1].set_result(Progress())
    assert world.watch.all_ranks_answer and world.run(3 * STUCK_AFTER_S) is None


def test_a_question_that_was_lost_is_asked_again(world: World) -> None:
    world.ranks[0].answers = False
    assert world.run(HEARTBEAT_S) is None
    [lost] = world.ranks[0].asked
    lost.set_exception(ConnectionError("the call was lost"))
    world.ranks[0].answers = True
    assert world.run(3 * STUCK_AFTER_S) is None and world.watch.all_ranks_answer


def test_a_driver_that_was_stopped_itself_blames_nobody(world: World) -> None:
    began_s = world.now_s
    world.ranks[0].at.num_layers_run = 1
    assert world.run(1.0, busy_since_s=began_s) is None
    world.now_s += 20 * STUCK_AFTER_S
    assert world.watch.find_fault(began_s) is None
    world.ranks[0].at.num_layers_run = 2
    assert world.run(0.9 * STUCK_AFTER_S, busy_since_s=began_s) is None
