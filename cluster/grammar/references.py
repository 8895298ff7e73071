"""Where the references of a JSON schema lead, and whether any finite value fits a schema.

A schema may refer to itself, as that of a tree does, but on the way round there must be an end: an
empty list, an optional property, another alternative. Without one no value fits, and a grammar of
it never ends or has no first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Refuse = Callable[[str], Exception]

# Keywords with schemas by name, a list of schemas, and a schema.
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
SCHEMA_KEYWORDS = (
    *("items", "additionalProperties", "propertyNames", "additionalItems", "contains"),
    *("unevaluatedProperties", "unevaluatedItems", "not", "if", "then", "else"),
)


def parts_of(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The values directly in a schema that are schemas, or should be."""
    for name in BY_NAME:
        by_name = schema.get(name)
        if isinstance(by_name, Mapping):
            yield from by_name.values()
    for name in LISTS:
        parts = schema.get(name)
        if isinstance(parts, list):
            yield from parts
    for name in SCHEMA_KEYWORDS:
        if name in schema:
            yield schema[name]


class References:
    """The places in a schema that references may lead to: JSON pointers (RFC 6901), `$id` and
    `$anchor`. The schema must not change.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base_of: dict[int, str] = {}  # by the id of a schema
        self._named: dict[str, Any] = {"": root}  # by address, with an anchor
        self._copies: list[Mapping[str, Any]] = []  # kept, so that their ids stay theirs
        unvisited = [(root, "")]
        while unvisited:
            schema, base = unvisited.pop()
            if not isinstance(schema, Mapping):
                continue
            name = schema.get("$id")
            if isinstance(name, str):
                base = _joined(base, name)
                self._named.setdefault(base.removesuffix("#"), schema)
            anchor = schema.get("$anchor")
            if isinstance(anchor, str):
                self._named.setdefault(f"{urldefrag(base).url}#{anchor}", schema)
            self._base_of[id(schema)] = urldefrag(base).url
            unvisited += [(part, base) for part in parts_of(schema)]

    def copied(self, schema: Mapping[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
        """A copy of a schema, in whose place it stands from now on."""
        if id(schema) in self._base_of:
            self._base_of[id(copy)] = self._base_of[id(schema)]
            self._copies.append(copy)
        return copy

    def target(self, schema: Mapping[str, Any], reference: str) -> Any:
        """What a reference in a schema leads to; None for nothing, or nothing that is a schema."""
        base = self._base_of.get(id(schema), self._base_of.get(id(self._root), ""))
        address, fragment = urldefrag(_joined(base, reference))
        if fragment and not fragment.startswith("/"):
            target = self._named.get(f"{address}#{unquote(fragment)}")
        else:
            target = _pointed(self._named.get(address), unquote(fragment))
        return target if isinstance(target, Mapping | bool) else None


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference) if reference else base
    except ValueError:  # no address at all
        return reference


def _pointed(target: Any, pointer: str) -> Any:
    """What a JSON pointer leads to, None for nothing."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key[:9]) < len(target):
            target = target[int(key[:9])]
        else:
            return None
    return target


def check_ends(root: Any, named: Mapping[str, str], where: str, refuse: Refuse) -> None:
    """Raise what `refuse` makes of a reason, for a schema that no finite value fits. `root` has
    only keywords and values that are honored; `named`: what its references were called.
    """
    if not isinstance(root, Mapping):
        return
    targets: dict[str, Any] = {"#": root}
    targets |= {f"#/$defs/{name}": target for name, target in root.get("$defs", {}).items()}
    satisfiable_ids = _satisfiable_ids(list(_schemas(root)), targets)
    way_out = "make one of the properties on the way optional, or add an alternative"
    if id(root) not in satisfiable_ids:
        raise refuse(
            f"{where}: no finite value fits this schema, because its references lead back to"
            f" themselves; {way_out}"
        )
    for reference, target in targets.items():
        if isinstance(target, Mapping) and id(target) not in satisfiable_ids:
            raise refuse(
                f"{where}: no finite value fits {named[reference][:100]!r}, which leads back to"
                f" itself; {way_out}"
            )


def _schemas(root: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema that are objects, outer ones first."""
    unvisited = [root]
    while unvisited:
        schema = unvisited.pop()
        if isinstance(schema, Mapping):
            yield schema
            unvisited += parts_of(schema)


def _satisfiable_ids(schemas: list[Mapping[str, Any]], targets: Mapping[str, Any]) -> set[int]:
    """The ids of the schemas that a finite value fits: the smallest set that agrees with itself.

    A schema is looked at again only when one that it was waiting for turns out to be finite.
    """
    satisfiable_ids: set[int] = set()
    waiting_for: dict[int, list[Mapping[str, Any]]] = {}
    unvisited = list(schemas)
    while unvisited:
        schema = unvisited.pop()
        if id(schema) in satisfiable_ids:
            continue
        missing = _missing(schema, targets, satisfiable_ids)
        if not missing:
            satisfiable_ids.add(id(schema))
            unvisited += waiting_for.pop(id(schema), ())
        for part in missing:
            waiting_for.setdefault(part, []).append(schema)
    return satisfiable_ids


def _missing(
    schema: Mapping[str, Any], targets: Mapping[str, Any], satisfiable_ids: set[int]
) -> list[int]:
    """The ids of schemas that are not known to be finite, one of which would have to be; empty for
    a schema that is.
    """

    def is_finite(part: Any) -> bool:
        return part is not False if isinstance(part, bool) else id(part) in satisfiable_ids

    if "$ref" in schema:
        target = targets[schema["$ref"]]
        return [] if is_finite(target) else [id(target)]
    if "anyOf" in schema:
        alternatives = schema["anyOf"]
        if any(map(is_finite, alternatives)):
            return []
        return [id(part) for part in alternatives]
    if "enum" in schema or "const" in schema:
        return []
    types = schema.get("type")
    missing_of_types: list[list[int]] = []
    for type_name in types if isinstance(types, list) else [types]:
        needed = (
            _REQUIRED_PARTS_BY_TYPE[type_name](schema)
            if type_name in _REQUIRED_PARTS_BY_TYPE
            else []
        )
        missing = [id(part) for part in needed if not is_finite(part)][:1]
        if not missing:
            return []
        missing_of_types.append(missing)
    return [part for missing_ids in missing_of_types for part in missing_ids]


def _needed_properties(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the properties that an object cannot be without."""
    properties = schema.get("properties", {})
    names = list(schema.get("required", ()))
    needed = [properties[name] for name in names]
    optional = [part for name, part in properties.items() if name not in {*names}]
    free = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
    num_more = schema.get("minProperties", 0) - len(needed)
    return needed + (optional + free)[: max(num_more, 0)]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that a list cannot be without."""
    prefix = schema.get("prefixItems", [])
    minimum = schema.get("minItems", len(prefix))
    needed = list(prefix[:minimum])
    if minimum > len(prefix) and "items" in schema:
        needed.append(schema["items"])
    return needed


_REQUIRED_PARTS_BY_TYPE: dict[Any, Callable[[Mapping[str, Any]], list[Any]]] = {
    "object": _needed_properties,
    "array": _needed_items,
}
