"""One schema for what several say together, and whether two schemas have a value in common.

`allOf` and what stands beside `$ref`, `anyOf` or `oneOf` ask for all of them, but a grammar follows
one schema. What cannot be put into one exactly is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.grammar.references import References

MAX_MERGED_KEYWORDS = 5_000  # keywords, properties and listed values merged in a whole schema
MAX_ALTERNATIVES = 64  # of a `oneOf`, or `anyOf` in it, that are compared with others
# What is compared in a whole schema: values that a pair of schemas lists, and the pair itself.
_MAX_COMPARED_VALUES, _PAIR_COST = 500_000, 50
_MAX_REFERENCE_CHAIN = 16  # on the way to one schema
_OBJECT_KEYWORDS = {"properties", "required", "additionalProperties", "patternProperties"}
_OBJECT_KEYWORDS |= {"propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
_ARRAY_KEYWORDS = {"items", "prefixItems", "minItems", "maxItems"}
# Beside these, `unevaluated...` may not mean what `additional...` does.
EVALUATING_KEYWORDS = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
EVALUATING_KEYWORDS |= {"dependentSchemas", "contains", "patternProperties"}
_LISTING_KEYWORDS = ("type", "enum", "const", "required")
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class CannotMergeError(Exception):
    """Schemas that are not put into one, or may share a value; the message says why."""


def declared_types(schema: Mapping[str, Any]) -> list[Any] | None:
    """The types that values of a schema have, None for any. Without a type, a schema that has
    keywords of objects, or else of lists, is taken for one of these.
    """
    types = schema.get("type")
    if types is not None:
        return types if isinstance(types, list) else [types]
    if schema.keys() & _OBJECT_KEYWORDS:
        return ["object"]
    return ["array"] if schema.keys() & _ARRAY_KEYWORDS else None


def equality_key(value: Any) -> Any:
    """A key that two values of JSON share if they are equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, list):
        return ("list", *map(equality_key, value))
    if isinstance(value, Mapping):
        return ("object", frozenset((name, equality_key(item)) for name, item in value.items()))
    return (isinstance(value, bool), value)


def num_listed_values(schema: Any) -> int:
    """How many values the keywords of a schema list, nested ones among them."""
    if not isinstance(schema, Mapping):
        return 0
    num_values, uncounted = 0, [schema[name] for name in _LISTING_KEYWORDS if name in schema]
    while uncounted:
        value = uncounted.pop()
        num_values += 1
        if isinstance(value, Mapping | list):
            uncounted += value.values() if isinstance(value, Mapping) else value
    return num_values


class Merger:
    """Merges parts of one whole schema. `references` are its own."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._num_keywords_to_merge = self._num_compared_values = 0

    def merged(self, parts: Sequence[Any], select_keywords: Any) -> Any:
        """One schema for all parts, which may be booleans. `select_keywords` says which keywords of
        a schema restrict values; the others are left out. Raises `CannotMergeError`.
        """
        self._count_keywords(parts)
        if any(part is False for part in parts):
            return False
        for part in parts:
            if not isinstance(part, Mapping | bool):
                raise CannotMergeError("there is a part that is no schema")
        parts = [part for part in parts if isinstance(part, Mapping) and select_keywords(part)]
        if len(parts) < 2:
            return parts[0] if parts else True
        result: dict[str, Any] = {}
        for part in parts:
            resolved = self._resolved(part, select_keywords)
            if resolved is False:
                return False
            if resolved is not part:
                self._count_keywords([resolved])
            if resolved is not True and _merge_into(result, select_keywords(resolved)) is False:
                return False
        return result

    def _count_keywords(self, parts: Sequence[Any]) -> None:
        """Raise `CannotMergeError` if there are too many parts, which may multiply."""
        for part in parts:
            self._num_keywords_to_merge += 1
            if isinstance(part, Mapping):
                self._num_keywords_to_merge += (
                    len(part) + len(_properties(part)) + num_listed_values(part)
                )
        if self._num_keywords_to_merge > MAX_MERGED_KEYWORDS:
            raise CannotMergeError(
                f"more than {MAX_MERGED_KEYWORDS} keywords would have to be merged"
            )

    def _resolved(self, part: Mapping[str, Any], select_keywords: Any = None) -> Any:
        """What the references of a part lead to. Raises `CannotMergeError` if they lead nowhere,
        or have others of the `select_keywords` keywords beside them, which without it are not
        looked at.
        """
        target: Any = part
        for _ in range(_MAX_REFERENCE_CHAIN):
            if not isinstance(target, Mapping) or "$ref" not in target:
                return target
            if select_keywords is not None and select_keywords(target).keys() != {"$ref"}:
                raise CannotMergeError("one of its references has other keywords beside it")
            target = self._references.target(target, str(target["$ref"]))
            if target is None:
                raise CannotMergeError("one of its references leads to no schema")
        raise CannotMergeError("its references lead on and on")

    def check_disjoint(self, alternatives: Sequence[Any]) -> None:
        """Raise `CannotMergeError` unless it is certain that no value fits two of these schemas."""
        values = [listed_values(part) or [] for part in alternatives if isinstance(part, Mapping)]
        if len(values) == len(alternatives) and all(values):
            keys = [equality_key(value) for listed in values for value in listed]
            if len({*keys}) == len(keys):
                return
        if len(alternatives) > MAX_ALTERNATIVES:
            raise CannotMergeError(f"more than {MAX_ALTERNATIVES} alternatives; use anyOf")
        for index, second in enumerate(alternatives):
            for first in alternatives[:index]:
                if not self.are_disjoint(first, second):
                    raise CannotMergeError(
                        f"more than one alternative may fit, number {index + 1} among them; use"
                        " anyOf, or give each a required property with a const of its own"
                    )

    def are_disjoint(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether no value fits both; False where that is not certain."""
        if self._num_compared_values > _MAX_COMPARED_VALUES:
            return False
        try:
            first, second = self._resolved(first), self._resolved(second)
        except CannotMergeError:
            return False
        self._num_compared_values += _PAIR_COST + sum(map(num_listed_values, (first, second)))
        if self._num_compared_values > _MAX_COMPARED_VALUES:
            return False
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping) or depth > 4:
            return False
        for schema, other in ((first, second), (second, first)):
            for name in ("anyOf", "oneOf"):
                if isinstance(schema.get(name), list) and len(schema[name]) <= MAX_ALTERNATIVES:
                    return all(self.are_disjoint(part, other, depth + 1) for part in schema[name])
        if _types_are_disjoint(_types_of(first), _types_of(second)):
            return True
        values = [listed_values(first), listed_values(second)]
        if values[0] is not None and values[1] is not None:
            return not {*map(equality_key, values[0])} & {*map(equality_key, values[1])}
        if declared_types(first) != ["object"] or declared_types(second) != ["object"]:
            return False
        return self._objects_are_disjoint(first, second, depth)

    def _objects_are_disjoint(
        self, first: Mapping[str, Any], second: Mapping[str, Any], depth: int
    ) -> bool:
        first_properties, second_properties = _properties(first), _properties(second)
        required_in_both = _required_names(first) & _required_names(second)
        for name in sorted(required_in_both & first_properties.keys() & second_properties.keys()):
            if self.are_disjoint(first_properties[name], second_properties[name], depth + 1):
                return True
        return _needs_forbidden_property(first, second) or _needs_forbidden_property(second, first)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of(schema: Mapping[str, Any]) -> set[Any] | None:
    """The types that a schema names, None for any: keywords of objects alone say none."""
    types = declared_types(schema) if "type" in schema else None
    if types is None and (values := listed_values(schema)) is not None:
        types = [_type_of(value) for value in values]
    return None if types is None else {name for name in types if isinstance(name, str)}


def _type_of(value: Any) -> str:
    json_type_by_class = {bool: "boolean", str: "string", list: "array", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return json_type_by_class.get(type(value), "object")


def _types_are_disjoint(first: set[Any] | None, second: set[Any] | None) -> bool:
    if first is None or second is None:
        return False
    number_types = {"integer", "number"}
    return not first & second and not (first & number_types and second & number_types)


def _needs_forbidden_property(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether the first needs a property that the second does not allow."""
    if second.get("additionalProperties") is not False or "patternProperties" in second:
        return False
    return bool(_required_names(first) - _properties(second).keys())


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required_names(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _merge_into(result: dict[str, Any], part: Mapping[str, Any]) -> bool:
    """Add what another part asks for; False if nothing can fit. Raises `CannotMergeError`."""
    if result.keys() & _OBJECT_KEYWORDS and part.keys() & _OBJECT_KEYWORDS:
        _check_objects(result, part)
    _check_arrays(result, part)
    for name, value in part.items():
        if name not in result or _are_the_same(result[name], value):
            result[name] = value
        elif name == "allOf" and isinstance(value, list) and isinstance(result[name], list):
            result[name] = [*result[name], *value]
        elif name == "enum" and isinstance(value, list) and isinstance(result[name], list):
            common_keys = {*map(equality_key, result[name])} & {*map(equality_key, value)}
            result[name] = [value for value in result[name] if equality_key(value) in common_keys]
            if not result[name]:
                return False
        elif name == "additionalProperties" and (value in (True, {}) or result[name] in (True, {})):
            result[name] = value if result[name] in (True, {}) else result[name]
        elif name == "type":
            types = _common_types(result[name], value)
            if not types:
                return False
            result[name] = types
        elif name == "required":
            result[name] = sorted(_required_names(result) | _required_names(part))
        elif name == "properties" and isinstance(value, Mapping):
            result[name] = _merged_properties(_properties(result), value)
        elif name in _LOWER_BOUNDS and _are_numbers(result[name], value):
            result[name] = max(result[name], value)
        elif name in _UPPER_BOUNDS and _are_numbers(result[name], value):
            result[name] = min(result[name], value)
        elif name == "items" and "prefixItems" not in result.keys() | part.keys():
            result[name] = {"allOf": [result[name], value]}
        else:
            raise CannotMergeError(f"{name!r} is in more than one of its parts")
    return True


def _check_objects(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise `CannotMergeError` where a keyword of one would come to mean other properties."""
    for schema, other in ((first, second), (second, first)):
        for name in ("patternProperties", "propertyNames", "unevaluatedProperties"):
            if name in schema and ("properties" in other or "required" in other):
                raise CannotMergeError(f"{name!r} is beside properties of another part")
        other_names = _properties(other).keys() | _required_names(other)
        has_unnamed = "patternProperties" in other or other_names - _properties(schema).keys()
        if schema.get("additionalProperties", True) not in (True, {}) and has_unnamed:
            raise CannotMergeError("'additionalProperties' is beside properties of another part")


def _check_arrays(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise `CannotMergeError` where a keyword of one would come to mean other items."""
    for schema, other in ((first, second), (second, first)):
        is_prefixed = "prefixItems" in other and other["prefixItems"] is not schema.get(
            "prefixItems"
        )
        if is_prefixed and schema.get("items", True) not in (True, {}):
            raise CannotMergeError("'items' is beside 'prefixItems' of another part")
        if "unevaluatedItems" in schema and other.keys() & {"prefixItems", "items"}:
            raise CannotMergeError("'unevaluatedItems' is beside items of another part")


def _merged_properties(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for name, value in second.items():
        is_new_or_same = name not in merged or merged[name] is value
        merged[name] = value if is_new_or_same else {"allOf": [merged[name], value]}
    return merged


def _are_the_same(first: Any, second: Any) -> bool:
    """Whether values of a keyword are, as far as that is quickly seen."""
    if first is second:
        return True
    return isinstance(first, str | int | float) and type(first) is type(second) and first == second


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _common_types(first: Any, second: Any) -> list[Any]:
    """The types that both allow; whole numbers are numbers."""
    first_types = [first] if isinstance(first, str) else first
    second_types = [second] if isinstance(second, str) else second
    for types in (first_types, second_types):
        if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
            raise CannotMergeError("'type' is neither a name nor a list of names")
    common_types = [name for name in first_types if name in second_types]
    for types, other_types in ((first_types, second_types), (second_types, first_types)):
        has_no_number = not {"integer", "number"} & {*common_types}
        if "integer" in types and "number" in other_types and has_no_number:
            common_types.append("integer")
    return common_types
