"""The table of bounds, and its page."""

from __future__ import annotations

import pytest

from scheduler.bounds import BOUND_TABLES, check_schema_bounds, short_repr
from scheduler.errors import RequestError


def test_every_bound_has_a_reason() -> None:
    for bounds in BOUND_TABLES.values():
        for bound in bounds.values():
            assert bound.maximum > 0 and bound.unit and bound.scope and bound.reason


def test_schemas_are_measured_however_they_are_nested() -> None:
    check_schema_bounds({"a": [{"b": "c" * 65_000}] * 1}, "json", "json")
    deep: object = {}
    for _ in range(200):
        deep = [deep]
    for too_large in (deep, {"a" * 70_000: 1}, {"a": ["b" * 40_000] * 2}, [[0] * 9000] * 2):
        with pytest.raises(RequestError, match=r"^json: .* are too many") as refused:
            check_schema_bounds(too_large, "json", "field")
        assert refused.value.parameter == "field"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: 2}, "the names in an object are text, got 1"),
        ({"properties": [{"a": {2: {}}}]}, "the names in an object are text, got 2"),
        ({"const": b"a"}, "holds b'a', which is not JSON"),
        ({"enum": [object]}, "which is not JSON"),
        ({"const": "\ud800"}, "cannot be encoded"),
        ({"properties": {"\ud800": {}}}, "cannot be encoded"),
    ],
)
def test_a_schema_is_json(value: object, message: str) -> None:
    with pytest.raises(RequestError, match=f"^json.*{message}") as refused:
        check_schema_bounds(value, "json", "field")
    assert refused.value.parameter == "field"
    check_schema_bounds({"a": [True, None, 1, 0.5, "b", ("c",)]}, "json", "field")


def test_values_are_shown_by_their_beginning() -> None:
    assert (short_repr("auto"), short_repr(5), short_repr([1, "a"])) == ("'auto'", "5", "[1, 'a']")
    for long in ("a" * 10**6, [[0] * 1000] * 1000, {"a" * 10**5: 0}, b"a" * 10**6):
        assert len(short_repr(long)) <= 103
