"""Where the references of a JSON schema lead, and whether any finite value fits a schema.

A schema may refer to itself, as that of a tree does, but on the way round there must be an end: an
empty list, an optional property, another alternative. Without one no value fits, and a grammar of
it never ends or has no first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from cluster.grammar.ranges import NotHonoredError

ErrorMaker = Callable[[str], Exception]

_MAX_URI_CHARS = 1_024  # of two that are joined, of which there may be thousands

# Keywords with subschemas by name, with a list of them, and with one.
SUBSCHEMA_MAP_KEYWORDS = (
    *("properties", "patternProperties", "dependentSchemas"),
    *("$defs", "definitions"),
)
SUBSCHEMA_LIST_KEYWORDS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
SINGLE_SUBSCHEMA_KEYWORDS = (
    *("items", "additionalProperties", "propertyNames", "additionalItems", "contains"),
    *("unevaluatedProperties", "unevaluatedItems", "not", "if", "then", "else"),
)


def subschemas_of(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The values directly in a schema that are schemas, or should be."""
    for name in SUBSCHEMA_MAP_KEYWORDS:
        schema_map = schema.get(name)
        if isinstance(schema_map, Mapping):
            yield from schema_map.values()
    for name in SUBSCHEMA_LIST_KEYWORDS:
        parts = schema.get(name)
        if isinstance(parts, list):
            yield from parts
    for name in SINGLE_SUBSCHEMA_KEYWORDS:
        if name in schema:
            yield schema[name]


class References:
    """The places in a schema that references may lead to: JSON pointers (RFC 6901), `$id` and
    `$anchor`. The schema must not change.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._base_uri_by_schema_id: dict[int, str] = {}
        self._schemas_by_uri: dict[str, Any] = {"": root}  # by address, with an anchor
        self._copies_kept_alive: list[Mapping[str, Any]] = []  # so that id() is not reused
        unvisited = [(root, "")]
        while unvisited:
            schema, base_uri = unvisited.pop()
            if not isinstance(schema, Mapping):
                continue
            name = schema.get("$id")
            if isinstance(name, str):
                base_uri = _joined_uri(base_uri, name)
                self._schemas_by_uri.setdefault(base_uri.removesuffix("#"), schema)
            anchor = schema.get("$anchor")
            if isinstance(anchor, str):
                self._schemas_by_uri.setdefault(f"{urldefrag(base_uri).url}#{anchor}", schema)
            self._base_uri_by_schema_id[id(schema)] = urldefrag(base_uri).url
            unvisited += [(part, base_uri) for part in subschemas_of(schema)]

    def register_copy(self, schema: Mapping[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
        """A copy of a schema, in whose place it stands from now on."""
        if id(schema) in self._base_uri_by_schema_id:
            self._base_uri_by_schema_id[id(copy)] = self._base_uri_by_schema_id[id(schema)]
            self._copies_kept_alive.append(copy)
        return copy

    def target(self, schema: Mapping[str, Any], reference: str) -> Any:
        """What a reference in a schema leads to; None for nothing, or nothing that is a schema."""
        base_uri = self._base_uri_by_schema_id.get(
            id(schema), self._base_uri_by_schema_id.get(id(self._root), "")
        )
        address, fragment = urldefrag(_joined_uri(base_uri, reference))
        if fragment and not fragment.startswith("/"):
            target = self._schemas_by_uri.get(f"{address}#{unquote(fragment)}")
        else:
            target = _pointer_target(self._schemas_by_uri.get(address), unquote(fragment))
        return target if isinstance(target, Mapping | bool) else None


def _joined_uri(base_uri: str, reference: str) -> str:
    num_characters = len(base_uri) + len(reference)
    if base_uri and num_characters > _MAX_URI_CHARS:
        raise NotHonoredError(
            f"$id and a reference in it have at most {_MAX_URI_CHARS} characters together, got"
            f" {num_characters}"
        )
    try:
        return urljoin(base_uri, reference) if reference else base_uri
    except ValueError:  # no address at all
        return reference


def _pointer_target(target: Any, pointer: str) -> Any:
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


def check_satisfiable(
    root: Any, original_references: Mapping[str, str], path: str, make_error: ErrorMaker
) -> None:
    """Raise what `make_error` makes of a reason, for a schema that no finite value fits. `root` has
    only keywords and values that are honored. `original_references`: what each `$ref` in it was
    before; `path`: the name of `root` in messages.
    """
    if not isinstance(root, Mapping):
        return
    targets: dict[str, Any] = {"#": root}
    targets |= {f"#/$defs/{name}": target for name, target in root.get("$defs", {}).items()}
    satisfiable_ids = _satisfiable_ids(list(_schemas(root)), targets)
    advice = "make one of the properties on the way optional, or add an alternative"
    if id(root) not in satisfiable_ids:
        raise make_error(
            f"{path}: no finite value fits this schema, because its references lead back to"
            f" themselves; {advice}"
        )
    for reference, target in targets.items():
        if isinstance(target, Mapping) and id(target) not in satisfiable_ids:
            raise make_error(
                f"{path}: no finite value fits {original_references[reference][:100]!r}, which"
                f" leads back to itself; {advice}"
            )


def _schemas(root: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema that are objects, outer ones first."""
    unvisited = [root]
    while unvisited:
        schema = unvisited.pop()
        if isinstance(schema, Mapping):
            yield schema
            unvisited += subschemas_of(schema)


def _satisfiable_ids(schemas: list[Mapping[str, Any]], targets: Mapping[str, Any]) -> set[int]:
    """The ids of the schemas that a finite value fits: the smallest set that agrees with itself.

    Whatever needs several others waits for one at a time, so nothing is looked at again and again.
    """
    satisfiable_ids = {id(True)}
    waiting: dict[int, list[tuple[int, list[int]]]] = {}  # by what they wait for
    ways_to_check = [
        (id(schema), needed_ids) for schema in schemas for needed_ids in _ways(schema, targets)
    ]
    while ways_to_check:
        schema_id, needed_ids = ways_to_check.pop()
        while needed_ids and needed_ids[-1] in satisfiable_ids:
            needed_ids.pop()
        if needed_ids:
            waiting.setdefault(needed_ids[-1], []).append((schema_id, needed_ids))
        elif schema_id not in satisfiable_ids:
            satisfiable_ids.add(schema_id)
            ways_to_check += waiting.pop(schema_id, ())
    return satisfiable_ids


def _ways(schema: Mapping[str, Any], targets: Mapping[str, Any]) -> list[list[int]]:
    """For each way to a finite value of a schema, the ids of the schemas that need one as well."""
    ways: list[list[Any]]
    if "$ref" in schema:
        ways = [[targets[schema["$ref"]]]]
    elif "anyOf" in schema:
        ways = [[part] for part in schema["anyOf"]]
    elif "enum" in schema or "const" in schema:
        ways = [[]]
    else:
        types = schema.get("type")
        type_names = types if isinstance(types, list) else [types]
        ways = [_NEEDED_PARTS_BY_TYPE.get(name, lambda _: [])(schema) for name in type_names]
    return [[id(part) for part in needed_parts] for needed_parts in ways]


def _needed_properties(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the properties that an object cannot be without."""
    properties = schema.get("properties", {})
    required_names = {*schema.get("required", ())}
    needed_schemas = [properties[name] for name in required_names]
    optional = [part for name, part in properties.items() if name not in required_names]
    free_schemas = [
        *schema.get("patternProperties", {}).values(),
        schema.get("additionalProperties", True),
    ]
    num_missing_properties = schema.get("minProperties", 0) - len(needed_schemas)
    return needed_schemas + (optional + free_schemas)[: max(num_missing_properties, 0)]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that a list cannot be without."""
    prefix = schema.get("prefixItems", [])
    minimum = schema.get("minItems", len(prefix))
    needed_schemas = list(prefix[:minimum])
    if minimum > len(prefix) and "items" in schema:
        needed_schemas.append(schema["items"])
    return needed_schemas


_NEEDED_PARTS_BY_TYPE: dict[Any, Callable[[Mapping[str, Any]], list[Any]]] = {
    "object": _needed_properties,
    "array": _needed_items,
}
