"""What the supervisor does when something that it needs fails by itself, without processes."""

from __future__ import annotations

import errno
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfDiskError, RaySystemError

from cluster.ranks.group import GroupReport
from cluster.ray_errors import NoAnswerError
from cluster.recovery import supervisor as supervisor_module
from cluster.recovery.states import RecoveryState
from cluster.recovery.supervisor import BUSY_SPARES_DELAY_S, Supervisor
from cluster.timeouts import GIVE_UP_AFTER_S
from configs.engine import EngineConfig
from scheduler.errors import ClientError, EaglerayError, WorkerError


class World:
    """What the groups of one test have in common. failures: raised by the next ends of a group."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.config = SimpleNamespace(engine=EngineConfig(spares="off"))
        self.size = 2
        self.close_failures: deque[Exception] = deque()
        self.start_failures: deque[Exception] = deque()
        self.take_failures: deque[Exception] = deque()
        self.starts_hang = False
        self.alive: list[int] = []  # epochs
        self.groups: list[Group] = []
        self.lost: list[int] = []
        self.dead: list[EaglerayError] = []
        self.wrong: str | None = None  # with the present group
        self.num_standby_closes = 0
        self.prepared_s: list[float] = []  # when spares may have been made


class Group:
    def __init__(self, maker: World, epoch: int = 0, spares: Any = (), ranks: Any = ()) -> None:
        self.world, self.epoch = maker, epoch
        self.ranks: list[Any] = []
        maker.groups.append(self)

    def start(self, first: GroupReport | None = None, **_: Any) -> GroupReport:
        assert not self.world.alive, "the last epoch lives"
        if self.world.start_failures:
            raise self.world.start_failures.popleft()
        self.world.alive.append(self.epoch)
        return GroupReport(num_blocks=1, seconds={}, log_lines=())

    def close(self, *, at_once: bool = False) -> None:
        if self.world.close_failures:
            raise self.world.close_failures.popleft()
        self.world.alive.clear()


class Watch:
    all_ranks_answer = True

    def __init__(self, group: Group, wake: Any, stuck_after_s: float) -> None:
        self.group = group

    def find_fault(self, busy_since_s: float | None) -> str | None:
        world = self.group.world
        why, world.wrong = world.wrong, None
        return why


class NoStandby:
    def __init__(self, maker: World, make_group: type[Group]) -> None:
        self.world = maker

    def note_serving(self) -> None:
        pass

    def prepare(self, present: Group, first: GroupReport, makes_spares: bool) -> None:
        if makes_spares:
            self.world.prepared_s.append(self.world.now_s)

    def take(self) -> tuple[None, list[Any]]:
        if self.world.take_failures:
            raise self.world.take_failures.popleft()
        return None, []

    def close(self) -> None:
        self.world.num_standby_closes += 1


class AtOnce:
    """Runs what it is given at once; the future may be late."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.late: list[Future[Any]] = []

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.world.starts_hang:
            self.late.append(future)
            return future
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(supervisor_module, "ASSEMBLY_END_TIMEOUT_S", 0.01)
    return World()


def serving(world: World, has_work: bool = False) -> Supervisor:
    """A supervisor whose first group serves."""
    parts = {"make_group": Group, "make_watch": Watch, "make_standby": NoStandby}
    maker: Any = world
    supervisor: Supervisor = type("SupervisorOfFakes", (Supervisor,), parts)(
        maker,
        busy_since_s=lambda: None,
        has_work=lambda: has_work,
        on_group_ready=lambda group, cache_survives: None,
        on_lost=lambda epoch, why: world.lost.append(epoch),
        on_dead=world.dead.append,
        clock=lambda: world.now_s,
    )
    executor: Any = AtOnce(world)
    supervisor._assembly_executor = executor
    group, _ = supervisor.start()
    supervisor._group = group
    supervisor._thread = SimpleNamespace(start=lambda: None, is_alive=lambda: False)  # type: ignore[assignment]
    supervisor.watch()
    return supervisor


def turns(supervisor: Supervisor, world: World, seconds: float) -> None:
    """Let it look every half second."""
    until_s = world.now_s + seconds
    while world.now_s < until_s and supervisor.recovery.state is not RecoveryState.DEAD:
        world.now_s += 0.5
        supervisor.check_group()


def state_of(supervisor: Supervisor) -> str:
    return supervisor.recovery.state.value


PASSING = [
    OSError(errno.EMFILE, "too many open files"),
    NoAnswerError("could not run end_local_processes on node 7: no answer within 150 s"),
    RaySystemError("the connection to the head was lost"),
]


@pytest.mark.parametrize(
    ("has_work", "loses", "due_s"),
    [(False, False, 0.5), (True, False, BUSY_SPARES_DELAY_S), (True, True, 1.5)],
)
def test_work_comes_before_spares_for_a_while_after_the_start(
    world: World, has_work: bool, loses: bool, due_s: float
) -> None:
    """Processes that start would take its cores. After a loss, they are started at once."""
    supervisor = serving(world, has_work=has_work)
    world.wrong = "rank 1 died" if loses else None
    turns(supervisor, world, 2 * BUSY_SPARES_DELAY_S)
    assert world.prepared_s[0] == due_s and supervisor.recovery.num_recoveries == loses


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_processes_that_cannot_be_ended_now_are_ended_later_and_the_engine_goes_on(
    world: World, error: Exception
) -> None:
    supervisor = serving(world)
    world.close_failures = deque([error] * 3)
    world.wrong = "rank 1 died"
    turns(supervisor, world, 10.0)
    assert not world.dead and not world.close_failures
    assert (
        supervisor.recovery.state is RecoveryState.SERVING
        and supervisor.recovery.num_recoveries == 1
    )
    assert world.lost == [0] and world.alive == [1]
    assert [group.epoch for group in world.groups] == [0, 1]


def test_processes_that_cannot_be_ended_for_too_long_end_the_engine_with_the_reason(
    world: World,
) -> None:
    supervisor = serving(world)
    world.close_failures = deque(PASSING[:1] * 10_000)
    world.wrong = "rank 1 died"
    turns(supervisor, world, GIVE_UP_AFTER_S + 10.0)
    [error] = world.dead
    assert "rank 1 died" in str(error) and "too many open files" in str(error)
    assert len(world.groups) == 1 and world.now_s > GIVE_UP_AFTER_S


def test_a_bug_while_processes_are_ended_ends_the_engine(world: World) -> None:
    supervisor = serving(world)
    world.close_failures = deque([KeyError("a")])
    world.wrong = "rank 1 died"
    with pytest.raises(KeyError):
        supervisor.check_group()


def test_a_start_that_does_not_end_with_its_processes_is_waited_for(world: World) -> None:
    supervisor = serving(world)
    world.starts_hang = True
    world.wrong = "rank 1 died"
    turns(supervisor, world, 1.0)
    assert state_of(supervisor) == "assembling"
    executor: Any = supervisor._assembly_executor
    supervisor._group_watch = Watch(world.groups[-1], None, 0.0)  # type: ignore[assignment]
    world.wrong = "rank 0 died"
    turns(supervisor, world, 3.0)
    assert not world.dead and state_of(supervisor) == "fencing"
    world.starts_hang = False
    executor.late[0].set_exception(WorkerError("start failed"))
    turns(supervisor, world, 20.0)
    assert state_of(supervisor) == "serving" and world.alive == [1] and world.lost == [0]


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), OutOfDiskError("full"), WorkerError("a bundle without a node")],
    ids=lambda error: type(error).__name__,
)
def test_an_attempt_that_cannot_begin_is_followed_by_another_with_the_same_epoch(
    world: World, error: Exception
) -> None:
    supervisor = serving(world)
    world.take_failures = deque([error] * 2)
    world.wrong = "rank 1 died"
    turns(supervisor, world, 20.0)
    assert not world.dead and supervisor.recovery.state is RecoveryState.SERVING
    assert world.lost == [0] and world.alive == [1]


def test_the_log_tells_a_lost_epoch_from_one_that_has_not_begun(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = serving(world)
    world.start_failures = deque([WorkerError("start failed")])
    world.wrong = "rank 1 died"
    turns(supervisor, world, 20.0)
    lines = [
        record.getMessage()
        for record in caplog.records
        if "epoch" in record.getMessage() or "KV cache" in record.getMessage()
    ]
    assert lines[:2] == [
        "epoch 0 is lost: rank 1 died",
        "epoch 1 has not begun: the next group could not be assembled: start failed",
    ]
    assert lines[2].startswith("epoch 1 serves")
    assert lines[3:] == ["the KV cache is computed again: no group stood by that has it"]


@pytest.mark.parametrize(
    ("is_convicted", "has_results", "lives"),
    [(True, True, True), (True, False, False), (False, False, False)],
)
def test_requests_that_kill_ranks_one_after_another_end_no_engine_if_each_is_found(
    world: World, is_convicted: bool, has_results: bool, lives: bool
) -> None:
    """Each after four crashes. Without any result between them, the machine is to blame."""
    supervisor = serving(world)
    supervisor._has_work = lambda: True
    num_crashes = 0
    while world.now_s < 8 * GIVE_UP_AFTER_S and not world.dead:
        world.wrong = "rank 1 died"
        num_crashes += 1
        turns(supervisor, world, 16.0)  # longer than the longest pause
        if is_convicted and num_crashes % 4 == 0:
            supervisor.convictions.note()
        if has_results and num_crashes % 32 == 0:
            supervisor.note_applied_result(-1)  # of an epoch that is over
    assert bool(world.dead) is not lives


def test_a_conviction_after_a_result_is_as_new_as_the_first(world: World) -> None:
    supervisor = serving(world)
    supervisor._last_applied_epoch = -1  # as after a loss
    supervisor.convictions.note()
    supervisor.check_group()
    supervisor.note_applied_result(0)  # of the present epoch
    supervisor.check_group()
    supervisor.convictions.note()
    assert supervisor.convictions.has_new()


def test_what_only_the_caller_can_mend_ends_the_engine(world: World) -> None:
    supervisor = serving(world)
    world.start_failures = deque([ClientError("the checkpoint has changed")])
    world.wrong = "rank 1 died"
    turns(supervisor, world, 20.0)
    assert [str(error) for error in world.dead] == ["the checkpoint has changed"]


@pytest.mark.parametrize("who", ["supervisor", "engine thread"])
def test_an_engine_that_has_stopped_for_good_keeps_no_processes_until_it_is_shut_down(
    world: World, who: str
) -> None:
    supervisor = serving(world)
    if who == "supervisor":
        world.start_failures = deque([ClientError("the checkpoint has changed")])
        world.wrong = "rank 1 died"
    else:
        supervisor.end()
    supervisor._run()
    assert not world.alive and world.num_standby_closes == 1
    supervisor.stop()
    assert world.num_standby_closes == 1, "they are ended once"


def test_the_thread_of_an_engine_that_dies_ends_ranks_and_spares_by_itself(world: World) -> None:
    supervisor = serving(world)
    supervisor._thread = threading.Thread(target=supervisor._run, daemon=True)
    world.start_failures = deque([ClientError("the checkpoint has changed")])
    supervisor.note_failed_step(0, "rank 1 died")
    supervisor._thread.start()
    supervisor._thread.join(60.0)
    assert not supervisor._thread.is_alive() and len(world.dead) == 1
    assert not world.alive and world.num_standby_closes == 1


def test_what_could_not_be_ended_is_ended_when_the_engine_is_shut_down(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = serving(world)
    supervisor.end()
    world.alive.append(0)
    world.close_failures = deque([NoAnswerError("processes [7] did not end")])
    supervisor._run()
    assert "a process of the engine is left: processes [7] did not end" in caplog.text
    supervisor.stop()
    assert not world.alive
