"""What the keywords of each type of value become, once a schema has no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cluster.grammar import merging, patterns, ranges
from cluster.grammar.ranges import NotHonored
from scheduler.bounds import shown
from scheduler.errors import RequestError

Schema = dict[str, Any]

_MAX_SIZE = 10_000  # the largest limit on the length of a list
_MAX_LENGTH = 10_000  # the largest limit on the length of a string
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_DATE = (
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"  # the 29th of February is left out
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = r"[0-9a-fA-F]"
_LABEL = r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
_IN_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
# Formats of strings, as patterns that match only valid ones.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.[A-Za-z]{{2,}})+$",
    "uri": rf"^[a-z]+://{_LABEL}(\.{_LABEL})*(:[1-9][0-9]{{1,3}})?(/{_IN_PATH}*)*"
    rf"(\?({_IN_PATH}|/)*)?(#({_IN_PATH}|/)*)?$",
}
FORMATS = tuple(_FORMATS)
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_LISTS = ("items", "prefixItems", "minItems", "maxItems")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties"),
)
_ONLY_NAMES = "but for a pattern, lengths or a list"  # what propertyNames may ask for
# Without a type these would have no effect.
_NEED_TYPE = {
    **dict.fromkeys(_OF_STRINGS, ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(_OF_NUMBERS, ("integer", "number")),
}


def _is_type(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(name in _TYPES for name in value)
    return value in _TYPES


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))  # type: ignore[arg-type]


def _is_whole(value: object, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def _is_values(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_SIZE = (lambda value: _is_whole(value, _MAX_SIZE), f"a whole number from 0 to {_MAX_SIZE}")
_LENGTH = (lambda value: _is_whole(value, _MAX_LENGTH), f"between 0 and {_MAX_LENGTH}")
# What the values of keywords must be. Those of the other keywords are checked where they are used.
_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (_is_values, "a list of values"),
    "required": (_is_names, "a list of names"),
    "format": (lambda value: isinstance(value, str), "a name"),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), _SIZE),
    **dict.fromkeys(("minLength", "maxLength"), _LENGTH),
    **dict.fromkeys(_OF_NUMBERS, (_is_number, "a number")),
}


def check_value(keyword: str, value: object, where: str) -> None:
    """Raise `NotHonored` for a value that the keyword cannot have."""
    if keyword in _VALUES:
        accepts, description = _VALUES[keyword]
        if not accepts(value):
            raise NotHonored(
                f"{where}.{keyword} must be {description}, got {shown(value)}", keyword
            )


def enforceable(schema: Schema, where: str) -> Schema | bool:
    """The form of a schema, without references and alternatives, in which xgrammar enforces it.
    Raises `NotHonored`.
    """
    for keyword, needed in _NEED_TYPE.items():
        if keyword in schema and "type" not in schema:
            raise NotHonored(
                f"{where}.{keyword} needs a type beside it: {' or '.join(needed)}", keyword
            )
    types = merging.declared_types(schema)
    if (values := merging.values_of(schema)) is not None:
        _check_listed(values, types, where)
        return schema
    if types is None:
        return {}
    if "number" in types and "integer" in types:
        types = [name for name in types if name != "integer"]
    types = list(dict.fromkeys(types))
    result: Schema = {"type": types[0] if len(types) == 1 else types}
    if "object" in types:
        result |= _object(_with_only(schema, _OF_OBJECTS), where)
    if "array" in types:
        result |= _array(_with_only(schema, _OF_LISTS), where)
    if "string" in types:
        result |= _string(_with_only(schema, _OF_STRINGS), where)
    if "integer" in types or "number" in types:
        number_bounds = ranges.enforceable_bounds(
            _with_only(schema, (*_OF_NUMBERS, "format")), types, where
        )
        if "enum" in number_bounds:
            return (
                number_bounds
                if len(types) == 1
                else {"anyOf": [number_bounds, _without_numbers(result)]}
            )
        result |= number_bounds
    return result


def _with_only(schema: Schema, names: tuple[str, ...]) -> Schema:
    return {name: schema[name] for name in names if name in schema}


def _without_numbers(schema: Schema) -> Schema:
    return schema | {"type": [name for name in schema["type"] if name not in ("integer", "number")]}


def _check_listed(values: list[Any], types: list[Any] | None, where: str) -> None:
    """Raise `NotHonored` for values of another type, and for numbers that lose digits."""
    for value in values:
        if types is not None and not any(_is_of(value, type_name) for type_name in types):
            raise NotHonored(f"{where} lists {shown(value)}, which is not of its type")
        if not _is_exact(value):
            raise NotHonored(f"{where} lists {shown(value)}, which has a number that is too large")


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _is_of(value: object, type_name: object) -> bool:
    if isinstance(value, bool) or type_name == "boolean":
        return isinstance(value, bool) and type_name == "boolean"
    python_types: dict[object, Any] = {
        "string": str,
        "integer": int,
        "number": int | float,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    return isinstance(value, python_types.get(type_name, ()))


# -- objects ---------------------------------------------------------------------------------------


def _object(schema: Schema, where: str) -> Schema:
    """Properties that are not named come only with `additionalProperties` or the like, or if none
    is named.
    """
    properties, additional = dict(schema.get("properties", {})), schema.get("additionalProperties")
    required_names = list(dict.fromkeys(schema.get("required", ())))
    names = _names_schema(schema, where)
    if names is not None:
        schema["propertyNames"] = names
    else:
        schema.pop("propertyNames", None)
    has_name_rules = "patternProperties" in schema or names is not None
    if additional is None and not properties and not has_name_rules:
        additional = True
    for name in required_names:
        if name not in properties:
            if additional is False or has_name_rules:
                raise NotHonored(
                    f"{where}.required names {shown(name)}, which properties does not have",
                    "required",
                )
            properties[name] = True if additional is None else additional
    _check_false(properties, required_names, additional, where)
    if "patternProperties" in schema:
        _check_patterns(schema, properties, additional, where)
        additional = False
    possible = {name: part for name, part in properties.items() if part is not False}
    if additional is None and properties and not possible:
        additional = False  # without properties, any are possible
    has_free_names = has_name_rules or additional not in (None, False)
    _check_count(schema, len(required_names), None if has_free_names else len(possible), where)
    schema |= {"properties": possible, "required": required_names}
    if additional is not None:
        schema["additionalProperties"] = additional
    optional = ("properties", "required", "patternProperties")
    return {name: value for name, value in schema.items() if value or name not in optional}


def _names_schema(schema: Schema, where: str) -> Schema | None:
    """What the names of all properties must match, None for nothing."""
    names = schema.get("propertyNames")
    if names is None or names is True or names == {"type": "string"}:
        return None
    keywords = {"type", "pattern", "enum", "const"}
    is_of_strings = isinstance(names, dict) and not names.keys() - keywords
    if is_of_strings and (values := merging.values_of(names)) is not None:
        is_of_strings = all(isinstance(value, str) for value in values)
    others = ("properties", "required", "patternProperties")
    conflicting = next((name for name in others if schema.get(name)), None)
    if conflicting or not is_of_strings or schema.get("additionalProperties") is False:
        obstacle = f"together with {conflicting!r}" if conflicting else _ONLY_NAMES
        raise NotHonored(f"{where}.propertyNames cannot be honored {obstacle}", "propertyNames")
    return dict(names)


def _check_false(
    properties: Schema, required_names: list[str], additional: Any, where: str
) -> None:
    """Raise `NotHonored` for properties that must not be there, if they could be."""
    for name, part in properties.items():
        if part is False and name in required_names:
            raise NotHonored(f"{where}.required names {shown(name)}, which cannot be", "required")
        if part is False and additional not in (None, False):
            raise NotHonored(
                f"{where}.properties.{name[:100]}: false cannot be honored together with"
                " 'additionalProperties'",
                "properties",
            )


def _check_patterns(schema: Schema, properties: Schema, additional: Any, where: str) -> None:
    """A property has one schema, and names may come twice, so no two schemas may concern one."""
    pattern_properties = schema["patternProperties"]
    if len(pattern_properties) > 1 or additional not in (None, True, False):
        obstacle = "other patterns" if len(pattern_properties) > 1 else "'additionalProperties'"
        raise NotHonored(
            f"{where}.patternProperties cannot be honored together with {obstacle}",
            "patternProperties",
        )
    [(pattern, part)] = pattern_properties.items()
    rewritten = _pattern(pattern, f"{where}.patternProperties", "patternProperties")
    beginning = patterns.beginning(pattern)
    for name in properties:
        if not patterns.cannot_begin(name, beginning):
            raise NotHonored(
                f"{where}.patternProperties cannot be honored: {shown(name)} of the properties may"
                " match a pattern, or begins like it",
                "patternProperties",
            )
    schema["patternProperties"] = {} if part is False else {rewritten: part}


def _check_count(schema: Schema, num_required: int, num_named: int | None, where: str) -> None:
    """A name may come twice, and then counts once. `num_named`: None if any names are possible."""
    minimum = schema.get("minProperties", 0)
    if num_named is not None and minimum > num_named:
        raise NotHonored(f"{where}.minProperties is more than are possible", "minProperties")
    if num_named is None and minimum > max(1, num_required):
        raise NotHonored(
            f"{where}.minProperties cannot be honored where names are free; set"
            " additionalProperties to false",
            "minProperties",
        )
    if minimum <= num_required:
        schema.pop("minProperties", None)
    if schema.get("maxProperties", num_required) < num_required:
        raise NotHonored(f"{where}.maxProperties is less than what is required", "maxProperties")


# -- lists, strings --------------------------------------------------------------------------------


def _array(schema: Schema, where: str) -> Schema:
    prefix, minimum = schema.get("prefixItems", []), schema.get("minItems", 0)
    maximum = schema.get("maxItems")
    if maximum is not None and maximum < len(prefix):
        schema |= {"prefixItems": prefix[:maximum], "items": False}
        prefix = prefix[:maximum]
    if False in prefix:
        place = prefix.index(False)
        schema |= {"prefixItems": prefix[:place], "items": False}
    if prefix:
        schema["prefixItems"] = [{} if part is True else part for part in schema["prefixItems"]]
    if "items" not in schema and (not prefix or minimum > len(prefix)):
        schema["items"] = True
    if schema.get("items") is False and minimum > len(schema.get("prefixItems", ())):
        raise NotHonored(f"{where}.minItems is more than the items that are possible", "minItems")
    if minimum > (math.inf if maximum is None else maximum):
        raise NotHonored(f"{where}.minItems is more than maxItems", "minItems")
    return {name: value for name, value in schema.items() if value != []}


def _string(schema: Schema, where: str) -> Schema:
    lengths = [schema.get(name) for name in ("minLength", "maxLength")]
    if lengths != [None, None]:
        minimum, maximum = lengths[0] or 0, "" if lengths[1] is None else lengths[1]
        if lengths[1] is not None and lengths[1] < minimum:
            raise NotHonored(f"{where}.minLength is more than maxLength", "minLength")
        return {"pattern": f"^{patterns.CHARACTER}{{{minimum},{maximum}}}$"}
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise NotHonored(
                f"{where}: the format {shown(schema['format'])} is not supported; supported are"
                f" {', '.join(FORMATS)}",
                "format",
            )
        return {"pattern": _pattern(_FORMATS[schema["format"]], where)}
    if "pattern" in schema:
        return {"pattern": _pattern(schema["pattern"], f"{where}.pattern", "pattern")}
    return {}


def _pattern(pattern: object, where: str, keyword: str | None = None) -> str:
    try:
        return patterns.rewritten(pattern, where, in_json=True)
    except RequestError as error:
        raise NotHonored(str(error).removeprefix("structured_outputs: "), keyword) from None
