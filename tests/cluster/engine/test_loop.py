"""The step loop without a thread: what it tells frontends of requests that fail by themselves."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.engine.loop import EngineLoop, NewsByFrontend, Submit
from scheduler.engine import Engine
from scheduler.errors import EaglerayError, RequestFailedError, WorkerError
from scheduler.limits import SchedulerLimits
from scheduler.messages import StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.scheduler.fake_model import FakeRank, Lane
from tests.scheduler.helpers import make_limits, make_request


class OneIsBad:
    """Grammars of which one cannot be followed; the others let everything through."""

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
