"""What the keywords of each type of value become, once a schema has no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cluster.grammar import merging, patterns, ranges
from cluster.grammar.ranges import NotHonoredError
from scheduler.bounds import short_repr
from scheduler.errors import RequestError

Schema = dict[str, Any]

_MAX_SIZE = 10_000  # the largest limit on the length of a list, and on the number of properties
_MAX_LENGTH = 10_000  # the largest limit on the length of a string
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_DATE = (
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"  # the 29th of February is left out
)
_HOUR_AND_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_AND_MINUTE})"
_IPV4_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX_DIGIT = r"[0-9a-fA-F]"
_DNS_LABEL = r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
_PATH_CHARACTER = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
# Formats of strings, as patterns that match only valid ones.
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": f"^{_HEX_DIGIT}{{8}}(-{_HEX_DIGIT}{{4}}){{3}}-{_HEX_DIGIT}{{12}}$",
    "ipv4": rf"^{_IPV4_OCTET}\.{_IPV4_OCTET}\.{_IPV4_OCTET}\.{_IPV4_OCTET}$",
    "email": rf"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_DNS_LABEL}(\.[A-Za-z]{{2,}})+$",
    "uri": rf"^[a-z]+://{_DNS_LABEL}(\.{_DNS_LABEL})*(:[1-9][0-9]{{1,3}})?(/{_PATH_CHARACTER}*)*"
    rf"(\?({_PATH_CHARACTER}|/)*)?(#({_PATH_CHARACTER}|/)*)?$",
}
_FORMAT_PATTERNS = {
    name: patterns.rewritten_pattern(pattern, name, is_json_string=True)
    for name, pattern in _FORMAT_PATTERNS.items()
}
FORMAT_NAMES = tuple(_FORMAT_PATTERNS)
_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_ARRAY_KEYWORDS = ("items", "prefixItems", "minItems", "maxItems")
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OBJECT_KEYWORDS = (
    *("properties", "required", "additionalProperties", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties"),
)
_PROPERTY_NAMES_EXCEPTIONS = (
    "but for a pattern, lengths or a list"  # what propertyNames may ask for
)
# Without a type these would have no effect.
_TYPES_BY_KEYWORD = {
    **dict.fromkeys(_STRING_KEYWORDS, ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(_NUMBER_KEYWORDS, ("integer", "number")),
}


def _is_type(value: object) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= len(_TYPES) and all(name in _TYPES for name in value)
    return value in _TYPES


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))  # type: ignore[arg-type]


def _is_whole_number_up_to(value: object, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def _is_nonempty_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


_SIZE_CHECK = (
    lambda value: _is_whole_number_up_to(value, _MAX_SIZE),
    f"a whole number from 0 to {_MAX_SIZE}",
)
_LENGTH_CHECK = (
    lambda value: _is_whole_number_up_to(value, _MAX_LENGTH),
    f"between 0 and {_MAX_LENGTH}",
)
# What the values of keywords must be. Those of the other keywords are checked where they are used.
_VALUE_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (_is_nonempty_list, "a list of at least one value"),
    "required": (_is_list_of_names, "a list of names"),
    "format": (lambda value: isinstance(value, str), "a name"),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), _SIZE_CHECK),
    **dict.fromkeys(("minLength", "maxLength"), _LENGTH_CHECK),
    **dict.fromkeys(_NUMBER_KEYWORDS, (_is_number, "a number")),
}


def check_value(keyword: str, value: object, path: str) -> None:
    """Raise `NotHonoredError` for a value that a keyword of the schema at `path` cannot have."""
    if keyword in _VALUE_CHECKS:
        accepts, description = _VALUE_CHECKS[keyword]
        if not accepts(value):
            raise NotHonoredError(
                f"{path}.{keyword} must be {description}, got {short_repr(value)}", keyword
            )


def enforceable_schema(schema: Schema, path: str) -> Schema | bool:
    """A schema without references and alternatives as xgrammar enforces it. `path`: its name in
    messages. Raises `NotHonoredError`.
    """
    for keyword, needed_types in _TYPES_BY_KEYWORD.items():
        if keyword in schema and "type" not in schema:
            raise NotHonoredError(
                f"{path}.{keyword} needs a type beside it: {' or '.join(needed_types)}", keyword
            )
    types = merging.declared_types(schema)
    if (values := merging.listed_values(schema)) is not None:
        _check_listed_values(values, types, path)
        return schema
    if types is None:
        return {}
    if "number" in types and "integer" in types:
        types = [name for name in types if name != "integer"]
    types = list(dict.fromkeys(types))
    result: Schema = {"type": types[0] if len(types) == 1 else types}
    if "object" in types:
        result |= _object(_with_only(schema, _OBJECT_KEYWORDS), path)
    if "array" in types:
        result |= _array(_with_only(schema, _ARRAY_KEYWORDS), path)
    if "string" in types:
        result |= _string(_with_only(schema, _STRING_KEYWORDS), path)
    if "integer" in types or "number" in types:
        number_bounds = ranges.enforceable_bounds(
            _with_only(schema, (*_NUMBER_KEYWORDS, "format")), types, path
        )
        if "enum" in number_bounds:
            other_types = [name for name in types if name not in ("integer", "number")]
            others = result | {"type": other_types}
            return {"anyOf": [number_bounds, others]} if other_types else number_bounds
        result |= number_bounds
    return result


def _with_only(schema: Schema, names: tuple[str, ...]) -> Schema:
    return {name: schema[name] for name in names if name in schema}


def _check_listed_values(values: list[Any], types: list[Any] | None, path: str) -> None:
    """Raise `NotHonoredError` for values of another type, and for numbers that lose digits."""
    for value in values:
        if types is not None and not any(_is_of_type(value, type_name) for type_name in types):
            raise NotHonoredError(f"{path} lists {short_repr(value)}, which is not of its type")
        if not _is_exact(value):
            raise NotHonoredError(
                f"{path} lists {short_repr(value)}, which has a number that is too large"
            )


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _is_of_type(value: object, type_name: object) -> bool:
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


def _object(schema: Schema, path: str) -> Schema:
    """Unnamed properties come only with `additionalProperties` or the like, or if none is named."""
    properties = dict(schema.get("properties", {}))
    additional_schema = schema.get("additionalProperties")
    required_names = list(dict.fromkeys(schema.get("required", ())))
    names_schema = _names_schema(schema, path)
    if names_schema is not None:
        schema["propertyNames"] = names_schema
    else:
        schema.pop("propertyNames", None)
    has_name_rules = "patternProperties" in schema or names_schema is not None
    if additional_schema is None and not properties and not has_name_rules:
        additional_schema = True
    for name in required_names:
        if name not in properties:
            if additional_schema is False or has_name_rules:
                raise NotHonoredError(
                    f"{path}.required names {short_repr(name)}, which properties does not have",
                    "required",
                )
            properties[name] = True if additional_schema is None else additional_schema
    _check_false_properties(properties, required_names, additional_schema, path)
    if "patternProperties" in schema:
        _rewrite_pattern_properties(schema, properties, additional_schema, path)
        additional_schema = False
    possible_properties = {name: part for name, part in properties.items() if part is not False}
    if additional_schema is None and properties and not possible_properties:
        additional_schema = False  # without properties, any are possible
    has_free_names = bool(schema.get("patternProperties")) or names_schema is not None
    has_free_names |= additional_schema not in (None, False)
    _check_property_count(
        schema, len(required_names), None if has_free_names else len(possible_properties), path
    )
    schema |= {"properties": possible_properties, "required": required_names}
    if additional_schema is not None:
        schema["additionalProperties"] = additional_schema
    if possible_properties and additional_schema not in (None, False):
        # A named property is not a free one, however its name is spelled.
        pattern = patterns.other_names_pattern(tuple(possible_properties))
        schema["propertyNames"] = {"pattern": pattern}
    omitted_if_empty = ("properties", "required", "patternProperties")
    return {name: value for name, value in schema.items() if value or name not in omitted_if_empty}


def _names_schema(schema: Schema, path: str) -> Schema | None:
    """What the names of all properties must match, None for nothing."""
    names_schema = schema.get("propertyNames")
    if names_schema is None or names_schema is True or names_schema == {"type": "string"}:
        return None
    keywords = {"type", "pattern", "enum", "const"}
    is_enforceable = isinstance(names_schema, dict) and not names_schema.keys() - keywords
    if is_enforceable and (values := merging.listed_values(names_schema)) is not None:
        is_enforceable = all(isinstance(value, str) for value in values)
    other_keywords = ("properties", "required", "patternProperties")
    conflicting_keyword = next((name for name in other_keywords if schema.get(name)), None)
    if conflicting_keyword or not is_enforceable or schema.get("additionalProperties") is False:
        obstacle = _PROPERTY_NAMES_EXCEPTIONS
        if conflicting_keyword:
            obstacle = f"together with {conflicting_keyword!r}"
        raise NotHonoredError(f"{path}.propertyNames cannot be honored {obstacle}", "propertyNames")
    return dict(names_schema)


def _check_false_properties(
    properties: Schema, required_names: list[str], additional_schema: Any, path: str
) -> None:
    """Raise `NotHonoredError` for properties that must not be there, if they could be."""
    required = {*required_names}
    for name, part in properties.items():
        if part is False and name in required:
            raise NotHonoredError(
                f"{path}.required names {short_repr(name)}, which cannot be", "required"
            )
        if part is False and additional_schema not in (None, False):
            raise NotHonoredError(
                f"{path}.properties.{name[:100]}: false cannot be honored together with"
                " 'additionalProperties'",
                "properties",
            )


def _rewrite_pattern_properties(
    schema: Schema, properties: Schema, additional_schema: Any, path: str
) -> None:
    """Rewrite the pattern of `patternProperties`. A property has one schema, and names may come
    twice, so no two schemas may concern one.
    """
    pattern_properties = schema["patternProperties"]
    if len(pattern_properties) > 1 or additional_schema not in (None, True, False):
        obstacle = "other patterns" if len(pattern_properties) > 1 else "'additionalProperties'"
        raise NotHonoredError(
            f"{path}.patternProperties cannot be honored together with {obstacle}",
            "patternProperties",
        )
    [(pattern, part)] = pattern_properties.items()
    rewritten = _pattern(pattern, f"{path}.patternProperties", "patternProperties")
    leading_tokens = patterns.leading_tokens(pattern)
    for name in properties:
        if not patterns.cannot_begin_with(name, leading_tokens):
            raise NotHonoredError(
                f"{path}.patternProperties cannot be honored: {short_repr(name)} of the properties"
                " may match a pattern, or begins like it",
                "patternProperties",
            )
    schema["patternProperties"] = {} if part is False else {rewritten: part}


def _check_property_count(
    schema: Schema, num_required_names: int, num_named_properties: int | None, path: str
) -> None:
    """Check the bounds, and drop a `minProperties` that asks for nothing. A name may come twice,
    and counts once. `num_named_properties`: None for any names.
    """
    minimum = schema.get("minProperties", 0)
    if minimum > schema.get("maxProperties", minimum):
        raise NotHonoredError(f"{path}.minProperties is more than maxProperties", "minProperties")
    if num_named_properties is not None and minimum > num_named_properties:
        raise NotHonoredError(f"{path}.minProperties is more than are possible", "minProperties")
    if num_named_properties is None and minimum > max(1, num_required_names):
        raise NotHonoredError(
            f"{path}.minProperties cannot be honored where names are free; set"
            " additionalProperties to false",
            "minProperties",
        )
    if minimum <= num_required_names:
        schema.pop("minProperties", None)
    if schema.get("maxProperties", num_required_names) < num_required_names:
        raise NotHonoredError(
            f"{path}.maxProperties is less than what is required", "maxProperties"
        )


# -- lists, strings --------------------------------------------------------------------------------


def _array(schema: Schema, path: str) -> Schema:
    prefix, minimum = schema.get("prefixItems", []), schema.get("minItems", 0)
    maximum = schema.get("maxItems")
    if maximum is not None and maximum < len(prefix):
        schema |= {"prefixItems": prefix[:maximum], "items": False}
        prefix = prefix[:maximum]
    if False in prefix:
        index = prefix.index(False)
        schema |= {"prefixItems": prefix[:index], "items": False}
    if prefix:
        schema["prefixItems"] = [{} if part is True else part for part in schema["prefixItems"]]
    if "items" not in schema and (not prefix or minimum > len(prefix)):
        schema["items"] = True
    if schema.get("items") is False and minimum > len(schema.get("prefixItems", ())):
        raise NotHonoredError(
            f"{path}.minItems is more than the items that are possible", "minItems"
        )
    if minimum > (math.inf if maximum is None else maximum):
        raise NotHonoredError(f"{path}.minItems is more than maxItems", "minItems")
    return {name: value for name, value in schema.items() if value != []}


def _string(schema: Schema, path: str) -> Schema:
    lengths = [schema.get(name) for name in ("minLength", "maxLength")]
    if lengths != [None, None]:
        minimum, maximum = lengths[0] or 0, "" if lengths[1] is None else lengths[1]
        if lengths[1] is not None and lengths[1] < minimum:
            raise NotHonoredError(f"{path}.minLength is more than maxLength", "minLength")
        return {"pattern": f"^{patterns.UNESCAPED_CHARACTER}{{{minimum},{maximum}}}$"}
    if "format" in schema:
        if schema["format"] not in _FORMAT_PATTERNS:
            raise NotHonoredError(
                f"{path}: the format {short_repr(schema['format'])} is not supported; supported"
                f" are {', '.join(FORMAT_NAMES)}",
                "format",
            )
        return {"pattern": _FORMAT_PATTERNS[schema["format"]]}
    if "pattern" in schema:
        return {"pattern": _pattern(schema["pattern"], f"{path}.pattern", "pattern")}
    return {}


def _pattern(pattern: object, path: str, keyword: str | None = None) -> str:
    try:
        return patterns.rewritten_pattern(pattern, path, is_json_string=True)
    except RequestError as error:
        raise NotHonoredError(str(error).removeprefix("structured_outputs: "), keyword) from None
