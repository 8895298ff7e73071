"""The state machine of recovery, under a clock that the test controls."""

from __future__ import annotations

import pytest

from cluster.recovery.states import BACKOFF_DELAYS_S, Recovery, RecoveryState
from cluster.timeouts import GIVE_UP_AFTER_S


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recovery(clock: Clock) -> Recovery:
    return Recovery(clock)


def fail(recovery: Recovery, why: str = "rank 1 died") -> None:
    assert recovery.note_fault(why)
    recovery.note_fenced()


def test_the_first_attempt_follows_at_once(recovery: Recovery) -> None:
    assert recovery.note_fault("rank 1 died")
    seen = [recovery.state]
    recovery.note_fenced()
    seen.append(recovery.state)
    recovery.note_assembled()
    assert [*seen, recovery.state] == [
        RecoveryState.FENCING,
        RecoveryState.ASSEMBLING,
        RecoveryState.SERVING,
    ]
    assert recovery.num_recoveries == 1


def test_later_attempts_follow_after_growing_delays(recovery: Recovery, clock: Clock) -> None:
    fail(recovery)
    waited = []
    for _ in range(8):
        fail(recovery, "rank 0 died while loading")
        waited.append(recovery.wait_s())
        assert not recovery.retry()
        clock.now_s += recovery.wait_s()
        assert recovery.retry()
    assert waited == [*BACKOFF_DELAYS_S[1:], BACKOFF_DELAYS_S[-1], BACKOFF_DELAYS_S[-1]]


def test_a_result_ends_the_count_of_attempts(recovery: Recovery) -> None:
    for _ in range(3):
        fail(recovery)
        assert recovery.state is RecoveryState.ASSEMBLING
        recovery.note_assembled()
        recovery.note_progress()


def test_a_group_that_dies_before_it_has_a_result_is_another_attempt(recovery: Recovery) -> None:
    fail(recovery)
    recovery.note_assembled()
    fail(recovery)
    assert recovery.state is RecoveryState.BACKOFF


def test_without_a_result_for_too_long_it_gives_up_and_names_each_attempt(
    recovery: Recovery, clock: Clock
) -> None:
    fail(recovery, "rank 1 died")
    clock.now_s += GIVE_UP_AFTER_S + 1
    fail(recovery, "no memory")
    assert recovery.state is RecoveryState.DEAD
    assert recovery.report() == "after 0.0 s: rank 1 died; after 301.0 s: no memory"


def test_a_fault_that_is_known_changes_nothing(recovery: Recovery) -> None:
    assert recovery.note_fault("rank 0 died")
    assert not recovery.note_fault("rank 1 died")
    assert recovery.failures == ["after 0.0 s: rank 0 died"]


def test_nothing_follows_the_end(recovery: Recovery) -> None:
    recovery.give_up()
    assert not recovery.note_fault("rank 0 died") and not recovery.retry()
    assert recovery.state is RecoveryState.DEAD


def test_progress_while_it_is_not_serving_does_not_count(recovery: Recovery) -> None:
    assert recovery.note_fault("rank 0 died")
    recovery.note_progress()  # a result that was on its way
    assert len(recovery.failures) == 1


def test_ranks_that_die_while_idle_hours_apart_are_no_row_of_attempts(
    recovery: Recovery, clock: Clock
) -> None:
    for _ in range(3):
        fail(recovery)
        assert recovery.state is RecoveryState.ASSEMBLING
        recovery.note_assembled()
        clock.now_s += 3600.0
        recovery.note_idle()


def test_a_group_that_dies_soon_after_it_came_is_another_attempt_though_it_was_idle(
    recovery: Recovery, clock: Clock
) -> None:
    fail(recovery)
    recovery.note_assembled()
    clock.now_s += 1.0
    recovery.note_idle()
    fail(recovery)
    assert recovery.state is RecoveryState.BACKOFF
