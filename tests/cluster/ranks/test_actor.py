"""What a rank's actor does by itself, without Ray: how it follows its share of the cores, and what
becomes of a spare that cannot warm up.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.ranks import actor as rank_actor
from cluster.ranks.actor import RankActor
from scheduler.errors import WorkerError

Share = tuple[tuple[int, ...], int]  # cores and number of threads


class EndOfTestError(Exception):
    """Ends the loop that never ends."""


class FollowingActor(RankActor):
    """An actor without Ray, whose worker notes on how many threads it computes."""

    def __init__(self) -> None:
        self._rank = 0
        self.num_threads: list[int] = []
        worker: Any = SimpleNamespace(set_num_threads=self.num_threads.append)
        self._worker = worker
        self._ready_event = threading.Event()
        self._ready_event.set()
        self._compute_executor = ThreadPoolExecutor(1)

    def follow(self, first: Share, *later: Share) -> None:
        shares = iter(later)

        def next_share() -> Share:
            for share in shares:
                return share
            raise EndOfTestError

        core_share: Any = SimpleNamespace(cores_and_num_threads=next_share)
        with pytest.raises(EndOfTestError):
            self._follow_core_share(core_share, first)
        self._compute_executor.shutdown()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The cores to which the computing thread was moved."""
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(rank_actor, "CORE_CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(rank_actor, "pin_to_cores", pinned.append)
    return pinned


def test_a_rank_follows_its_share_of_the_cores(pinned: list[tuple[int, ...]]) -> None:
    """More ranks than cores leave the same cores, but one thread on them."""
    both, first = (0, 1), (0,)
    actor = FollowingActor()
    actor.follow((both, 2), (both, 2), (both, 1), (both, 1), (both, 2), (first, 1), (first, 1))
    assert actor.num_threads == [1, 2, 1]
    assert pinned == [both, both, first]


def test_a_rank_whose_container_has_lost_its_cores_stays_and_follows_the_next_share(
    monkeypatch: pytest.MonkeyPatch, pinned: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    lost, left = (0, 1), (2, 3)

    def pin(cores: tuple[int, ...]) -> None:
        if cores == lost:
            raise OSError(errno.EINVAL, "Invalid argument")
        pinned.append(cores)

    monkeypatch.setattr(rank_actor, "pin_to_cores", pin)
    actor = FollowingActor()
    actor.follow((lost + left, 4), (lost, 2), (lost, 2), (left, 2))
    assert actor.num_threads == [2, 2] and pinned == [left]
    assert caplog.text.count("rank 0 stays on the cores that it has: [Errno 22]") == 1


class UnimportableSpare(RankActor):
    """A spare without Ray, whose worker cannot be imported."""

    def __init__(self) -> None:
        self._rank, self._worker, self._warm_error = 1, None, None
        self._ready_event = threading.Event()

    def _import(self) -> None:
        raise ImportError("libgomp.so.1: cannot open shared object file")


def test_whoever_waits_for_a_spare_that_cannot_be_imported_gets_an_error() -> None:
    spare = UnimportableSpare()
    warm = ThreadPoolExecutor(1).submit(spare._warm)  # the thread's priority stays low
    assert isinstance(warm.exception(60), ImportError)
    wait = ThreadPoolExecutor(1).submit(spare.wait_until_warm)
    try:
        with pytest.raises(WorkerError, match=r"spare of rank 1 cannot warm up: ImportError: libg"):
            wait.result(60)
    finally:
        spare._ready_event.set()


class WarmingSpare(RankActor):
    """A spare without Ray, whose worker is imported at once."""

    def __init__(self, warm_up_spare: Callable[[], None] = lambda: None) -> None:
        process: Any = object()
        worker: Any = SimpleNamespace(warm_up_spare=warm_up_spare, has_weights=False)
        self._process, self._rank, self._worker, self._warm_error = process, 1, worker, None
        self._ready_event = threading.Event()

    def _import(self) -> None:
        pass


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_spare_warms_up_where_a_sandbox_forbids_the_lowest_priority(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def forbid(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "SCHED_IDLE", 5, raising=False)
    monkeypatch.setattr(os, "sched_param", int, raising=False)
    monkeypatch.setattr(os, "sched_setscheduler", forbid, raising=False)
    spare = WarmingSpare()
    spare._warm()
    assert spare.wait_until_warm() is spare._process


def test_a_spare_whose_worker_cannot_warm_up_never_counts_as_warm() -> None:
    """It would load the weights a second time."""

    def fail() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    spare = WarmingSpare(fail)
    warm = ThreadPoolExecutor(1).submit(spare._warm)
    assert isinstance(warm.exception(60), OSError)
    with pytest.raises(WorkerError, match=r"a spare of rank 1 cannot warm up: OSError: .*allocate"):
        spare.wait_until_warm()


def test_a_rank_that_stands_by_loads_no_weights_of_its_own() -> None:
    """Such as where the memory of the rank that serves could not be opened."""
    spare = WarmingSpare()
    spare._ready_event.set()
    place: Any = None
    with pytest.raises(WorkerError, match="rank 1 stands by without the weights of the rank"):
        spare.start(("127.0.0.1", 1), place, 1, [], 4, is_standby=True)
