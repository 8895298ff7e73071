"""Requests that kill ranks: who is blamed, who runs alone, who is convicted."""

from __future__ import annotations

from random import Random

import pytest

from scheduler import records
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.suspects import (
    CLEARING_TOKENS,
    FAIL_STRIKES,
    FAIL_STRIKES_WITHOUT_TOKEN,
    KEEP_TURN_STRIKES,
    MAX_IDLE_POLLS,
)
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
    assert [seq.strikes for seq in sequences] == [1, 1, 1] and not scheduler.suspects.first


def run_alone(scheduler: Scheduler, name: str) -> None:
    """Run the first suspect until it is cleared."""
    for _ in range(CLEARING_TOKENS - 1):
        run_step(scheduler)
        assert running(scheduler) == [name]
    run_step(scheduler)
    assert running(scheduler) == []  # it waits in line again


def test_after_two_crashes_each_runs_alone_until_it_has_a_few_tokens() -> None:
    scheduler, _ = three()
    crash(scheduler)
    crash(scheduler)
    for name in "abc":
        run_alone(scheduler, name)
        assert scheduler.records.since(0.0)[-1].head_wait_reason == records.WAITS_FOR_SUSPECT
        assert all(seq.request_id != name for seq in scheduler.suspects.sequences)
    run_step(scheduler)
    assert running(scheduler) == ["a", "b", "c"]


def test_whoever_crashes_twice_alone_is_convicted_and_the_others_go_on() -> None:
    scheduler, [a, b, c] = three()
    crash(scheduler)
    crash(scheduler)
    run_alone(scheduler, "a")
    assert crash(scheduler) == []  # b
    assert crash(scheduler) == ["b"]
    assert (b.status, b.finish_reason) == (SequenceStatus.FINISHED, "error")
    run_alone(scheduler, "c")
    run_step(scheduler)
    assert running(scheduler) == ["a", "c"] and (a.strikes, c.strikes) == (0, 0)


def test_whoever_asks_for_the_same_is_convicted_too() -> None:
    scheduler = Scheduler(make_limits())
    for name, seed in [("a0", 1), ("a1", 2), ("a2", 3)]:
        scheduler.add(make_request(name, range(5), seed=seed))
    scheduler.add(make_request("hotter", range(5), temperature=0.5))
    scheduler.add(make_request("other", range(1, 6)))
    for _ in range(3):
        assert crash(scheduler) == []
    assert crash(scheduler) == ["a0", "a1", "a2"]
    run_alone(scheduler, "hotter")
    run_alone(scheduler, "other")
    run_step(scheduler)
    assert running(scheduler) == ["hotter", "other"]


def test_all_outputs_of_a_request_that_kills_when_it_decodes_are_convicted_together() -> None:
    """Each gets a token from its prompt, and the one that runs alone a token more each time."""
    scheduler = Scheduler(make_limits())
    outputs = [scheduler.add(make_request(f"a{i}", range(5), seed=i)) for i in (1, 2, 3)]
    other = scheduler.add(make_request("other", range(1, 6)))
    convicted: list[list[str]] = []
    for _ in range(FAIL_STRIKES):
        plan = must_schedule(scheduler)
        give(scheduler, *range(7, 7 + sum(plan.sampling_flags)))
        convicted.append(crash(scheduler))
    assert convicted == [[]] * (FAIL_STRIKES - 1) + [["a1", "a2", "a3"]]
    assert [seq.finish_reason for seq in outputs] == ["error"] * 3
    run_alone(scheduler, "other")
    assert other.finish_reason is None


def test_a_crash_after_a_few_tokens_starts_the_count_again() -> None:
    scheduler, sequences = three()
    for _ in range(3):
        for _ in range(CLEARING_TOKENS):
            run_step(scheduler)
        assert crash(scheduler) == []
    assert [seq.strikes for seq in sequences] == [1, 1, 1]


def long_ones(num: int, num_tokens: int) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler with requests of 5 tokens that generate `num_tokens`."""
    limits = make_limits(num_blocks=4 * num_tokens, max_model_len=2 * num_tokens)
    scheduler = Scheduler(limits)
    return scheduler, [
        scheduler.add(make_request(f"{i}", range(i, i + 5), max_tokens=num_tokens))
        for i in range(num)
    ]


def three_suspects() -> tuple[Scheduler, list[Sequence]]:
    """A scheduler with three requests after two crashes."""
    scheduler, sequences = long_ones(3, 100)
    crash(scheduler)
    crash(scheduler)
    return scheduler, sequences


def gave_up_its_turn(scheduler: Scheduler, suspect: Sequence) -> None:
    """Bring a suspect beside two others, since its mask is late."""
    run_step(scheduler)
    assert running(scheduler) == ["0"]
    scheduler.hold(suspect)
    for other in scheduler.suspects.sequences[1:]:
        run_alone(scheduler, other.request_id)
    run_step(scheduler)
    assert running(scheduler) == ["0", "1", "2"]


def test_crashes_of_a_suspect_beside_others_convict_nobody_and_then_it_keeps_its_turn() -> None:
    scheduler, [suspect, *_] = three_suspects()
    for number in range(KEEP_TURN_STRIKES):
        gave_up_its_turn(scheduler, suspect)
        assert (suspect.strikes, suspect.strikes_beside_others) == (2, number)
        assert crash(scheduler) == []
    run_step(scheduler)
    scheduler.hold(suspect)
    assert scheduler.schedule() is None, "the others wait for its mask"
    scheduler.resume(suspect)
    assert [crash(scheduler) for _ in range(4)] == [[], [], [], ["0"]]


def test_a_suspect_that_keeps_its_turn_gives_it_up_if_its_mask_takes_too_long() -> None:
    scheduler, [suspect, *_] = three_suspects()
    for _ in range(KEEP_TURN_STRIKES):
        gave_up_its_turn(scheduler, suspect)
        crash(scheduler)
    run_step(scheduler)
    scheduler.hold(suspect)
    for _ in range(MAX_IDLE_POLLS - 1):
        assert scheduler.schedule() is None
    scheduler.resume(suspect)  # the mask came in time
    run_step(scheduler)
    scheduler.hold(suspect)
    for _ in range(MAX_IDLE_POLLS):
        assert scheduler.schedule() is None
    run_step(scheduler)
    assert running(scheduler) == ["1"]


@pytest.mark.parametrize("in_which_step", ["the same", "the one before"])
def test_a_crash_beside_a_sequence_that_has_ended_is_not_one_alone(in_which_step: str) -> None:
    scheduler, [suspect, *others] = three_suspects()
    gave_up_its_turn(scheduler, suspect)
    if in_which_step == "the one before":
        scheduler.hold(suspect)
    must_schedule(scheduler)
    for other in others:
        scheduler.finish(other, "abort")
    if in_which_step == "the one before":
        scheduler.resume(suspect)
        must_schedule(scheduler)
    scheduler.start_epoch()
    assert (suspect.strikes, suspect.strikes_beside_others) == (2, 1)


def test_a_suspect_that_gave_up_its_turn_is_none_any_more_once_it_has_a_few_tokens() -> None:
    scheduler, [suspect, *_] = three_suspects()
    gave_up_its_turn(scheduler, suspect)
    for _ in range(CLEARING_TOKENS):
        run_step(scheduler)
    scheduler.hold(suspect)  # so it is in no step of the next crash
    assert crash(scheduler) == []
    assert suspect.strikes == 0 and not scheduler.suspects.first


@pytest.mark.parametrize("num_tokens", range(CLEARING_TOKENS))
def test_whoever_gets_a_few_tokens_before_each_crash_is_convicted_too(num_tokens: int) -> None:
    """A row that kills ranks only when it decodes gets a token from its prompt each time."""
    scheduler, [bad, *others] = long_ones(3, 500)
    num_crashes, num_run = 0, 0  # tokens of the bad one in this epoch
    while bad.status is not SequenceStatus.FINISHED:
        before = bad.num_output_tokens
        plan = must_schedule(scheduler)
        if bad.status is SequenceStatus.RUNNING and num_run >= num_tokens:
            scheduler.start_epoch()
            scheduler.check()
            num_crashes, num_run = num_crashes + 1, 0
            assert num_crashes <= FAIL_STRIKES, "it is never convicted"
        else:
            give(scheduler, *[9] * sum(plan.sampling_flags))
            num_run += bad.num_output_tokens - before
    assert num_crashes == (FAIL_STRIKES if num_tokens else FAIL_STRIKES_WITHOUT_TOKEN)
    assert bad.finish_reason == "error"
    while scheduler.has_unfinished_sequences:
        run_step(scheduler)
    assert [seq.finish_reason for seq in others] == ["length"] * 2


def test_crashes_without_a_token_among_those_with_a_few_do_not_start_the_count_again() -> None:
    """The death of a rank can be faster than the result of the step before."""
    scheduler, [bad, *_] = long_ones(3, 500)
    convicted: list[Sequence] = []
    for num_crashes in range(FAIL_STRIKES):
        assert not convicted
        if num_crashes % 2:
            run_step(scheduler)
        must_schedule(scheduler)
        convicted = scheduler.start_epoch()
    assert convicted == [bad] and bad.finish_reason == "error"


@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_random_kills_convict_nobody(seed: int) -> None:
    """Eight requests at a time, 160 tokens each; ranks die every 40 steps on average."""
    rng, num_kills, num_ended = Random(seed), 0, 0
    scheduler = Scheduler(
        make_limits(num_blocks=600, max_model_len=256, max_num_batched_tokens=2048)
    )
    while num_kills < 200:
        while len(scheduler.running) + len(scheduler.waiting) < 8:
            num_ended += 1
            prompt = [rng.randrange(9) for _ in range(rng.randint(1, 60))]
            scheduler.add(make_request(f"{num_ended}", prompt, max_tokens=160))
        plan = must_schedule(scheduler)
        if rng.random() < 1 / 40:
            num_kills += 1
            assert scheduler.start_epoch() == []
        else:
            give(scheduler, *[9] * sum(plan.sampling_flags))


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


@pytest.mark.parametrize("why", ["is aborted", "waits for its mask", "is cleared"])
def test_the_next_suspect_waits_for_the_steps_of_the_one_before(why: str) -> None:
    """If they kill a rank, it would be blamed for that."""
    scheduler, [a, *_] = three()
    crash(scheduler)
    crash(scheduler)
    for _ in range(CLEARING_TOKENS + 1):
        must_schedule(scheduler)
    if why == "is aborted":
        scheduler.finish(a, "abort")
    elif why == "waits for its mask":
        scheduler.retract(a)
    else:
        for _ in range(CLEARING_TOKENS):
            give(scheduler, 9)
    while scheduler.submitted_steps:
        assert scheduler.schedule() is None
        give(scheduler, 9)
    must_schedule(scheduler)
    assert running(scheduler) == ["b"]


def test_a_suspect_with_a_long_prompt_stays_alone_until_its_first_tokens() -> None:
    scheduler = Scheduler(make_limits(max_num_batched_tokens=8))
    scheduler.add(make_request("long", range(20)))
    scheduler.add(make_request("short", range(3)))
    crash(scheduler)
    crash(scheduler)
    for _ in range(2):
        run_step(scheduler)  # its prompt
        assert running(scheduler) == ["long"]
    run_alone(scheduler, "long")


def test_whoever_was_preempted_while_its_step_was_under_way_is_blamed_too() -> None:
    scheduler = Scheduler(make_limits(num_blocks=4, max_num_batched_tokens=16))
    first = scheduler.add(make_request("first", range(8)))
    second = scheduler.add(make_request("second", range(8, 15)))
    must_schedule(scheduler)
    must_schedule(scheduler)  # the first needs a block, and the second gives its blocks up
    assert second.status is SequenceStatus.WAITING
    scheduler.start_epoch()
    assert (first.strikes, second.strikes) == (1, 1)
