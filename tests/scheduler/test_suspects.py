"""Requests that kill ranks: who is blamed, who runs alone, who is convicted."""

from __future__ import annotations

from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus
from tests.scheduler.helpers import give, make_limits, make_request, must_schedule, run_step


def three(num_new: int = 64) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler with three requests of five tokens."""
    scheduler = Scheduler(make_limits(max_num_batched_tokens=num_new))
    return scheduler, [
        scheduler.add(make_request(name, range(i, i + 5))) for i, name in enumerate("abc")
    ]


def crash(scheduler: Scheduler) -> list[str]:
    """Plan a step and lose it. Returns the ids of the convicted requests."""
    must_schedule(scheduler)
    convicted = scheduler.start_epoch()
    scheduler.check()
    return [seq.request_id for seq in convicted]


def running(scheduler: Scheduler) -> list[str]:
    return [seq.request_id for seq in scheduler.running]


def test_one_crash_makes_nobody_a_suspect() -> None:
    scheduler, sequences = three()
    assert crash(scheduler) == []
    assert [seq.strikes for seq in sequences] == [1, 1, 1] and not scheduler.suspects


def test_after_two_crashes_each_runs_alone_until_it_has_a_token() -> None:
    scheduler, _ = three()
    crash(scheduler)
    crash(scheduler)
    for name in "abc":
        run_step(scheduler)
        assert running(scheduler) == []  # it waits in line again
        assert all(seq.request_id != name for seq in scheduler.suspects)
    run_step(scheduler)
    assert running(scheduler) == ["a", "b", "c"]


def test_whoever_crashes_twice_alone_is_convicted_and_the_others_go_on() -> None:
    scheduler, [a, b, c] = three()
    crash(scheduler)
    crash(scheduler)
    run_step(scheduler)  # a is fine
    assert crash(scheduler) == []  # b
    assert crash(scheduler) == ["b"]
    assert (b.status, b.finish_reason) == (SequenceStatus.FINISHED, "error")
    run_step(scheduler)  # c is fine
    run_step(scheduler)
    assert running(scheduler) == ["a", "c"] and (a.strikes, c.strikes) == (0, 0)


def test_a_crash_after_a_token_starts_the_count_again() -> None:
    scheduler, sequences = three()
    for _ in range(6):
        run_step(scheduler)
        assert crash(scheduler) == []
    assert [seq.strikes for seq in sequences] == [1, 1, 1]


def test_whoever_did_not_run_is_not_blamed() -> None:
    scheduler, [a, b, c] = three(num_new=8)  # c has no room in a step
    crash(scheduler)
    assert [a.strikes, b.strikes, c.strikes] == [1, 1, 0]


def test_ranks_that_are_lost_while_nothing_runs_are_nobodys_fault() -> None:
    scheduler, sequences = three()
    scheduler.start_epoch()
    assert [seq.strikes for seq in sequences] == [0, 0, 0]


def test_a_suspect_that_is_aborted_lets_the_next_one_run() -> None:
    scheduler, [a, *_] = three()
    crash(scheduler)
    crash(scheduler)
    must_schedule(scheduler)
    assert running(scheduler) == ["a"]
    scheduler.finish(a, "abort")
    give(scheduler, 9)  # the slot of a, which is gone
    must_schedule(scheduler)
    assert running(scheduler) == ["b"]


def test_a_suspect_with_a_long_prompt_stays_alone_until_its_first_token() -> None:
    scheduler = Scheduler(make_limits(max_num_batched_tokens=8))
    scheduler.add(make_request("long", range(20)))
    scheduler.add(make_request("short", range(3)))
    crash(scheduler)
    crash(scheduler)
    for _ in range(2):
        run_step(scheduler)
        assert running(scheduler) == ["long"]
    run_step(scheduler)
    assert running(scheduler) == []


def test_whoever_was_preempted_while_its_step_was_under_way_is_blamed_too() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_num_batched_tokens=16))
    first = scheduler.add(make_request("first", range(8)))
    second = scheduler.add(make_request("second", range(8, 15)))
    must_schedule(scheduler)
    must_schedule(scheduler)  # the first needs a block, and the second gives its blocks up
    assert second.status is SequenceStatus.WAITING
    scheduler.start_epoch()
    assert (first.strikes, second.strikes) == (1, 1)
