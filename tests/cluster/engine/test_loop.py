"""The step loop without a thread: what it reports about requests that fail by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from cluster.engine.loop import (
    PLAN_LEAD_S,
    PLAN_LEAD_SHARE,
    Command,
    Finish,
    NewsByFrontend,
    RanksLost,
    RanksReplaced,
    StepLoop,
    Submit,
)
from scheduler.engine import MASK_LATE, Engine, MaskAnswer
from scheduler.errors import EaglerayError, RequestError, RequestFailedError, WorkerError
from scheduler.limits import SchedulerLimits
from scheduler.messages import StepPlan, StepResult, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.scheduler.fake_model import FakeRank, Lane, generate
from tests.scheduler.helpers import make_limits, make_request, num_unfinished


class OneIsBad:
    """Grammars, one of which cannot be followed; the others allow everything."""

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        bad = RequestFailedError("its grammar failed")
        return [bad if seq.request_id == "bad" else None for seq in sequences]

    def is_quick(self, seq: Sequence) -> bool:
        return True

    def forget(self, request_id: str) -> None:
        pass


class Executor:
    """A fake rank whose steps may be lost when they are read."""

    def __init__(self, limits: SchedulerLimits, *, loses: bool) -> None:
        self.loses = loses
        self.lane = Lane(
            FakeRank(
                limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
            )
        )
        self.send_mask = self.lane.put_mask

    def launch(self, plan: StepPlan) -> None:
        self.lane.launch(plan)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Steps run when they are launched."""

    def result(self, step_id: int) -> StepResult:
        if self.loses:
            raise WorkerError("rank 1 is gone")
        return self.lane.results.popleft()


@pytest.mark.parametrize("step_is_lost", [False, True])
def test_a_request_that_cannot_go_on_is_told_so_even_if_its_step_is_lost(
    step_is_lost: bool,
) -> None:
    limits, told = make_limits(), list[NewsByFrontend]()
    lost, died = list[str](), list[Exception]()
    executor = Executor(limits, loses=step_is_lost)
    engine = Engine(Scheduler(limits), executor, grammars=OneIsBad())
    loop = StepLoop(
        engine, told.append, died.append, on_failed_step=lambda epoch, why: lost.append(why)
    )
    requests = [make_request(name, [1, 2, 3]) for name in ("good", "bad")]
    requests[1] = dataclasses.replace(requests[1], structural_tag=b"bad")
    loop.post(Submit(registration_number=1, requests=requests))
    loop.run_once()
    errors = {name: n.error for news in told for name, n in news[1].items() if n.error}
    assert [*errors] == ["bad"] and "its grammar failed" in str(errors["bad"])
    assert bool(lost) == step_is_lost
    assert num_unfinished(engine) == 1, "the other request goes on"
    assert engine.take_failures() == [] and not died


class Dying(Executor):
    """Ranks that run nothing before they are lost."""

    def launch(self, plan: StepPlan) -> None:
        pass


def test_a_conviction_is_told_and_fails_the_request() -> None:
    limits, told, convictions = make_limits(), list[NewsByFrontend](), list[bool]()
    engine = Engine(Scheduler(limits), Dying(limits, loses=True))
    loop = StepLoop(engine, told.append, print, on_conviction=lambda: convictions.append(True))
    loop.post(Submit(registration_number=1, requests=[make_request("bad", [1, 2, 3])]))
    for _ in range(4):
        assert not convictions
        loop.run_once()
        loop.post(RanksReplaced(executor=Dying(limits, loses=True)))
        loop.run_once()
    assert convictions == [True]
    [error] = [n.error for news in told for n in news[1].values()]
    assert isinstance(error, RequestFailedError)


class WithLogprobs(Executor):
    """The log probability of the token of step k is -k."""

    def result(self, step_id: int) -> StepResult:
        result = super().result(step_id)
        entries = tuple(TokenLogprobs(logprob=-step_id) for _ in result.token_ids)
        return dataclasses.replace(result, logprobs=entries)


@pytest.mark.parametrize(
    ("interval", "counts"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (7, [1, 7]), (100, [1, 7]), (0, [8])]
)
def test_tokens_are_told_one_by_one_or_several_at_a_time(interval: int, counts: list[int]) -> None:
    limits, told, died = make_limits(), list[NewsByFrontend](), list[Exception]()
    engine = Engine(Scheduler(limits), WithLogprobs(limits, loses=False))
    loop = StepLoop(engine, told.append, died.append)
    request = make_request("a", [1, 2, 3], max_tokens=8)
    expected, _ = generate([1, 2, 3], 3, request.sampling, limits.max_total_tokens)
    loop.post(
        Submit(
            registration_number=1,
            requests=[dataclasses.replace(request, num_tokens_per_news=interval)],
        )
    )
    for _ in range(20):
        loop.run_once()
    news = [each[1]["a"] for each in told if each]
    assert [len(each.token_ids) for each in news] == counts and not died
    assert [token for each in news for token in each.token_ids] == expected[3:]
    assert [each.first_index for each in news] == [sum(counts[:i]) for i in range(len(counts))]
    logprobs = [entry.logprob for each in news for entry in each.logprobs or [] if entry]
    assert logprobs == [-step for step in range(8)]
    assert news[-1].finish_reason == "length" and not loop._open_requests


def test_whoever_waits_for_a_whole_output_has_all_but_the_last_two_seconds_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the driver dies, so much is repeated at most."""
    limits, now_s = make_limits(), 100.0
    told: list[tuple[float, NewsByFrontend]] = []
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("cluster.engine.loop.time", clock)
    engine = Engine(Scheduler(limits), WithLogprobs(limits, loses=False))
    loop = StepLoop(engine, lambda news: told.append((now_s, news)), lambda error: None)
    request = make_request("a", [1, 2, 3], max_tokens=40)
    whole = dataclasses.replace(request, num_tokens_per_news=0)
    loop.post(Submit(registration_number=1, requests=[whole]))
    for _ in range(60):
        now_s += 0.125
        loop.run_once()
    times_s = [when for when, news in told if news]
    counts = [len(news[1]["a"].token_ids) for _, news in told if news]
    assert sum(counts) == 40 and len(counts) > 2
    gaps_s = [late - early for early, late in pairwise([100.0, *times_s])]
    assert max(gaps_s) <= 2.0 + 2 * 0.125, gaps_s


class LateAfterTwo(OneIsBad):
    """No mask comes once an output has two tokens."""

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        return [MASK_LATE if seq.num_output_tokens >= 2 else None for seq in sequences]

    def is_quick(self, seq: Sequence) -> bool:
        return False


def test_tokens_of_a_request_that_does_not_run_are_not_held_back_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, told, now_s = make_limits(), list[NewsByFrontend](), 100.0
    monkeypatch.setattr("cluster.engine.loop.time", SimpleNamespace(monotonic=lambda: now_s))
    engine = Engine(Scheduler(limits), Executor(limits, loses=False), grammars=LateAfterTwo())
    loop = StepLoop(engine, told.append, lambda error: None)
    requests = [make_request(name, [1, 2, 3], max_tokens=40) for name in ("runs", "held")]
    requests[1] = dataclasses.replace(requests[1], num_tokens_per_news=100, structural_tag=b"g")
    loop.post(Submit(registration_number=1, requests=requests))
    for _ in range(20):
        now_s += 0.125
        loop.run_once()
    of_held = [each[1]["held"] for each in told if "held" in each[1]]
    assert [(news.first_index, len(news.token_ids)) for news in of_held] == [(0, 1), (1, 1)]


STEP_S = 0.5


class Slow(Executor):
    """Steps that report `STEP_S`. What happens while the loop waits for one is up to the test."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits, loses=False)
        self.meanwhile: list[Callable[[], None]] = []
        self.waits_s: list[float] = []
        self.events: list[str] = []

    def launch(self, plan: StepPlan) -> None:
        rows = len(plan.admitted_rows.slots) if plan.admitted_rows else 0
        self.events.append(f"launch {plan.step_id} admits {rows}")
        super().launch(plan)

    def wait(self, step_id: int, limit_s: float) -> None:
        self.events.append(f"wait {step_id}")
        self.waits_s.append(limit_s)
        while self.meanwhile:
            self.meanwhile.pop()()

    def result(self, step_id: int) -> StepResult:
        self.events.append(f"result {step_id}")
        return dataclasses.replace(super().result(step_id), seconds={"forward": STEP_S})


def slow_loop(num_rows: int) -> tuple[StepLoop, Slow]:
    """A loop that has run two steps and is in the third."""
    limits = make_limits()
    executor = Slow(limits)
    engine = Engine(Scheduler(limits), executor)
    loop = StepLoop(engine, lambda news: None, lambda error: None)
    requests = [make_request(f"r{row}", [1, 2, row + 3], max_tokens=9) for row in range(num_rows)]
    loop.post(Submit(registration_number=1, requests=requests))
    loop.run_once()
    loop.run_once()
    executor.events.clear()
    return loop, executor


def test_a_request_that_arrives_during_a_step_is_part_of_the_next_one() -> None:
    loop, executor = slow_loop(2)
    late = Submit(registration_number=1, requests=[make_request("late", [5, 6, 7])])
    executor.meanwhile.append(lambda: loop.post(late))
    loop.run_once()
    assert executor.events == ["wait 2", "launch 3 admits 1", "result 2"]
    [limit_s] = executor.waits_s
    assert 0 < STEP_S - limit_s - max(PLAN_LEAD_S, PLAN_LEAD_SHARE * STEP_S) < 0.2


def test_a_plan_is_late_by_nothing_where_steps_take_little() -> None:
    loop, executor = slow_loop(2)
    for decode_s in loop.engine.scheduler.pace._decode_s_by_rows.values():
        decode_s.extend([PLAN_LEAD_S])
    loop.run_once()
    assert executor.events == ["launch 3 admits 0", "result 2"]


def test_ranks_that_are_lost_during_a_step_are_lost_after_it() -> None:
    loop, executor = slow_loop(2)
    executor.meanwhile.append(lambda: loop.post(RanksLost()))
    loop.run_once()
    assert executor.events == ["wait 2", "launch 3 admits 0", "result 2"]
    loop.run_once()
    assert executor.events[3:] == [] and not loop._has_ranks


def test_the_time_since_the_last_result_goes_on_while_there_are_no_ranks() -> None:
    loop, _ = slow_loop(1)

    def since_s(command: Command) -> float | None:
        loop.post(command)
        loop.run_once()
        return loop.busy_since_s

    last_result_s = loop.busy_since_s
    assert last_result_s is not None and since_s(RanksLost()) == last_result_s
    assert since_s(Finish(request_ids=["r0"], reason="abort")) is None, "nobody waits for a result"
    late = Submit(registration_number=1, requests=[make_request("late", [1, 2, 3])])
    assert since_s(late) is not None


class FailsLater(OneIsBad):
    """The grammar fails at its third token: in a step for which the loop waits."""

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        answers = super().masks(sequences, limit_s)
        return [
            answer if seq.num_output_tokens == 2 else None
            for seq, answer in zip(sequences, answers, strict=True)
        ]


def loop_whose_grammar_fails(*meanwhile: Command) -> tuple[StepLoop, list[NewsByFrontend]]:
    """A loop in which the grammar of "bad" fails; these commands come while it waits for that
    step.
    """
    limits, told = make_limits(), list[NewsByFrontend]()
    executor = Slow(limits)

    def die(error: Exception) -> None:
        raise error

    loop = StepLoop(Engine(Scheduler(limits), executor, grammars=FailsLater()), told.append, die)
    requests = [make_request(name, [1, 2, 3], max_tokens=9) for name in ("good", "bad")]
    requests[1] = dataclasses.replace(requests[1], structural_tag=b"bad", num_tokens_per_news=0)
    loop.post(Submit(registration_number=1, requests=requests))
    loop.run_once()
    loop.run_once()
    told.clear()
    executor.meanwhile = [partial(loop.post, command) for command in reversed(meanwhile)]
    loop.run_once()
    assert not executor.meanwhile, "the loop did not wait"
    return loop, told


def errors_in(told: list[NewsByFrontend], request_id: str) -> list[EaglerayError]:
    news = [by_request.get(request_id) for each in told for by_request in each.values()]
    return [item.error for item in news if item is not None and item.error is not None]


def test_a_request_that_fails_gets_the_tokens_that_were_held_back() -> None:
    _, told = loop_whose_grammar_fails()
    [news] = [each[1]["bad"] for each in told if "bad" in each[1]]
    assert (len(news.token_ids), news.finish_reason) == (2, "error") and news.error


def test_a_request_that_fails_may_be_ended_by_its_frontend_in_the_same_step() -> None:
    loop, told = loop_whose_grammar_fails(Finish(request_ids=["bad"], reason="abort"))
    loop.run_once()
    assert num_unfinished(loop.engine) == 1, "the other request goes on"
    assert not errors_in(told, "good")


def test_the_failure_of_a_request_is_not_taken_for_one_of_its_successor_with_the_same_id() -> None:
    again = make_request("bad", [1, 2, 3], max_tokens=3)
    loop, told = loop_whose_grammar_fails(
        Finish(request_ids=["bad"], reason="abort"), Submit(registration_number=2, requests=[again])
    )
    for _ in range(5):
        loop.run_once()
    of_successor = [each[2]["bad"] for each in told if 2 in each]
    assert [item.error for item in of_successor] == [None] * 3
    assert of_successor[-1].finish_reason == "length"


def test_a_request_that_the_scheduler_refuses_fails_alone() -> None:
    loop, _ = slow_loop(2)
    told: list[NewsByFrontend] = []
    loop._deliver = told.append
    twice = Submit(
        registration_number=2, requests=[make_request("r0", [5, 6]), make_request("b", [7])]
    )
    loop.post(twice)
    loop.run_once()
    [error] = errors_in(told, "r0")
    assert isinstance(error, RequestError) and "'r0' is in use" in str(error)
    assert loop._open_requests["r0"].registration_number == 1
    assert num_unfinished(loop.engine) == 3, "the requests beside it run"


class NoFork(OneIsBad):
    """Grammars that cannot be followed, because the machine has too many processes."""

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        raise BlockingIOError(11, "Resource temporarily unavailable")


class NoStore(Executor):
    """Plans that cannot be sent."""

    def __init__(self, limits: SchedulerLimits, error: Exception) -> None:
        super().__init__(limits, loses=False)
        self.error = error

    def launch(self, plan: StepPlan) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ObjectStoreFullError("full"),
        OutOfDiskError("full"),
        ConnectionResetError("gone"),
        EOFError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_plan_that_cannot_be_sent_costs_the_epoch_and_not_the_engine(error: Exception) -> None:
    limits, lost = make_limits(), list[str]()
    loop = StepLoop(
        Engine(Scheduler(limits), NoStore(limits, error)),
        lambda news: None,
        lambda error: None,
        on_failed_step=lambda epoch, why: lost.append(why),
    )
    loop.post(Submit(registration_number=1, requests=[make_request("a", [1, 2, 3])]))
    loop.run_once()
    assert lost == [f"{type(error).__name__}: {error}"]
    assert num_unfinished(loop.engine) == 1 and not loop._has_ranks


def test_a_helper_that_cannot_be_forked_costs_the_epoch_and_not_the_engine() -> None:
    limits, lost = make_limits(), list[str]()
    engine = Engine(Scheduler(limits), Executor(limits, loses=False), grammars=NoFork())
    loop = StepLoop(
        engine,
        lambda news: None,
        lambda error: None,
        on_failed_step=lambda epoch, why: lost.append(why),
    )
    constrained = dataclasses.replace(make_request("a", [1, 2, 3]), structural_tag=b"g")
    loop.post(Submit(registration_number=1, requests=[constrained]))
    loop.run_once()
    assert "Resource temporarily unavailable" in lost[0] and num_unfinished(engine) == 1


def test_a_bug_in_a_step_ends_the_engine() -> None:
    limits = make_limits()
    loop = StepLoop(
        Engine(Scheduler(limits), NoStore(limits, KeyError("a"))),
        lambda news: None,
        lambda error: None,
    )
    loop.post(Submit(registration_number=1, requests=[make_request("a", [1, 2, 3])]))
    with pytest.raises(KeyError):
        loop.run_once()
