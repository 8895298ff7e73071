"""One schema for what several say together, and whether two schemas have a value in common.

`allOf` and what stands beside `$ref`, `anyOf` or `oneOf` ask for all of them, but a grammar follows
one schema. What cannot be put into one exactly is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.grammar.references import References

MAX_MERGED = 5_000  # keywords, properties and required names that are merged in one schema
MAX_ALTERNATIVES = 64  # of `oneOf` that are compared with each other
MAX_COMPARED = 10_000  # pairs of schemas that are compared in one schema
_MAX_REFERENCES = 16  # on the way to one schema
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties"}
_OF_OBJECTS |= {"propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"}
_OF_ARRAYS = {"items", "prefixItems", "minItems", "maxItems"}
# Keywords that apply other schemas to the same value.
IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
IN_PLACE |= {"contains", "patternProperties"}
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class CannotMerge(Exception):
    """Schemas that are not put into one; the message says why."""


def kinds_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The types that values of a schema have, None for any. A schema that has only keywords of
    objects, or of lists, is taken for one of these.
    """
    kinds = schema.get("type")
    if kinds is not None:
        return kinds if isinstance(kinds, list) else [kinds]
    if schema.keys() & _OF_OBJECTS:
        return ["object"]
    return ["array"] if schema.keys() & _OF_ARRAYS else None


def key_of(value: Any) -> Any:
    """A key that two values of JSON share if they are equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, list):
        return ("list", *map(key_of, value))
    if isinstance(value, Mapping):
        return ("object", frozenset((name, key_of(item)) for name, item in value.items()))
    return (isinstance(value, bool), value)


class Merger:
    """Merges parts of one schema. `references` are its own."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._num_merged = self._num_compared = 0

    def merged(self, parts: Sequence[Any], relevant: Any) -> Any:
        """One schema for all parts, which may be booleans. `relevant` says which keywords of a
        schema restrict values; the others are left out. Raises `CannotMerge`.
        """
        self._count(parts)
        if any(part is False for part in parts):
            return False
        for part in parts:
            if not isinstance(part, Mapping | bool):
                raise CannotMerge("there is a part that is no schema")
        parts = [part for part in parts if isinstance(part, Mapping) and relevant(part)]
        if len(parts) < 2:
            return parts[0] if parts else True
        result: dict[str, Any] = {}
        for part in parts:
            resolved = self._resolved(part, relevant)
            if resolved is False:
                return False
            self._count([resolved])
            if resolved is not True and _add(result, relevant(resolved)) is False:
                return False
        return result

    def _count(self, parts: Sequence[Any]) -> None:
        """Raise `CannotMerge` if there are too many parts, which may multiply."""
        for part in parts:
            self._num_merged += 1
            if isinstance(part, Mapping):
                self._num_merged += len(part) + len(_properties(part)) + len(_required(part))
        if self._num_merged > MAX_MERGED:
            raise CannotMerge(f"more than {MAX_MERGED} keywords would have to be merged")

    def _resolved(self, part: Mapping[str, Any], relevant: Any = None) -> Any:
        """What the references of a part lead to. Raises `CannotMerge` if they lead nowhere, or have
        others of the `relevant` keywords beside them, which without it are not looked at.
        """
        target: Any = part
        for _ in range(_MAX_REFERENCES):
            if not isinstance(target, Mapping) or "$ref" not in target:
                return target
            if relevant is not None and relevant(target).keys() != {"$ref"}:
                raise CannotMerge("one of its references has other keywords beside it")
            target = self._references.target(target, str(target["$ref"]))
            if target is None:
                raise CannotMerge("one of its references leads to no schema")
        raise CannotMerge("its references lead on and on")

    def are_disjoint(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether no value fits both; False where that is not certain."""
        self._num_compared += 1
        if self._num_compared > MAX_COMPARED:
            return False
        try:
            first, second = self._resolved(first), self._resolved(second)
        except CannotMerge:
            return False
        if first is False or second is False:
            return True
        if not isinstance(first, Mapping) or not isinstance(second, Mapping) or depth > 4:
            return False
        for one, other in ((first, second), (second, first)):
            for name in ("anyOf", "oneOf"):
                if isinstance(one.get(name), list) and len(one[name]) <= MAX_ALTERNATIVES:
                    return all(self.are_disjoint(part, other, depth + 1) for part in one[name])
        if _types_are_disjoint(_kinds(first), _kinds(second)):
            return True
        values = [values_of(first), values_of(second)]
        if values[0] is not None and values[1] is not None:
            return not {*map(key_of, values[0])} & {*map(key_of, values[1])}
        if kinds_of(first) != ["object"] or kinds_of(second) != ["object"]:
            return False
        return self._objects_are_disjoint(first, second, depth)

    def _objects_are_disjoint(
        self, first: Mapping[str, Any], second: Mapping[str, Any], depth: int
    ) -> bool:
        of_first, of_second = _properties(first), _properties(second)
        needed = _required(first) & _required(second)
        for name in sorted(needed & of_first.keys() & of_second.keys()):
            if self.are_disjoint(of_first[name], of_second[name], depth + 1):
                return True
        return _needs_more(first, second) or _needs_more(second, first)


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Mapping[str, Any]) -> set[Any] | None:
    """The types that a schema names itself, None for any: one that has only keywords of objects
    fits everything else.
    """
    kinds = kinds_of(schema) if "type" in schema else None
    if kinds is None and (values := values_of(schema)) is not None:
        kinds = [_kind_of(value) for value in values]
    return None if kinds is None else {kind for kind in kinds if isinstance(kind, str)}


def _kind_of(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return kinds.get(type(value), "object")


def _types_are_disjoint(first: set[Any] | None, second: set[Any] | None) -> bool:
    if first is None or second is None:
        return False
    numbers = {"integer", "number"}
    return not first & second and not (first & numbers and second & numbers)


def _needs_more(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether the first needs a property that the second does not allow."""
    if second.get("additionalProperties") is not False or "patternProperties" in second:
        return False
    return bool(_required(first) - _properties(second).keys())


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _add(result: dict[str, Any], part: Mapping[str, Any]) -> bool:
    """Add what another part asks for; False if nothing can fit. Raises `CannotMerge`."""
    if result.keys() & _OF_OBJECTS and part.keys() & _OF_OBJECTS:
        _check_objects(result, part)
    _check_arrays(result, part)
    for name, value in part.items():
        if name not in result or _are_the_same(result[name], value):
            result[name] = value
        elif name == "allOf" and isinstance(value, list) and isinstance(result[name], list):
            result[name] = [*result[name], *value]
        elif name == "enum" and isinstance(value, list) and isinstance(result[name], list):
            of_both = {*map(key_of, result[name])} & {*map(key_of, value)}
            result[name] = [value for value in result[name] if key_of(value) in of_both]
            if not result[name]:
                return False
        elif name == "additionalProperties" and (value in (True, {}) or result[name] in (True, {})):
            result[name] = value if result[name] in (True, {}) else result[name]
        elif name == "type":
            kinds = _common_types(result[name], value)
            if not kinds:
                return False
            result[name] = kinds
        elif name == "required":
            result[name] = sorted(_required(result) | _required(part))
        elif name == "properties" and isinstance(value, Mapping):
            result[name] = _both(_properties(result), value)
        elif name in _LEAST and _are_numbers(result[name], value):
            result[name] = max(result[name], value)
        elif name in _MOST and _are_numbers(result[name], value):
            result[name] = min(result[name], value)
        elif name == "items" and "prefixItems" not in result.keys() | part.keys():
            result[name] = {"allOf": [result[name], value]}
        else:
            raise CannotMerge(f"{name!r} is in more than one of its parts")
    return True


def _check_objects(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise `CannotMerge` where a keyword of one would come to mean other properties."""
    for one, other in ((first, second), (second, first)):
        for name in ("patternProperties", "propertyNames", "unevaluatedProperties"):
            if name in one and ("properties" in other or "required" in other):
                raise CannotMerge(f"{name!r} is beside properties of another part")
        others = _properties(other).keys() | _required(other)
        more = one.get("additionalProperties", True)
        has_others = "patternProperties" in other or not others <= _properties(one).keys()
        if more not in (True, {}) and has_others:
            raise CannotMerge("'additionalProperties' is beside properties of another part")


def _check_arrays(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise `CannotMerge` where a keyword of one would come to mean other items."""
    for one, other in ((first, second), (second, first)):
        has_first = "prefixItems" in other and other["prefixItems"] is not one.get("prefixItems")
        if has_first and one.get("items", True) not in (True, {}):
            raise CannotMerge("'items' is beside 'prefixItems' of another part")
        if "unevaluatedItems" in one and other.keys() & {"prefixItems", "items"}:
            raise CannotMerge("'unevaluatedItems' is beside items of another part")


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for name, value in second.items():
        is_new = name not in both or both[name] is value
        both[name] = value if is_new else {"allOf": [both[name], value]}
    return both


def _are_the_same(first: Any, second: Any) -> bool:
    """Whether values of a keyword are, as far as that is quickly seen."""
    if first is second:
        return True
    return isinstance(first, str | int | float) and type(first) is type(second) and first == second


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _common_types(first: Any, second: Any) -> list[Any]:
    """The types that both allow; whole numbers are numbers."""
    firsts, seconds = ([each] if isinstance(each, str) else each for each in (first, second))
    for kinds in (firsts, seconds):
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise CannotMerge("'type' is neither a name nor a list of names")
    common = [kind for kind in firsts if kind in seconds]
    for ones, others in ((firsts, seconds), (seconds, firsts)):
        if "integer" in ones and "number" in others and not {"integer", "number"} & {*common}:
            common.append("integer")
    return common
