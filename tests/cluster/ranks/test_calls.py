"""Calls that bring a step to the ranks: without room in the object store, lost, and made again."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, ObjectStoreFullError

from cluster.ranks import calls
from cluster.ranks import group as rank_group
from cluster.ranks.actor import RankActor
from cluster.ranks.calls import StepCalls
from configs.paths import SOURCE_ROOT
from scheduler.engine import MaskAnswer
from scheduler.errors import WorkerError
from scheduler.messages import StepMask, StepPlan, int32_array
from scheduler.sequence import Sequence
from tests.cluster.conftest import SHAPE, SmallModel
from tests.cluster.ranks.groups import check_every_token, group_with
from tests.scheduler.fake_model import mask_bytes

pytestmark = pytest.mark.engine


class AllowsAll:
    """Grammars whose masks allow every token, so the ranks have to wait for them."""

    def __init__(self, vocab_size: int) -> None:
        self.mask = b"\xff" * mask_bytes(vocab_size)

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        return [self.mask for _ in sequences]

    def is_quick(self, seq: Sequence) -> bool:
        return True

    def forget(self, request_id: str) -> None:
        pass


def run(small_model: SmallModel) -> None:
    """Run some prompts with masks on two ranks, and compare every token."""
    check_every_token(small_model, AllowsAll(SHAPE.vocab))


@ray.remote(num_cpus=0)
def unavailable() -> None:
    raise ActorUnavailableError("the connection was lost", None)


class LosesReplies(StepCalls):
    """The answer of every third call is lost."""

    num_calls = num_again = 0

    def send_plan(self, plan: StepPlan) -> None:
        super().send_plan(plan)
        self._lose(self.step_refs)

    def repeat_call(self, index: int) -> None:
        LosesReplies.num_again += 1
        super().repeat_call(index)

    def send_mask(self, step_mask: StepMask) -> None:
        super().send_mask(step_mask)
        self._lose(self._mask_refs)

    def _lose(self, refs: list[Any]) -> None:
        for rank in range(len(refs)):
            LosesReplies.num_calls += 1
            if LosesReplies.num_calls % 3 == 0:
                refs[rank] = unavailable.remote()


class Deaf:
    """An actor that does not get every third call."""

    num_calls = 0

    def __init__(self, actor: Any) -> None:
        self.step, self.put_mask = Method(actor.step), Method(actor.put_mask)


class Method:
    """One of its methods."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Any:
        Deaf.num_calls += 1
        return unavailable.remote() if Deaf.num_calls % 3 == 0 else self._method.remote(*arguments)


class LosesRequests(StepCalls):
    """Every third call does not reach its rank."""

    num_again = 0

    def __init__(self, actors: Any) -> None:
        super().__init__([Deaf(actor) for actor in actors])

    def repeat_call(self, index: int) -> None:
        LosesRequests.num_again += 1
        super().repeat_call(index)


@pytest.mark.parametrize("kind", [LosesReplies, LosesRequests], ids=["replies", "requests"])
def test_calls_that_are_lost_are_made_again_and_no_step_runs_twice(
    users_ray: None,
    small_model: SmallModel,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[LosesReplies] | type[LosesRequests],
) -> None:
    monkeypatch.setattr(rank_group, "StepCalls", kind)
    monkeypatch.setattr(kind, "num_again", 0)
    run(small_model)
    assert kind.num_again > 5


def test_plans_and_masks_reach_the_ranks_while_the_object_store_is_full(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_puts = 0

    def full(_: object) -> None:
        nonlocal num_puts
        num_puts += 1
        raise ObjectStoreFullError("full")

    monkeypatch.setattr(calls, "MAX_INLINE_BYTES", 400)
    monkeypatch.setattr(calls, "PIECE_BYTES", 100)
    monkeypatch.setattr(ray, "put", full)
    run(small_model)
    assert num_puts > 2


def test_a_message_in_pieces_is_the_message() -> None:
    message = bytes(range(256)) * 1000
    pieces = calls.pieces_of(message)
    assert b"".join(pieces) == message and len(pieces) == 4
    assert max(map(len, pieces)) == calls.PIECE_BYTES


def test_a_bug_in_putting_a_message_is_not_taken_for_a_full_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(ray, "put", broken)
    with pytest.raises(TypeError, match="a bug"):
        calls.arguments_of(b"x" * 100_000)


class SaysWhy(StepCalls):
    """Calls that are lost again and again."""

    def repeat_call(self, index: int) -> None:
        self.step_refs[index] = unavailable.remote()


def test_calls_that_are_lost_for_longer_than_a_step_may_take_lose_the_epoch(
    users_ray: None, small_model: SmallModel
) -> None:
    group = group_with(small_model, [], step_timeout_s=0.5)
    group._calls_by_step[7] = SaysWhy([None] * 2)
    group._calls_by_step[7].step_refs = [unavailable.remote(), unavailable.remote()]
    with pytest.raises(WorkerError, match=r"step 7 failed: .*the connection was lost"):
        group.result(7)


def test_a_call_to_ranks_that_were_ended_is_not_made_again(
    users_ray: None, small_model: SmallModel
) -> None:
    group = group_with(small_model, [unavailable.remote(), unavailable.remote()])
    group._is_closed = True
    with pytest.raises(WorkerError, match="step 7 failed"):  # `None` has no method
        group.result(7)


class BareRank(RankActor):
    """A rank in this process, whose worker only takes notes."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.masks: list[int] = []
        worker: Any = SimpleNamespace(
            launch=lambda plan: self.launched.append(plan.step_id),
            result=lambda step_id, epoch: f"result of {step_id}",
            put_mask=lambda step_mask: self.masks.append(step_mask.step_id),
        )
        engine = SimpleNamespace(step_timeout_s=1.0)
        self._config: Any = SimpleNamespace(engine=engine, num_steps_ahead=1)
        self._worker = worker
        self._ready_event = threading.Event()
        self._ready_event.set()
        self._compute_executor = SimpleNamespace(submit=lambda launch, plan: launch(plan))  # type: ignore[assignment]
        self._order_condition = threading.Condition()
        self._next_step_id = self._next_mask_step_id = 0
        self._replies = {}

    def ask(self, step_id: int) -> Any:
        plan = SimpleNamespace(step_id=step_id, epoch=0)
        step: Any = self.step
        return pickle.loads(step(pickle.dumps(plan)))


def test_a_step_that_is_asked_for_again_runs_once_and_has_the_same_result() -> None:
    rank = BareRank()
    with ThreadPoolExecutor(3) as threads:
        early = threads.submit(rank.ask, 1)  # it waits for its turn
        first, again = threads.submit(rank.ask, 0), threads.submit(rank.ask, 0)
        assert [each.result(5) for each in (first, again, early)] == [
            "result of 0",
            "result of 0",
            "result of 1",
        ]
    assert rank.launched == [0, 1]


def test_a_call_that_comes_long_after_its_step_was_read_does_not_run_it() -> None:
    rank = BareRank()
    for step_id in range(9):
        rank.ask(step_id)
    with pytest.raises(WorkerError, match="the result of step 2 has been read"):
        rank.ask(2)
    assert rank.launched == list(range(9)) and len(rank._replies) <= 3


def test_a_mask_that_comes_again_is_not_kept() -> None:
    rank = BareRank()
    put_mask: Any = rank.put_mask
    for step_id in (0, 0, 2, 2, 0, 3):
        put_mask(pickle.dumps(StepMask(step_id=step_id, epoch=0, rows=int32_array(), masks=())))
    assert rank.masks == [0, 2, 3]


FULL_DISK = """
import dataclasses
import ray
from cluster.ranks import calls
from cluster.resources.local_ray import minimal_local_ray
from scheduler.messages import StepMask, int32_array

with minimal_local_ray():
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        logging_level="error", object_store_memory=80 * 2**20,
        _system_config={"local_fs_capacity_threshold": 0.0, "object_spilling_threshold": 1.0},
    )

class Rank:
    def put_mask(self, *pieces):
        return sum(map(len, pieces))

rank = ray.remote(Rank).remote()
ray.get(rank.put_mask.remote(b""))
held = []
try:
    while True:
        held.append(ray.put(bytes(2**16)))
except ray.exceptions.OutOfDiskError:
    print("full")
masks = (bytes(2**20),) + (bytes(9),) * 59
large = StepMask(step_id=0, epoch=0, rows=int32_array(range(60)), masks=masks)
step = calls.StepCalls([rank])
step.send_mask(large)
print(ray.get(step.refs) == [len(step._pickled_mask)], len(step._pickled_mask) > 2**20)
"""


def test_a_large_message_arrives_although_store_and_disk_are_full() -> None:
    program = subprocess.run(
        [sys.executable, "-c", FULL_DISK],
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert program.stdout == "full\nTrue True\n", program.stderr
