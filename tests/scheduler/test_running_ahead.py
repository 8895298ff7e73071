"""What happens to steps and tokens in flight: running ahead, preemption, endings, and lost
epochs.
"""

from __future__ import annotations

import pytest

from scheduler.errors import EngineError
from scheduler.messages import StepResult, int32_array
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceStatus
from tests.scheduler.helpers import (
    BLOCK,
    give,
    make_limits,
    make_request,
    must_schedule,
    rows,
    run_step,
    stored_of,
)


def make_scheduler(**sizes: int | bool) -> Scheduler:
    return Scheduler(make_limits(**sizes))


def two_that_outgrow_four_blocks(scheduler: Scheduler) -> None:
    """Each fills two of four blocks completely; the next token of either needs a third block."""
    scheduler.add(make_request("old", range(2 * BLOCK)))
    scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK)))
    run_step(scheduler, 8, 9)


# -- running ahead ---------------------------------------------------------------------------------


def test_next_step_is_planned_before_the_result_is_read() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 2, 3]))
    must_schedule(scheduler)
    assert rows(must_schedule(scheduler)) == [(seq.slot, 1, True)]
    assert (seq.num_pending_tokens, len(seq.token_ids)) == (2, 3)
    give(scheduler, 8)
    give(scheduler, 9)
    assert seq.token_ids.tolist() == [1, 2, 3, 8, 9]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_end_by_length_is_foreseen(max_tokens: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=max_tokens))
    for _ in range(max_tokens):
        must_schedule(scheduler)
    assert scheduler.schedule() is None


def test_token_in_flight_of_a_stopped_sequence_is_dropped() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1], stop=[7]))
    must_schedule(scheduler)
    must_schedule(scheduler)
    assert give(scheduler, 7).finished_sequences == [seq]
    output = give(scheduler, 8)
    assert (output.sequences, output.token_ids, seq.token_ids.tolist()) == ([], [], [1, 7])


def test_token_in_flight_of_an_aborted_sequence_is_dropped() -> None:
    scheduler = make_scheduler()
    aborted, other = (scheduler.add(make_request(name, [1])) for name in "ab")
    must_schedule(scheduler)
    scheduler.finish(aborted, "abort")
    output = give(scheduler, 8, 9)
    assert (output.sequences, output.token_ids) == ([other], [9])
    assert aborted.token_ids.tolist() == [1]


def test_blocks_and_slot_of_an_aborted_sequence_are_free_before_its_step_is_read() -> None:
    scheduler = make_scheduler(num_blocks=2, max_num_seqs=1)
    aborted = scheduler.add(make_request("a", range(7)))
    first = must_schedule(scheduler)
    scheduler.finish(aborted, "abort")
    other = scheduler.add(make_request("b", range(100, 107)))
    plan = must_schedule(scheduler)
    assert list(plan.released_slots) == list(first.slots) == list(plan.slots) == [other.slot]
    give(scheduler, 8)
    give(scheduler, 9)
    assert other.token_ids[-1] == 9, "the token of the slot's last holder went to the next"


def test_result_belongs_to_the_sequence_and_not_to_its_id() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(make_request("same", [1]))
    must_schedule(scheduler)
    scheduler.finish(first, "abort")
    second = scheduler.add(make_request("same", [1]))
    assert give(scheduler, 8).token_ids == []
    assert second.token_ids.tolist() == [1]


# -- preemption ------------------------------------------------------------------------------------


def test_latest_arrival_yields_when_blocks_run_out() -> None:
    scheduler = make_scheduler(num_blocks=4)
    two_that_outgrow_four_blocks(scheduler)
    must_schedule(scheduler)
    assert [seq.request_id for seq in scheduler.running] == ["old"]
    assert [seq.request_id for seq in scheduler.waiting] == ["new"]
    assert scheduler.stats.num_preemptions == 1


def test_preempted_sequence_resumes_with_identical_tokens() -> None:
    scheduler = make_scheduler(num_blocks=4)
    two_that_outgrow_four_blocks(scheduler)
    run_step(scheduler)
    scheduler.finish(scheduler.running[0], "abort")
    plan = must_schedule(scheduler)
    assert plan.admitted_rows is not None
    assert plan.admitted_rows.token_ids.tolist() == [*range(100, 100 + 2 * BLOCK), 9]
    assert list(plan.admitted_rows.num_prompt_tokens) == [2 * BLOCK]


def test_preempted_sequence_goes_before_those_that_have_never_run() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    two_that_outgrow_four_blocks(scheduler)
    scheduler.add(make_request("later", [1]))
    must_schedule(scheduler)
    assert [seq.request_id for seq in scheduler.waiting] == ["new", "later"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    two_that_outgrow_four_blocks(scheduler)
    scheduler.add(make_request("later", [1]))
    assert must_schedule(scheduler).admitted_rows is None


def test_full_blocks_of_a_preempted_sequence_are_found_again() -> None:
    scheduler = make_scheduler(num_blocks=4)
    two_that_outgrow_four_blocks(scheduler)
    run_step(scheduler)
    scheduler.finish(scheduler.running[0], "abort")
    # the tail block went to the sequence that grew
    assert stored_of(must_schedule(scheduler)) == [BLOCK]


def test_preempted_sequence_keeps_its_token_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("old", range(2 * BLOCK)))
    preempted = scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK)))
    must_schedule(scheduler)
    must_schedule(scheduler)
    assert (preempted.status, preempted.num_pending_tokens) == (SequenceStatus.WAITING, 1)
    output = give(scheduler, 8, 9)
    assert output.token_ids == [8, 9] and preempted.token_ids[-1] == 9


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old = scheduler.add(make_request("old", range(2 * BLOCK)))
    preempted = scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK)))
    must_schedule(scheduler)
    must_schedule(scheduler)
    scheduler.finish(old, "abort")
    assert scheduler.schedule() is None
    give(scheduler, 8, 9)
    plan = must_schedule(scheduler)
    assert plan.admitted_rows is not None and list(plan.admitted_rows.num_tokens) == [2 * BLOCK + 1]
    assert preempted.status is SequenceStatus.RUNNING


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"stop": [9]}, "stop"), ({"max_tokens": 1}, "length")]
)
def test_preempted_sequence_can_end_with_its_token_in_flight(
    sizes: dict[str, int], reason: str
) -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("old", range(2 * BLOCK)))
    preempted = scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK), **sizes))  # type: ignore[arg-type]
    must_schedule(scheduler)
    must_schedule(scheduler)
    assert preempted.status is SequenceStatus.WAITING
    assert give(scheduler, 8, 9).finished_sequences == [preempted]
    assert preempted.finish_reason == reason and not scheduler.waiting


def test_preempted_sequence_can_be_aborted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("old", range(2 * BLOCK)))
    preempted = scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK)))
    must_schedule(scheduler)
    must_schedule(scheduler)
    scheduler.finish(preempted, "abort")
    scheduler.check()
    assert give(scheduler, 8, 9).token_ids == [8]


def test_sequence_alone_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3)
    seq = scheduler.add(make_request("a", [1], max_tokens=100))
    while scheduler.has_unfinished_sequences:
        run_step(scheduler)
    assert (scheduler.stats.num_preemptions, len(seq.token_ids)) == (0, 3 * BLOCK)


# -- lost epochs -----------------------------------------------------------------------------------


def busy_scheduler() -> Scheduler:
    """One decoding ahead, one in its prompt, one waiting; two steps in flight."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for name, length in {"a": 6, "b": 20, "c": 3}.items():
        scheduler.add(make_request(name, range(length)))
    must_schedule(scheduler)
    must_schedule(scheduler)
    assert len(scheduler.running) == 2 and len(scheduler.submitted_steps) == 2
    return scheduler


def test_new_epoch_starts_every_sequence_again_in_order() -> None:
    scheduler = busy_scheduler()
    scheduler.start_epoch()
    scheduler.check()
    assert [seq.request_id for seq in scheduler.waiting] == ["a", "b", "c"]
    assert not scheduler.running and not scheduler.submitted_steps
    plan = must_schedule(scheduler)
    assert (plan.step_id, plan.epoch, list(plan.released_slots)) == (0, 1, [])


def test_new_epoch_forgets_tokens_that_were_not_read() -> None:
    scheduler = busy_scheduler()
    give(scheduler, 5)
    scheduler.start_epoch()
    assert [seq.num_pending_tokens for seq in scheduler.waiting] == [0, 0, 0]
    plan = must_schedule(scheduler)
    assert plan.admitted_rows is not None and plan.admitted_rows.token_ids[:7].tolist() == [
        *range(6),
        5,
    ]


def test_new_epoch_finds_no_cached_blocks() -> None:
    scheduler = busy_scheduler()
    scheduler.start_epoch()
    assert stored_of(must_schedule(scheduler))[0] == 0


def test_result_of_a_lost_epoch_is_refused() -> None:
    scheduler = busy_scheduler()
    scheduler.start_epoch()
    must_schedule(scheduler)
    with pytest.raises(EngineError, match="step 0 of epoch 0, expected step 0 of epoch 1"):
        scheduler.apply(StepResult(step_id=0, epoch=0, token_ids=int32_array([5])))


def test_new_epoch_is_no_preemption() -> None:
    scheduler = busy_scheduler()
    scheduler.start_epoch()
    assert scheduler.stats.num_preemptions == 0


def test_sequence_that_ended_stays_ended_in_a_new_epoch() -> None:
    scheduler = busy_scheduler()
    scheduler.finish(scheduler.running[0], "abort")
    scheduler.start_epoch()
    assert [seq.request_id for seq in scheduler.waiting] == ["b", "c"]


def test_preempted_sequence_loses_its_token_in_flight_with_the_epoch() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("old", range(2 * BLOCK)))
    preempted = scheduler.add(make_request("new", range(100, 100 + 2 * BLOCK)))
    must_schedule(scheduler)
    must_schedule(scheduler)
    assert preempted.num_pending_tokens == 1
    scheduler.start_epoch()
    scheduler.check()
    assert (preempted.num_pending_tokens, preempted.num_total_tokens) == (0, 2 * BLOCK)
