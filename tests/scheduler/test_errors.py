"""The tree of errors: all of them can be sent between processes, and the docstring shows all of
them.
"""

from __future__ import annotations

import inspect
import pickle

import pytest

from scheduler import errors
from scheduler.errors import EaglerayError, RequestError

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


def test_docstring_draws_every_error() -> None:
    assert all(error_type.__name__ in (errors.__doc__ or "") for error_type in ALL)
