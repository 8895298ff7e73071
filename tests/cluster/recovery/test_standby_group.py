"""When a group stands by, and what becomes of it, without processes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.ranks.group import GroupReport, RankGroup, RankHandle
from cluster.recovery import standby as standby_module
from cluster.recovery.standby import FIRST_DELAY_S, MAX_FAILED_GPU_STARTS, Standby
from configs.engine import EngineConfig
from scheduler.errors import WorkerError
from tests.cluster.recovery.simulator import Now
from workers.memory.inheritance import RankMemoryHandles
from workers.memory.lasting import MemoryHandle

REPORT = GroupReport(num_blocks=1, seconds={}, log_lines=())


class Group:
    """Fails to stand by with the next of `failures`, if there is one."""

    failures: deque[Exception]

    def __init__(self, maker: Any, ranks: Any) -> None:
        self.ranks, self.is_closed, self.can_answer = ranks, False, True

    def stand_by(self, first: GroupReport) -> None:
        if self.failures:
            raise self.failures.popleft()

    def all_ranks_answer(self, limit_s: float) -> bool:
        return self.can_answer

    def close(self) -> None:
        self.is_closed = True


class WarmSpares:
    """Spares that are warm at once, unless they cannot be made, with the next of `failures`."""

    failures: deque[Exception]

    def __init__(self, maker: Any) -> None:
        self.delays_s: list[float] = []
        self.are_warm = True
        self.memories: list[RankMemoryHandles | None] = []

    def prepare(self, memories: Any, makes_spares: bool) -> None:
        self.memories = memories
        if self.failures:
            raise self.failures.popleft()

    def delay(self, seconds: float) -> None:
        self.delays_s.append(seconds)

    def warm_spares(self) -> list[RankHandle]:
        return [RankHandle(None)]

    def hand_over(self) -> list[RankHandle]:
        return [RankHandle(None)]

    def take(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def maker_with(spares: str) -> Any:
    engine = EngineConfig(spares=spares)
    config = SimpleNamespace(device="cpu", engine=engine, has_standby=spares != "off")
    return SimpleNamespace(config=config)


@pytest.fixture
def standby(monkeypatch: pytest.MonkeyPatch) -> Standby:
    monkeypatch.setattr(standby_module, "Spares", WarmSpares)
    monkeypatch.setattr(standby_module, "processes_on_this_node", lambda processes: {})
    Group.failures, WarmSpares.failures = deque(), deque()
    made: Any = Group
    standby = Standby(maker_with("warm"), made)
    standby._executor = AtOnce()  # type: ignore[assignment]
    return standby


class AtOnce(Now):
    """Runs what it is given at once, and keeps any error for who asks."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        future: Any = super().submit(lambda: None)
        try:
            function(*arguments)
        except Exception as error:
            future = type(future)()
            future.set_exception(error)
        return future


WEIGHTS = MemoryHandle(host="h", name="w", path="p", num_bytes=1, identity=1)


def prepare(
    standby: Standby,
    times: int = 1,
    weights: MemoryHandle | None = WEIGHTS,
    cache: MemoryHandle | None = WEIGHTS,
) -> None:
    memories = (
        RankMemoryHandles(weights=WEIGHTS, cache=WEIGHTS),
        RankMemoryHandles(weights=weights, cache=cache),
    )
    present: Any = SimpleNamespace(ranks=[RankHandle(None, memory=each) for each in memories])
    for _ in range(times):
        standby.prepare(present, REPORT, True)


def delays_of(standby: Standby) -> list[float]:
    spares: Any = standby._spares
    return list(spares.delays_s)


def memories_of(standby: Standby) -> list[RankMemoryHandles | None]:
    """What the spares were given last."""
    spares: Any = standby._spares
    return list(spares.memories)


def test_warm_spares_become_a_group_that_is_taken_once(standby: Standby) -> None:
    prepare(standby)
    assert len(standby.ready_spares()) == 1
    group, spares = standby.take()
    assert group is not None and spares == [] and standby.ready_spares() == []
    assert standby.take() == (None, [])


@pytest.mark.parametrize(
    "error", [WorkerError("rank 1 died"), MemoryError(), KeyError("a bug"), OSError(24, "files")]
)
def test_a_group_that_cannot_stand_by_harms_nobody_and_is_made_later_and_later(
    standby: Standby, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    Group.failures = deque([error] * 3)
    prepare(standby, times=6)
    assert delays_of(standby) == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert caplog.text.count("no group stands by") == 3
    prepare(standby, times=2)
    assert standby.take()[0] is not None


def test_on_a_gpu_it_is_not_tried_for_ever_and_spares_are_warm_then(
    standby: Standby, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt takes time of the ranks that serve. The next ranks may have more luck."""
    standby._is_on_gpu = True
    Group.failures = deque([WorkerError("exclusive process mode")] * MAX_FAILED_GPU_STARTS)
    prepare(standby, times=2 * MAX_FAILED_GPU_STARTS + 3)
    assert standby._group is None and len(standby.ready_spares()) == 1
    assert caplog.text.count("from now on") == 1
    assert memories_of(standby) == [None, None], "it would stay when a rank ends"
    standby.take()
    prepare(standby)
    assert all(memories_of(standby)) and standby.take()[0] is not None


@pytest.mark.parametrize("weights", [WEIGHTS, None], ids=["with groups", "without groups"])
def test_spares_that_cannot_be_made_harm_nobody_and_are_made_later_and_later(
    standby: Standby, weights: MemoryHandle | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Once they are warm, the delays begin with the shortest again."""
    for _ in range(2):
        WarmSpares.failures = deque(
            [WorkerError("a spare cannot be used: no libgomp"), WorkerError("no node"), OSError()]
        )
        prepare(standby, times=5, weights=weights)
        standby.take()
    delays_s = [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays_of(standby) == delays_s * 2
    assert caplog.text.count("no group stands by: a spare cannot be used: no libgomp") == 2


@pytest.mark.parametrize("memory", ["weights", "cache"])
def test_where_spares_cannot_share_the_weights_no_group_is_formed_and_the_log_says_so_once(
    standby: Standby, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the cache: it would hold them a second time. The spares stay, and load weights if they are
    needed.
    """
    prepare(standby, times=3, **{memory: None})
    assert standby._group is None and caplog.text.count("no group stands by") == 1
    assert len(standby.ready_spares()) == 1
    assert standby.take() == (None, [])
    prepare(standby)  # the next ranks can share theirs
    assert standby.take()[0] is not None


def test_an_engine_without_spares_says_nothing_of_groups(caplog: pytest.LogCaptureFixture) -> None:
    prepare(Standby(maker_with("off")), weights=None)
    assert not caplog.text


def test_a_group_that_has_lost_a_process_or_does_not_answer_is_not_taken(standby: Standby) -> None:
    for lose in (
        lambda group: standby._note_end(group),
        lambda group: setattr(group, "can_answer", False),
    ):
        prepare(standby)
        group: Any = standby._group
        lose(group)
        assert standby.take() == (None, []) and group.is_closed


def test_the_end_of_a_process_of_an_earlier_group_means_nothing(standby: Standby) -> None:
    prepare(standby)
    earlier, _ = standby.take()
    assert earlier is not None
    prepare(standby)
    standby._note_end(earlier)
    assert standby.take()[0] is not None


def group_with(*identities: int | None) -> RankGroup:
    maker: Any = SimpleNamespace(config=None, num_ranks=len(identities))
    ranks = [
        RankHandle(
            None,
            memory=RankMemoryHandles(
                cache=None
                if identity is None
                else MemoryHandle(host="h", name="n", path="p", num_bytes=1, identity=identity)
            ),
        )
        for identity in identities
    ]
    return RankGroup(maker, ranks=ranks)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_same"),
    [
        ((1, 2), (1, 2), True),
        ((1, 3), (1, 2), False),
        ((1, None), (1, 2), False),
        ((None, None), (None, None), False),
    ],
)
def test_a_cache_survives_only_if_each_rank_has_the_very_memory_of_the_one_before(
    mine: tuple[int | None, ...], theirs: tuple[int | None, ...], is_same: bool
) -> None:
    assert group_with(*mine).has_cache_of(group_with(*theirs)) is is_same
