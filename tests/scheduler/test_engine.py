"""The step loop over a fake rank whose tokens depend on everything it reads: exact outputs, late
results, endings.
"""

from __future__ import annotations

from random import Random

import pytest

from scheduler.engine import Engine
from scheduler.errors import RequestError, WorkerError
from scheduler.messages import StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceStatus
from tests.scheduler.fake_model import generate
from tests.scheduler.helpers import BLOCK, FakeExecutor, make_limits, make_request, num_unfinished

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def make_engine(*, num_steps_ahead: int = 1, **sizes: int | bool) -> tuple[Engine, FakeExecutor]:
    limits = make_limits(**sizes)
    executor = FakeExecutor(limits)
    return Engine(Scheduler(limits), executor, num_steps_ahead=num_steps_ahead), executor


def run_to_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check()


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of a request that has an engine to itself."""
    request = make_request("alone", prompt, max_tokens=max_tokens)
    return generate(prompt, len(prompt), request.sampling, 10**6)[0]


# -- exact outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", LENGTHS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_gives_the_tokens_of_an_undisturbed_run(
    length: int, max_tokens: int, num_steps_ahead: int
) -> None:
    engine, _ = make_engine(num_steps_ahead=num_steps_ahead)
    seq = engine.add(make_request("a", PROMPT[:length], max_tokens=max_tokens))
    run_to_end(engine)
    assert seq.token_ids.tolist() == alone(PROMPT[:length], max_tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_cached_prompt_gives_the_tokens_of_the_uncached_run(length: int) -> None:
    engine, executor = make_engine()
    for name in "ab":
        seq = engine.add(make_request(name, PROMPT[:length], max_tokens=BLOCK + 1))
        run_to_end(engine)
        assert seq.token_ids.tolist() == alone(PROMPT[:length], BLOCK + 1)
    assert executor.rank.num_stored_tokens == length // BLOCK * BLOCK


def test_conversation_finds_the_blocks_of_the_earlier_answer() -> None:
    engine, executor = make_engine()
    first = engine.add(make_request("a", PROMPT, max_tokens=10))
    run_to_end(engine)
    prompt = [*first.token_ids, 5]
    second = engine.add(make_request("b", prompt, max_tokens=3))
    run_to_end(engine)
    assert second.token_ids.tolist() == alone(prompt, 3)
    assert executor.rank.num_stored_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 20])
def test_chunks_of_any_size_give_the_same_tokens(budget: int) -> None:
    engine, _ = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
    prompt = list(range(20))
    seq = engine.add(make_request("a", prompt, max_tokens=3))
    run_to_end(engine)
    assert seq.token_ids.tolist() == alone(prompt, 3)


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2])
def test_preempted_sequences_give_the_same_tokens(num_steps_ahead: int) -> None:
    engine, _ = make_engine(num_steps_ahead=num_steps_ahead, num_blocks=8)
    sequences = [engine.add(make_request(f"r{i}", [i, i], max_tokens=20)) for i in range(6)]
    run_to_end(engine)
    assert engine.scheduler.stats.num_preemptions > 0
    assert [seq.token_ids.tolist() for seq in sequences] == [alone([i, i], 20) for i in range(6)]


def test_tokens_are_the_same_after_a_lost_epoch() -> None:
    engine, executor = make_engine()
    seq = engine.add(make_request("a", PROMPT, max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.scheduler.start_epoch()
    executor.rank.restart(Random(0))
    run_to_end(engine)
    assert seq.token_ids.tolist() == alone(PROMPT, 12)


# -- the loop --------------------------------------------------------------------------------------


def test_step_without_work_is_none() -> None:
    engine, _ = make_engine()
    assert engine.step() is None and not engine.has_work


@pytest.mark.parametrize(
    ("num_steps_ahead", "events"),
    [
        (0, ["launch 0", "result 0", "launch 1", "result 1"]),
        (1, ["launch 0", "launch 1", "result 0", "launch 2", "result 1"]),
        (2, ["launch 0", "launch 1", "launch 2", "result 0", "launch 3", "result 1"]),
    ],
)
def test_engine_keeps_so_many_steps_ahead_of_the_result(
    num_steps_ahead: int, events: list[str]
) -> None:
    engine, executor = make_engine(num_steps_ahead=num_steps_ahead)
    engine.add(make_request("a", PROMPT))
    engine.step()
    engine.step()
    assert executor.events == events


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_can_be_planned_late_while_others_are_under_way(depth: int) -> None:
    engine, executor = make_engine(num_steps_ahead=depth)
    engine.add(make_request("a", PROMPT))
    engine.ensure_step_submitted()
    engine.ensure_step_submitted()
    assert executor.events == ["launch 0"] and engine.slack_s == 0.0, "nothing is known yet"
    for _ in range(3):
        engine.step()
    steps_s = [0.05 + 0.01] * depth  # as in `FakeRank`
    assert engine.slack_s == pytest.approx(sum(steps_s))
    while engine.scheduler.schedule():
        pass
    assert engine.slack_s == 0.0, "no more steps may be submitted"


def test_one_token_needs_one_step_at_any_depth() -> None:
    engine, executor = make_engine(num_steps_ahead=2)
    engine.add(make_request("a", PROMPT, max_tokens=1))
    run_to_end(engine)
    assert executor.events == ["launch 0", "result 0"]


def test_engine_has_work_until_the_last_result_is_read() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", PROMPT))
    engine.step()
    engine.finish("a", "abort")
    assert num_unfinished(engine) == 0 and engine.has_work
    output = engine.step()
    assert output is not None and output.token_ids == []
    assert not engine.has_work


def test_error_of_the_executor_passes_through() -> None:
    class Failing(FakeExecutor):
        def result(self, step_id: int) -> StepResult:
            raise WorkerError("rank 1 is gone")

    limits = make_limits()
    engine = Engine(Scheduler(limits), Failing(limits))
    engine.add(make_request("a", PROMPT))
    with pytest.raises(WorkerError, match="rank 1 is gone"):
        engine.step()


def test_launch_that_fails_is_over_with_its_epoch() -> None:
    class Failing(FakeExecutor):
        def launch(self, plan: StepPlan) -> None:
            raise WorkerError("rank 0 is gone")

    limits = make_limits()
    engine = Engine(Scheduler(limits), Failing(limits))
    seq = engine.add(make_request("a", PROMPT, max_tokens=2))
    with pytest.raises(WorkerError):
        engine.step()
    engine.scheduler.start_epoch()
    engine.executor = FakeExecutor(limits)
    engine.executor.rank.restart(Random(0))
    run_to_end(engine)
    assert seq.token_ids.tolist() == alone(PROMPT, 2)


# -- requests by id --------------------------------------------------------------------------------


def test_id_in_use_is_refused_by_name() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", PROMPT))
    with pytest.raises(RequestError, match="'a' is in use; choose another") as caught:
        engine.add(make_request("a", PROMPT))
    assert caught.value.parameter == "request_id" and num_unfinished(engine) == 1


def test_id_is_free_again_after_the_end() -> None:
    engine, _ = make_engine()
    for _ in range(2):
        engine.add(make_request("a", PROMPT, max_tokens=2))
        run_to_end(engine)


def test_id_is_free_again_after_an_abort_with_its_step_in_flight() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=5))
    engine.step()
    engine.finish("a", "abort")
    seq = engine.add(make_request("a", PROMPT, max_tokens=5))
    run_to_end(engine)
    assert seq.token_ids.tolist() == alone(PROMPT, 5)


def test_refused_request_is_not_known() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError):
        engine.add(make_request("a", []))
    assert num_unfinished(engine) == 0
    engine.check()


def test_request_that_has_ended_already_is_not_known() -> None:
    engine, _ = make_engine()
    seq = engine.add(make_request("a", [1, 2, 3], num_prompt_tokens=2, max_tokens=1))
    assert seq.status is SequenceStatus.FINISHED and num_unfinished(engine) == 0
    assert not engine.has_work
    engine.check()


def test_finishing_an_unknown_request_is_none() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=1))
    run_to_end(engine)
    assert engine.finish("a", "abort") is None
    assert engine.finish("b", "abort") is None


def test_finishing_returns_the_sequence_with_its_reason() -> None:
    engine, _ = make_engine()
    seq = engine.add(make_request("a", PROMPT))
    assert engine.finish("a", "stop") is seq
    assert seq.finish_reason == "stop"


def test_check_notices_a_lost_sequence() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", PROMPT))
    engine.scheduler.waiting.clear()
    with pytest.raises(AssertionError, match="1 sequences known, 0 queued"):
        engine.check()
