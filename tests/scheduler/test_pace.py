"""Prompt tokens beside decodes: what is learned from steps, and the resulting budgets."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler import records
from scheduler.messages import StepPlan, StepResult, int32_array
from scheduler.pace import MAX_LONG_GAP_ROWS, MIN_PROMPT_TOKENS, TOKENS_PER_LONG_GAP, Pace
from scheduler.scheduler import Scheduler
from tests.scheduler.helpers import make_limits, make_request, must_schedule

BASE_S, ROW_S, TOKEN_S = COSTS = 0.060, 0.001, 0.0005
CAP = 512


class CountsDecodesIntoTheSlope(Pace):
    """Steps without prompts are mistaken for prompts of one token per row."""

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        super().observe(num_decoding, num_prompt_tokens, seconds)
        if not num_prompt_tokens:
            self._prompt_token_s.append(seconds / num_decoding)


def seconds_of(plan: StepPlan, costs: tuple[float, float, float] = COSTS) -> float:
    """The seconds that a step of this plan takes on a machine with these costs."""
    base_s, row_s, token_s = costs
    num_decoding = plan.num_new_tokens.count(1)
    return base_s + row_s * num_decoding + token_s * (sum(plan.num_new_tokens) - num_decoding)


def run(
    scheduler: Scheduler,
    num_steps: int,
    on_device: bool = False,
    costs: tuple[float, float, float] = COSTS,
) -> list[StepPlan]:
    """Run steps one after the other, each with its seconds. With `on_device`, those of the host
    cover only launches and waiting for other steps.
    """
    plans = []
    for _ in range(num_steps):
        plan = must_schedule(scheduler)
        tokens = int32_array([9] * sum(plan.sampling_flags))
        step_s = seconds_of(plan, costs)
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=tokens,
            seconds={"forward": 0.9 * step_s, "sample": 0.1 * step_s},
        )
        if on_device:
            seconds = {"forward": 0.002, "wait": 0.003 * (plan.step_id % 5)}
            result = dataclasses.replace(result, seconds=seconds, device_s=step_s)
        scheduler.apply(result)
        plans.append(plan)
    return plans


def scheduler_with_decodes(
    slowdown: float, pace: type[Pace] = Pace, on_device: bool = False
) -> Scheduler:
    """Eight sequences decode, and long prompts wait."""
    limits = make_limits(
        num_blocks=4000,
        max_num_seqs=16,
        max_num_batched_tokens=CAP,
        max_model_len=2000,
        max_decode_slowdown=slowdown,
    )
    scheduler = Scheduler(limits)
    scheduler.pace = pace(slowdown, CAP)
    for row in range(8):
        scheduler.add(make_request(f"decode-{row}", [row + 1] * 5, max_tokens=900))
    run(scheduler, 6, on_device)
    for row in range(4):
        scheduler.add(make_request(f"prompt-{row}", [20 + row] * 1500, max_tokens=9))
    return scheduler


def check_converged(pace: type[Pace], on_device: bool = False) -> None:
    """After ten steps, six of them without prompts, a step with prompts takes between 2.7 and 3
    times one without.
    """
    scheduler = scheduler_with_decodes(3.0, pace, on_device)
    *_, last = run(scheduler, 4, on_device)
    assert len(last.slots) > 8, "no prompt beside the decodes"
    alone_s = BASE_S + last.num_new_tokens.count(1) * ROW_S
    assert 2.7 * alone_s <= seconds_of(last) <= 3.0 * alone_s, seconds_of(last) / alone_s


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_beside_decodes_take_the_allowed_time_after_ten_steps(on_device: bool) -> None:
    check_converged(Pace, on_device)


def test_a_slope_with_decodes_in_it_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_converged(CountsDecodesIntoTheSlope)


class TakesTheNearestHoweverFar(Pace):
    """The base of one row is used for that of thirty."""

    def _is_new_row_count(self, num_decoding: int) -> bool:
        return not self._base_s_by_rows


def check_many_that_arrive_at_once(pace: type[Pace]) -> None:
    """One sequence decodes, then thirty prompts come: the rows become more, and no step is without
    prompts. Each row costs a sixth of the base. At the end, a step may hold as many tokens as if
    the base were known.
    """
    limits = make_limits(
        num_blocks=4000,
        max_num_seqs=40,
        max_num_batched_tokens=CAP,
        max_model_len=2000,
        max_decode_slowdown=3.0,
    )
    scheduler = Scheduler(limits)
    scheduler.pace = pace(3.0, CAP)
    scheduler.add(make_request("decode", [1] * 5, max_tokens=900))

    costs = 0.006, 0.001, 0.00015
    run(scheduler, 4, costs=costs)
    for row in range(30):
        scheduler.add(make_request(f"prompt-{row}", [20 + row] * 150, max_tokens=900))
    plans = run(scheduler, 120, costs=costs)
    late = [plan for plan in plans if plan.num_new_tokens.count(1) >= 20 and len(plan.slots) > 20]
    held = [sum(plan.num_new_tokens) - plan.num_new_tokens.count(1) for plan in late]
    allowed = 2 * (0.006 + 0.001 * 20) / 0.00015
    assert max(held) > 0.7 * allowed, held
    assert all(tokens < 1.5 * allowed for tokens in held), held


def test_where_rows_get_more_while_prompts_arrive_their_cost_is_not_the_prompts() -> None:
    check_many_that_arrive_at_once(Pace)
    with pytest.raises(AssertionError):
        check_many_that_arrive_at_once(TakesTheNearestHoweverFar)


def test_without_a_limit_or_without_decodes_a_step_is_full() -> None:
    assert {sum(plan.num_new_tokens) for plan in run(scheduler_with_decodes(0.0), 5)} == {CAP}
    scheduler = scheduler_with_decodes(3.0)
    run(scheduler, 5)
    for seq in list(scheduler.running):
        if seq.request_id.startswith("decode"):
            scheduler.finish(seq, "abort")
    plan = must_schedule(scheduler)
    assert sum(plan.num_new_tokens) == CAP


def test_prompts_get_on_whatever_they_cost() -> None:
    pace = Pace(1.1, CAP)
    pace.observe(4, 0, 0.010)
    pace.observe(4, 100, 5.0)
    assert pace.budget(4) == MIN_PROMPT_TOKENS


def test_nothing_is_limited_before_anything_is_known() -> None:
    pace = Pace(3.0, CAP)
    assert pace.budget(4) == CAP
    pace.observe(4, 0, 0.010)
    assert pace.budget(4) == CAP
    pace.observe(0, 100, 0.0)  # a device that does not report times
    assert pace.budget(4) == CAP


def test_where_no_step_was_without_prompts_one_with_few_gives_a_first_guess() -> None:
    pace = Pace(3.0, CAP)
    pace.observe(0, 400, BASE_S + 400 * TOKEN_S)
    assert pace.budget(4) == MIN_PROMPT_TOKENS
    pace.observe(4, MIN_PROMPT_TOKENS, BASE_S + MIN_PROMPT_TOKENS * TOKEN_S)
    guessed = pace.budget(4)
    assert 0.5 * 2 * BASE_S / TOKEN_S < guessed < 2 * BASE_S / TOKEN_S
    pace.observe(4, 0, BASE_S)
    assert guessed < pace.budget(4) < 1.1 * 2 * BASE_S / TOKEN_S


def test_one_slow_step_changes_little() -> None:
    """As if another program had taken the processor for a moment."""
    pace = Pace(3.0, CAP)
    for _ in range(4):
        pace.observe(4, 0, 0.010)
        pace.observe(4, 100, 0.010 + 100 * 0.001)
    before = pace.budget(4)
    pace.observe(4, 0, 3.0)
    pace.observe(4, 10, 3.0)
    assert pace.budget(4) == before == 20 + 12  # raised to the fewest


def test_the_nearest_number_of_rows_stands_for_one_that_has_not_run() -> None:
    pace = Pace(3.0, CAP)
    pace.observe(1, 0, 0.010)
    pace.observe(64, 0, 0.100)
    assert (pace.base_s(8), pace.base_s(50), pace.base_s(500)) == (0.010, 0.100, 0.100)


def test_the_shortest_time_of_a_step_is_known_once_fewer_rows_and_prompts_have_run() -> None:
    pace = Pace(0.0, CAP)  # without a limit it learns as well
    assert pace.min_duration_s(4, 0) == pace.min_duration_s(0, 10) == 0.0
    pace.observe(4, 0, 0.05)
    pace.observe(4, 0, 0.04)
    pace.observe(8, 0, 0.09)
    assert pace.min_duration_s(3, 0) == 0.0, "fewer rows may take less"
    assert [pace.min_duration_s(rows, 0) for rows in (4, 7, 8, 99)] == [0.04, 0.04, 0.09, 0.09]
    assert pace.min_duration_s(4, 10) == 0.0
    pace.observe(0, 100, 0.3)
    pace.observe(0, 100, 0.2)
    assert pace.min_duration_s(4, 10) == pytest.approx(0.06)
    assert pace.min_duration_s(0, 10) == pytest.approx(0.02)


def test_beside_fewer_rows_than_usual_a_step_may_take_what_it_may_beside_the_usual() -> None:
    pace = Pace(3.0, CAP)
    for num_rows in (4, 8):
        pace.observe(num_rows, 0, BASE_S + ROW_S * num_rows)
    pace.observe(8, 100, BASE_S + ROW_S * 8 + 100 * TOKEN_S)
    for _ in range(1000):
        pace.account_for_step(8, 0)
    longest_s = 3.0 * (BASE_S + ROW_S * 8)
    assert pace.budget(8) == int((longest_s - BASE_S - ROW_S * 8) / TOKEN_S + 1e-6)
    assert pace.budget(4) == int((longest_s - BASE_S - ROW_S * 4) / TOKEN_S + 1e-6)
    for _ in range(2000):
        pace.account_for_step(4, 0)
    assert pace.budget(4) == int(2.0 * (BASE_S + ROW_S * 4) / TOKEN_S + 1e-6)
    assert pace.budget(8) < int(2.0 * (BASE_S + ROW_S * 8) / TOKEN_S), "more than usual get less"


def test_prompts_go_on_where_rows_suddenly_become_many() -> None:
    pace = Pace(3.0, CAP)
    for num_rows in (1, 20, 30):
        pace.observe(num_rows, 0, 0.006 + 0.001 * num_rows)
    pace.observe(30, 100, 0.006 + 0.030 + 100 * 0.0001)
    for _ in range(1000):
        pace.account_for_step(1, 0)
    assert pace.budget(30) > 200


def scheduler_beside(num_decodes: int) -> Scheduler:
    """So many sequences decode long enough to save up all that can be saved."""
    limits = make_limits(
        num_blocks=4000,
        max_num_seqs=16,
        max_num_batched_tokens=CAP,
        max_model_len=4000,
        max_decode_slowdown=3.0,
    )
    scheduler = Scheduler(limits)
    for row in range(num_decodes):
        scheduler.add(make_request(f"decode-{row}", [row + 1] * 50, max_tokens=3000))
    run(scheduler, MAX_LONG_GAP_ROWS * TOKENS_PER_LONG_GAP + 8)
    return scheduler


def is_long(plan: StepPlan) -> bool:
    """Whether sequences that decode wait for the step longer than `max_decode_slowdown` allows."""
    num_decoding = plan.num_new_tokens.count(1)
    return num_decoding > 0 and seconds_of(plan) > 3.1 * (BASE_S + ROW_S * num_decoding)


@pytest.mark.parametrize("num_decodes", [1, MAX_LONG_GAP_ROWS])
def test_beside_few_decodes_a_prompt_is_computed_at_once(num_decodes: int) -> None:
    scheduler = scheduler_beside(num_decodes)
    scheduler.add(make_request("prompt", [20] * 400, max_tokens=1))
    [plan] = run(scheduler, 1)
    assert max(plan.num_new_tokens) == 400
    assert is_long(plan)


def test_beside_more_decodes_a_prompt_never_makes_a_step_long() -> None:
    scheduler = scheduler_beside(MAX_LONG_GAP_ROWS + 1)
    for row in range(8):
        scheduler.add(make_request(f"prompt-{row}", [20 + row] * 400, max_tokens=1))
    plans = run(scheduler, 40)
    assert sum(sum(plan.num_new_tokens) for plan in plans) > 8 * 400
    assert not any(is_long(plan) for plan in plans)


def share_of_long_gaps(scheduler: Scheduler, num_prompts: int) -> float:
    """While there is always another prompt: the share of the decoded tokens that waited for a long
    step.
    """
    num_long = num_decoded = 0
    for number in range(num_prompts):
        scheduler.add(make_request(f"prompt-{number}", [number + 20] * 400, max_tokens=1))
        for plan in run(scheduler, 4):
            num_decoding = plan.num_new_tokens.count(1)
            num_decoded += num_decoding
            num_long += num_decoding if is_long(plan) else 0
    return num_long / num_decoded


class NeverSpends(Pace):
    """Long gaps cost nothing."""

    def account_for_step(self, num_decoding: int, num_prompt_tokens: int) -> None:
        super().account_for_step(num_decoding, 0)


@pytest.mark.parametrize("num_decodes", [1, MAX_LONG_GAP_ROWS])
def test_fewer_than_one_in_a_hundred_tokens_wait_for_whole_prompts(num_decodes: int) -> None:
    assert 0.002 < share_of_long_gaps(scheduler_beside(num_decodes), 300) <= 0.01
    scheduler = scheduler_beside(num_decodes)
    scheduler.pace.__class__ = NeverSpends
    assert share_of_long_gaps(scheduler, 60) > 0.1


def test_tokens_that_decode_are_not_saved_up_for_more_than_a_few_long_gaps() -> None:
    scheduler = scheduler_beside(1)
    run(scheduler, 10 * TOKENS_PER_LONG_GAP)
    for row in range(8):
        scheduler.add(make_request(f"prompt-{row}", [20 + row] * CAP, max_tokens=1))
    assert sum(is_long(plan) for plan in run(scheduler, 30)) == MAX_LONG_GAP_ROWS


def test_prompts_that_cost_nothing_are_not_limited_beside_more_rows_than_usual() -> None:
    """A step with prompts that took no longer than one without them."""
    pace = Pace(3.0, CAP)
    pace.observe(1, 0, 0.01)
    pace.observe(8, 0, 0.2)
    pace.observe(8, 100, 0.1)
    pace.account_for_step(1, 0)
    assert pace.budget(6) == CAP


def test_records_say_what_the_first_in_line_waits_for() -> None:
    for slowdown, reason in ((0.0, records.WAITS_FOR_TOKEN_BUDGET), (3.0, records.WAITS_FOR_PACE)):
        scheduler = scheduler_with_decodes(slowdown)
        run(scheduler, 2)
        *_, last = scheduler.records.since(0.0)
        assert last.head_wait_reason == reason
