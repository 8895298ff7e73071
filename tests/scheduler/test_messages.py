"""Messages are immutable, can be pickled, and stay small."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from scheduler import messages
from scheduler.messages import AdmittedRows, Request, StepPlan, int32_array
from scheduler.scheduler import Scheduler
from tests.scheduler.helpers import make_limits, make_request, must_schedule, run_step

ALL = [value for _, value in inspect.getmembers(messages, dataclasses.is_dataclass)]


@pytest.mark.parametrize("message_type", ALL)
def test_message_is_frozen_and_has_slots(message_type: type) -> None:
    parameters = message_type.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen and "__slots__" in vars(message_type)


def test_request_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_request("a", [1]).request_id = "b"  # type: ignore[misc]


def test_request_pickles() -> None:
    request = make_request("a", [1, 2, 3], stop=[7], seed=5)
    assert pickle.loads(pickle.dumps(request)) == request
    assert isinstance(request, Request)


def test_plan_pickles_with_its_admitted_rows() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_request("a", [1, 2, 3]))
    plan = must_schedule(scheduler)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert isinstance(again, StepPlan) and isinstance(again.admitted_rows, AdmittedRows)


def test_ints_are_32_bit() -> None:
    assert int32_array([1, 2]).itemsize == 4 and list(int32_array([2**31 - 1, -(2**31)])) == [
        2**31 - 1,
        -(2**31),
    ]


def test_admitted_rows_start_after_what_is_cached() -> None:
    scheduler = Scheduler(make_limits())
    for name in "ab":
        scheduler.add(make_request(name, range(10)))
    admitted = run_step(scheduler).admitted_rows
    assert admitted is not None
    assert list(admitted.num_tokens) == [10, 10] and list(admitted.num_stored_tokens) == [0, 8]
    assert admitted.token_ids.tolist() == [*range(10), *range(10)]
    assert len(admitted.block_ids) == sum(admitted.num_blocks) == 6
