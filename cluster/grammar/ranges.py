"""Bounds of the numbers of a JSON schema, as grammars can have them."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from scheduler.bounds import short_repr

Schema = dict[str, Any]

_MAX_INTEGER = 10**18  # grammars count in 64 bits
_MAX_BOUND = 10**15  # of a number: beyond it, floats have no decimals
_MAX_DECIMALS, _FLOAT_DIGITS = 6, 15  # that grammars of ranges have, and that floats have
_MAX_UNBOUNDED_STEP = 100  # larger ones need as many states
_MAX_LISTED_MULTIPLES = 256  # that are listed one by one
# Formats of numbers that generators of schemas write, as bounds.
_INTEGER_FORMATS = {f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)}
_INTEGER_FORMATS |= {f"uint{n}": (0, 2**n - 1) for n in (8, 16, 32, 64)} | {"uint": (0, 2**64 - 1)}
_INTEGER_FORMATS |= {"int": (-(2**63), 2**63 - 1)}


class NotHonoredError(Exception):
    """A schema that cannot be honored; the message says why. `keyword`: the one in the way, which
    may be dropped; None if no single one is.
    """

    def __init__(self, reason: str, keyword: str | None = None) -> None:
        super().__init__(reason)
        self.keyword = keyword


def enforceable_bounds(schema: Schema, types: list[Any], path: str) -> Schema:
    """The bounds of the numbers of a schema as xgrammar enforces them, or a list of all of them.
    `types` are those of the schema, `path` its name in messages. Raises `NotHonoredError`.
    """
    format_name = schema.pop("format", None) if "string" not in types else None
    step = schema.pop("multipleOf", None)
    if "integer" in types:
        bounds = _integer_bounds(schema, format_name, path)
    else:
        if format_name not in (None, "float", "double"):
            raise NotHonoredError(
                f"{path}: the format {short_repr(format_name)} is not supported", "format"
            )
        bounds = _number_bounds(schema, path)
    if step is None:
        return bounds
    is_whole = "integer" in types and step == int(step) and step >= 1
    if not is_whole:
        raise NotHonoredError(
            f"{path}.multipleOf is supported of whole numbers of type integer alone", "multipleOf"
        )
    return _multiples(int(step), bounds, path)


def _multiples(step: int, bounds: Schema, path: str) -> Schema:
    if step == 1:
        return bounds
    if not bounds and step <= _MAX_UNBOUNDED_STEP:
        return {"multipleOf": step}
    minimum, maximum = bounds.get("minimum"), bounds.get("maximum")
    if minimum is None or maximum is None or maximum - minimum > step * _MAX_LISTED_MULTIPLES:
        raise NotHonoredError(
            f"{path}.multipleOf is supported up to {_MAX_UNBOUNDED_STEP} without bounds, or with"
            f" bounds that leave at most {_MAX_LISTED_MULTIPLES} multiples",
            "multipleOf",
        )
    values = list(range(-(-minimum // step) * step, maximum + 1, step))
    if not values:
        raise NotHonoredError(f"{path}: no multiple is between the bounds", "multipleOf")
    return {"enum": values}


def _integer_bounds(schema: Schema, format_name: Any, path: str) -> Schema:
    """Bounds of whole numbers, as whole numbers that are included."""
    minimums = [math.ceil(schema[name]) for name in ("minimum",) if name in schema]
    maximums = [math.floor(schema[name]) for name in ("maximum",) if name in schema]
    minimums += [math.floor(schema[n]) + 1 for n in ("exclusiveMinimum",) if n in schema]
    maximums += [math.ceil(schema[n]) - 1 for n in ("exclusiveMaximum",) if n in schema]
    if format_name is not None:
        if format_name not in _INTEGER_FORMATS:
            raise NotHonoredError(
                f"{path}: the format {short_repr(format_name)} is not supported", "format"
            )
        minimums.append(_INTEGER_FORMATS[format_name][0])
        maximums.append(_INTEGER_FORMATS[format_name][1])
    bounds: Schema = {}
    if minimums:
        bounds["minimum"] = max(*minimums, -_MAX_INTEGER)
    if maximums:
        bounds["maximum"] = min(*maximums, _MAX_INTEGER)
    if bounds.get("minimum", -_MAX_INTEGER) > bounds.get("maximum", _MAX_INTEGER):
        raise NotHonoredError(
            f"{path}: no whole number up to {_MAX_INTEGER} is between the bounds", "minimum"
        )
    return bounds


def _number_bounds(schema: Schema, path: str) -> Schema:
    """Bounds of numbers, with as many decimals as grammars and floats have."""
    bounds: Schema = {}
    for inclusive, exclusive, rounding, tighter in (
        ("minimum", "exclusiveMinimum", ROUND_CEILING, max),
        ("maximum", "exclusiveMaximum", ROUND_FLOOR, min),
    ):
        bounds_given = {name: schema[name] for name in (exclusive, inclusive) if name in schema}
        if not bounds_given:
            continue
        name = tighter(bounds_given, key=bounds_given.__getitem__)
        value = bounds_given[name]
        if abs(value) > _MAX_BOUND:
            raise NotHonoredError(
                f"{path}.{name}: bounds beyond {_MAX_BOUND:g} are not supported", name
            )
        rounded = _rounded(value, rounding)
        bounds[inclusive if rounded != value else name] = rounded
    lower: Any = bounds.get("minimum", bounds.get("exclusiveMinimum", -math.inf))
    upper: Any = bounds.get("maximum", bounds.get("exclusiveMaximum", math.inf))
    if lower > upper or (lower == upper and bounds.keys() != {"minimum", "maximum"}):
        raise NotHonoredError(
            f"{path}: no number with few decimals is between the bounds", "minimum"
        )
    return bounds


def _rounded(value: float, rounding: str) -> float:
    """The nearest number in one direction that grammars of ranges have."""
    if isinstance(value, int):
        return value
    num_integer_digits = len(str(int(abs(value))))
    decimals = max(0, min(_MAX_DECIMALS, _FLOAT_DIGITS - num_integer_digits))
    rounded = Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), rounding=rounding)
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)
