"""Which sequences run when, with how many tokens, and how they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler import records
from scheduler.errors import EngineError, RequestError
from scheduler.limits import SchedulerLimits, check_request
from scheduler.messages import StepResult, TokenLogprobs, int32_array
from scheduler.scheduler import Scheduler
from scheduler.sequence import NO_SLOT, SequenceStatus
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


# -- states ----------------------------------------------------------------------------------------


def test_sequence_waits_then_runs_then_finishes() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 2, 3], max_tokens=1))
    states = [seq.status]
    must_schedule(scheduler)
    states.append(seq.status)
    output = give(scheduler, 9)
    states.append(seq.status)
    assert states == [SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.FINISHED]
    assert output.finished_sequences == [seq] and not scheduler.has_unfinished_sequences


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_ends_with_length(max_tokens: int) -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 2, 3], max_tokens=max_tokens))
    while scheduler.has_unfinished_sequences:
        run_step(scheduler)
    assert (seq.num_output_tokens, seq.finish_reason) == (max_tokens, "length")


def test_max_model_len_ends_with_length() -> None:
    scheduler = make_scheduler(max_model_len=10)
    seq = scheduler.add(make_request("a", range(7), max_tokens=100))
    while scheduler.has_unfinished_sequences:
        run_step(scheduler)
    assert (len(seq.token_ids), seq.finish_reason) == (10, "length")


def test_sequence_that_outgrows_the_whole_cache_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=2)
    seq = scheduler.add(make_request("a", [1, 2, 3], max_tokens=100))
    later = scheduler.add(make_request("b", [4, 5], max_tokens=1))
    while not seq.finish_reason:
        run_step(scheduler)
    assert (len(seq.token_ids), seq.finish_reason) == (2 * BLOCK, "length")
    while scheduler.has_unfinished_sequences:
        run_step(scheduler)
    assert later.finish_reason == "length"


def test_stop_token_ends_with_stop_and_is_kept() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 2], stop=[7]))
    run_step(scheduler, 5)
    run_step(scheduler, 7)
    assert (seq.token_ids.tolist(), seq.finish_reason) == ([1, 2, 5, 7], "stop")


def test_stop_token_in_the_prompt_ends_nothing() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 7], stop=[7]))
    run_step(scheduler, 5)
    assert seq.status is SequenceStatus.RUNNING


def test_stop_token_that_is_also_the_last_ends_with_stop() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1], max_tokens=1, stop=[7]))
    run_step(scheduler, 7)
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("running", [False, True])
def test_finishing_from_outside_gives_everything_back(running: bool) -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", range(9)))
    if running:
        run_step(scheduler)
    scheduler.finish(seq, "abort")
    scheduler.check()
    assert (seq.finish_reason, seq.slot, scheduler.block_manager.num_free_blocks) == (
        "abort",
        NO_SLOT,
        64,
    )
    assert scheduler.schedule() is None


def test_finishing_twice_keeps_the_first_reason() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1]))
    scheduler.finish(seq, "stop")
    scheduler.finish(seq, "abort")
    assert seq.finish_reason == "stop"


def test_a_step_admits_no_more_once_it_has_found_many_tokens_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time on the host would grow with every output of a long prompt."""
    monkeypatch.setattr("scheduler.scheduler.MAX_CACHED_TOKENS", 3 * BLOCK)
    scheduler = make_scheduler()
    scheduler.add(make_request("first", range(2 * BLOCK + 1)))
    run_step(scheduler)
    for number in range(5):
        scheduler.add(make_request(f"{number}", range(2 * BLOCK + 1)))
    assert [stored_of(run_step(scheduler)) for _ in range(3)] == [
        [2 * BLOCK] * 2,
        [2 * BLOCK] * 2,
        [2 * BLOCK],
    ]
    assert [record.head_wait_reason for record in scheduler.records.since(0.0)[1:]] == [
        records.WAITS_FOR_CACHED_TOKENS,
        records.WAITS_FOR_CACHED_TOKENS,
        "",
    ]


# -- what is refused -------------------------------------------------------------------------------


def refusal(
    sizes: SchedulerLimits, token_ids: list[int], num_prompt_tokens: int | None = None
) -> RequestError:
    scheduler = Scheduler(sizes)
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request("a", token_ids, num_prompt_tokens=num_prompt_tokens))
    assert not scheduler.has_unfinished_sequences
    assert caught.value.parameter == "prompt"
    return caught.value


def test_prompt_beyond_max_model_len_is_refused_with_the_numbers() -> None:
    message = str(refusal(make_limits(max_model_len=10), [1] * 10))
    assert "10 tokens" in message and "at most 9" in message and "max_model_len" in message


def test_prompt_beyond_the_whole_cache_is_refused_with_the_numbers() -> None:
    message = str(refusal(make_limits(num_blocks=2), [1] * 8))
    assert (
        "8 tokens" in message and "at most 7" in message and "KV cache of 2 blocks of 4" in message
    )


def test_longest_possible_prompt_gives_one_token() -> None:
    scheduler = make_scheduler(max_model_len=10)
    seq = scheduler.add(make_request("a", range(9)))
    run_step(scheduler)
    assert (seq.num_output_tokens, seq.finish_reason) == (1, "length")


def test_empty_prompt_is_refused() -> None:
    assert "empty" in str(refusal(make_limits(), []))


@pytest.mark.parametrize("num_prompt_tokens", [0, 3])
def test_request_whose_prompt_is_not_among_its_tokens_is_refused(num_prompt_tokens: int) -> None:
    assert f"{num_prompt_tokens} of 2 tokens" in str(
        refusal(make_limits(), [1, 2], num_prompt_tokens)
    )


@pytest.mark.parametrize("token", [-1, 1000, 5000])
def test_token_outside_the_vocabulary_is_refused_by_its_id(token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token} is outside") as caught:
        check_request(make_request("a", [1, token, 2]), make_limits())
    assert caught.value.parameter == "prompt"


# -- tokens sent again -----------------------------------------------------------------------------


def test_request_sent_again_goes_on_after_its_tokens() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1, 2, 8, 9], num_prompt_tokens=2, max_tokens=3))
    plan = run_step(scheduler, 7)
    assert plan.admitted_rows is not None and list(plan.admitted_rows.num_prompt_tokens) == [2]
    assert (seq.token_ids.tolist(), seq.finish_reason) == ([1, 2, 8, 9, 7], "length")


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([1, 2, 8, 9], "length"),
        ([1, 2, 7], "stop"),
        ([1, 2, 8, 9, 9], "length"),
        ([1, 2, *[8] * 20], "length"),
    ],
)
def test_request_that_its_own_tokens_end_comes_back_finished(
    token_ids: list[int], reason: str
) -> None:
    scheduler = make_scheduler(max_model_len=12)
    seq = scheduler.add(make_request("a", token_ids, num_prompt_tokens=2, max_tokens=2, stop=[7]))
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, reason)
    scheduler.check()
    assert scheduler.schedule() is None and not scheduler.has_unfinished_sequences


# -- one loop --------------------------------------------------------------------------------------


def test_decodes_and_a_prefill_share_a_step() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(make_request("a", [1, 2, 3]))
    run_step(scheduler)
    second = scheduler.add(make_request("b", [4, 5]))
    assert rows(must_schedule(scheduler)) == [(first.slot, 1, True), (second.slot, 2, True)]


def test_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = scheduler.add(make_request("a", range(20)))
    plans = [run_step(scheduler) for _ in range(4)]
    assert [rows(plan) for plan in plans] == [
        [(seq.slot, 8, False)],
        [(seq.slot, 8, False)],
        [(seq.slot, 4, True)],
        [(seq.slot, 1, True)],
    ]


def test_decodes_go_on_while_a_prompt_runs_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first = scheduler.add(make_request("a", [1]))
    run_step(scheduler)
    second = scheduler.add(make_request("b", range(18)))
    plans = [run_step(scheduler) for _ in range(3)]
    assert [rows(plan) for plan in plans] == [
        [(first.slot, 1, True), (second.slot, 7, False)],
        [(first.slot, 1, True), (second.slot, 7, False)],
        [(first.slot, 1, True), (second.slot, 4, True)],
    ]


def test_everybody_running_moves_while_prompts_keep_arriving() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40)
    for arrival in range(30):
        scheduler.add(make_request(f"r{arrival}", [arrival] * 20, max_tokens=5))
        plan = must_schedule(scheduler)
        assert list(plan.slots) == [seq.slot for seq in scheduler.running]
        give(scheduler, *[9] * sum(plan.sampling_flags))


def test_step_never_exceeds_its_token_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for i in range(5):
        scheduler.add(make_request(f"r{i}", [i] * 7))
    for _ in range(12):
        assert sum(run_step(scheduler).num_new_tokens) <= 10


def test_never_more_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1], max_tokens=3))
    run_step(scheduler)
    run_step(scheduler)
    assert [seq.request_id for seq in scheduler.running] == ["a", "b"]
    run_step(scheduler)
    must_schedule(scheduler)
    assert [seq.request_id for seq in scheduler.running] == ["c"]


def test_waiting_sequences_are_admitted_in_order_of_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", range(9)))
    scheduler.add(make_request("b", range(100, 109)))
    small = scheduler.add(make_request("c", [1]))
    must_schedule(scheduler)
    assert small.status is SequenceStatus.WAITING, (
        "a small request overtook one that has no room yet"
    )


def test_budget_below_max_num_seqs_is_an_error() -> None:
    with pytest.raises(AssertionError):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=7)


def test_block_table_is_never_wider_than_max_model_len_needs() -> None:
    scheduler = make_scheduler(max_model_len=2 * BLOCK + 1)
    seq = scheduler.add(make_request("a", [1], max_tokens=100))
    while scheduler.has_unfinished_sequences:
        must_schedule(scheduler)
        assert len(seq.block_table) <= 3
        give(scheduler, 9)


# -- results ---------------------------------------------------------------------------------------


def test_result_of_another_step_is_refused_by_its_numbers() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    must_schedule(scheduler)
    with pytest.raises(EngineError, match="step 5 of epoch 0, expected step 0 of epoch 0"):
        scheduler.apply(StepResult(step_id=5, epoch=0, token_ids=int32_array([1])))
    assert give(scheduler, 9).token_ids == [9], "the refused result changed something"


def test_result_without_a_step_is_refused() -> None:
    with pytest.raises(EngineError, match="expected no step"):
        make_scheduler().apply(StepResult(step_id=0, epoch=0, token_ids=int32_array()))


def test_result_with_another_number_of_tokens_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    must_schedule(scheduler)
    with pytest.raises(EngineError, match="sampled 2 tokens for 1 rows"):
        give(scheduler, 8, 9)


def test_result_with_another_number_of_logprobs_is_refused_before_a_token_is_taken() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", [1]))
    must_schedule(scheduler)
    with pytest.raises(EngineError, match="0 logprobs for 1 tokens"):
        scheduler.apply(StepResult(step_id=0, epoch=0, token_ids=int32_array([9]), logprobs=()))
    assert seq.token_ids.tolist() == [1]


def test_logprobs_follow_the_tokens_that_are_kept() -> None:
    scheduler = make_scheduler()
    dropped = scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("b", [2]))
    plan = must_schedule(scheduler)
    scheduler.finish(dropped, "abort")
    logprobs = (TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0))
    output = scheduler.apply(
        StepResult(
            step_id=plan.step_id, epoch=plan.epoch, token_ids=int32_array([8, 9]), logprobs=logprobs
        )
    )
    assert (output.token_ids, output.logprobs) == ([9], [logprobs[1]])


# -- laws ------------------------------------------------------------------------------------------


def busy_scheduler() -> Scheduler:
    """Two decoding, one in the middle of its prompt, one waiting."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for name, length in {"a": 3, "b": 3, "c": 20, "d": 1}.items():
        scheduler.add(make_request(name, range(length)))
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (3, 1)
    return scheduler


@pytest.mark.parametrize(
    ("breakage", "law"),
    [
        (
            lambda s: setattr(s.running[0], "num_computed_tokens", 100),
            "token counts are out of order",
        ),
        (lambda s: s.running[1].block_table.pop(), "has computed beyond its blocks"),
        (lambda s: setattr(s.running[0], "slot", NO_SLOT), "in the running queue but not running"),
        (lambda s: setattr(s.waiting[0], "slot", 3), "in the waiting queue but not waiting"),
        (lambda s: setattr(s.waiting[0], "num_computed_tokens", 1), "waiting, but holds blocks"),
        (
            lambda s: setattr(s.running[0], "num_pending_tokens", 1),
            "tokens in flight were miscounted",
        ),
        (lambda s: setattr(s.running[0], "arrival_index", 9), "not in order of arrival"),
        (lambda s: s.queues.free_slots.pop(), "slots were lost or duplicated"),
        (
            lambda s: setattr(s.running[0], "num_computed_tokens", 1),
            "in the middle of its prompt, but not last",
        ),
        (lambda s: s.running.extend(s.running[:1] * 8), "running, 8 allowed"),
        (lambda s: setattr(s.block_manager.blocks[0], "ref_count", 7), "ref_count 7"),
    ],
)
def test_check_names_the_broken_law(breakage: Callable[[Scheduler], object], law: str) -> None:
    scheduler = busy_scheduler()
    scheduler.check()
    breakage(scheduler)
    with pytest.raises(AssertionError, match=law):
        scheduler.check()
