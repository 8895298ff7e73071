"""The tree of errors: families, HTTP status, and that all of them survive a trip between
processes.
"""

from __future__ import annotations

import inspect
import pickle

import pytest

from scheduler import errors
from scheduler.errors import (
    ClientError,
    EaglerayError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
)

ALL = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, EaglerayError)
]


@pytest.mark.parametrize("error_type", ALL)
def test_error_pickles_with_its_message(error_type: type[EaglerayError]) -> None:
    again = pickle.loads(pickle.dumps(error_type("what to do")))
    assert type(again) is error_type and str(again) == "what to do"


@pytest.mark.parametrize("parameter", ["top_p", None])
def test_request_error_pickles_with_its_parameter(parameter: str | None) -> None:
    again = pickle.loads(pickle.dumps(RequestError("top_p is wrong", parameter)))
    assert (str(again), again.parameter) == ("top_p is wrong", parameter)


@pytest.mark.parametrize("error_type", ALL)
def test_client_errors_are_400_and_all_others_5xx(error_type: type[EaglerayError]) -> None:
    status = error_type.http_status
    assert status == 400 if issubclass(error_type, ClientError) else 500 <= status < 600


def test_errors_that_pass_by_themselves_or_with_a_new_engine_are_503() -> None:
    assert OverloadedError.http_status == EngineDeadError.http_status == 503
    assert EngineError.http_status == 500


def test_docstring_draws_every_error() -> None:
    assert all(error_type.__name__ in (errors.__doc__ or "") for error_type in ALL)
