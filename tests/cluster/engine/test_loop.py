"""The step loop without a thread: what it reports about requests that fail by themselves."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.engine.loop import EngineLoop, NewsByFrontend, Submit
from scheduler.engine import Engine
from scheduler.errors import EaglerayError, RequestFailedError, WorkerError
from scheduler.limits import SchedulerLimits
from scheduler.messages import StepResult, TokenLogprobs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.scheduler.fake_model import FakeRank, Lane, generate
from tests.scheduler.helpers import make_limits, make_request


class OneIsBad:
    """Grammars, one of which cannot be followed; the others allow everything."""

    def masks(self, sequences: list[Sequence]) -> list[bytes | EaglerayError | None]:
        bad = RequestFailedError("its grammar failed")
        return [bad if seq.request_id == "bad" else None for seq in sequences]

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
        self.launch, self.mask = self.lane.launch, self.lane.mask

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
    loop = EngineLoop(engine, told.append, died.append, on_lost=lambda epoch, why: lost.append(why))
    requests = [make_request(name, [1, 2, 3]) for name in ("good", "bad")]
    requests[1] = dataclasses.replace(requests[1], grammar=b"bad")
    loop.post(Submit(frontend_id="f", requests=requests))
    loop.turn()
    errors = {name: n.error for news in told for name, n in news["f"].items() if n.error}
    assert [*errors] == ["bad"] and "its grammar failed" in str(errors["bad"])
    assert bool(lost) == step_is_lost
    assert engine.num_unfinished == 1, "the other request goes on"
    assert engine.take_failed() == [] and not died


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
    loop = EngineLoop(engine, told.append, died.append)
    request = make_request("a", [1, 2, 3], max_tokens=8)
    expected, _ = generate([1, 2, 3], 3, request.sampling, limits.max_total_tokens)
    loop.post(
        Submit(frontend_id="f", requests=[dataclasses.replace(request, news_interval=interval)])
    )
    for _ in range(20):
        loop.turn()
    news = [each["f"]["a"] for each in told if each]
    assert [len(each.token_ids) for each in news] == counts and not died
    assert [token for each in news for token in each.token_ids] == expected[3:]
    assert [each.first_index for each in news] == [sum(counts[:i]) for i in range(len(counts))]
    logprobs = [entry.logprob for each in news for entry in each.logprobs or [] if entry]
    assert logprobs == [-step for step in range(8)]
    assert news[-1].finish_reason == "length" and not loop._kept
