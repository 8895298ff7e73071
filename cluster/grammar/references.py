"""Where the references of a JSON schema lead, and whether any finite value fits a schema.

A schema may refer to itself, as that of a tree does, but on the way round there must be an end: an
empty list, an optional property, another alternative. Without one no value fits, and a grammar of
it never ends or has no first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Refuse = Callable[[str], Exception]


def check_references(root: Any, where: str, refuse: Refuse) -> None:
    """Raise what `refuse` makes of a reason, for a reference that leads nowhere and for a schema
    that no finite value fits. `root` has only keywords and values that are honored.
    """
    schemas = list(_schemas(root))
    targets: dict[str, Any] = {}
    for schema in schemas:
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in targets:
            targets[reference] = _target(root, reference)
            if targets[reference] is None:
                raise refuse(f"{where}: $ref {reference[:100]!r} leads to no schema")
    if not targets:
        return
    finite = _finite(schemas, targets)
    if isinstance(root, Mapping) and id(root) not in finite:
        raise refuse(
            f"{where}: no finite value fits this schema, because its references lead back to"
            " themselves; make one of the properties on the way optional, or add an alternative"
        )
    for reference, target in targets.items():
        if isinstance(target, Mapping) and id(target) not in finite:
            raise refuse(
                f"{where}: no finite value fits {reference[:100]!r}, which leads back to itself;"
                " make one of the properties on the way optional, or add an alternative"
            )


def _schemas(root: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas in a schema that are objects, outer ones first."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        yield schema
        for name in ("properties", "$defs", "definitions"):
            waiting += schema.get(name, {}).values()
        for name in ("prefixItems", "anyOf"):
            waiting += schema.get(name, ())
        waiting += [schema[name] for name in ("items", "additionalProperties") if name in schema]


def _target(root: Any, reference: str) -> Any:
    """What a JSON pointer (RFC 6901) leads to; None for nothing, or nothing that is a schema."""
    target = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and int(key[:9]) < len(target):
            target = target[int(key[:9])]
        else:
            return None
    return target if isinstance(target, Mapping | bool) else None


def _finite(schemas: list[Mapping[str, Any]], targets: Mapping[str, Any]) -> set[int]:
    """The ids of the schemas that a finite value fits: the smallest set that agrees with itself.

    A schema is looked at again only when one that it was waiting for turns out to be finite.
    """
    finite: set[int] = set()
    waiting_for: dict[int, list[Mapping[str, Any]]] = {}
    to_do = list(schemas)
    while to_do:
        schema = to_do.pop()
        if id(schema) in finite:
            continue
        missing = _missing(schema, targets, finite)
        if not missing:
            finite.add(id(schema))
            to_do += waiting_for.pop(id(schema), ())
        for part in missing:
            waiting_for.setdefault(part, []).append(schema)
    return finite


def _missing(schema: Mapping[str, Any], targets: Mapping[str, Any], finite: set[int]) -> list[int]:
    """The ids of schemas that are not known to be finite, one of which would have to be; empty for
    a schema that is.
    """

    def is_finite(part: Any) -> bool:
        return part is not False if isinstance(part, bool) else id(part) in finite

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
    kinds = schema.get("type")
    if kinds == "object" or (kinds is None and "properties" in schema):
        properties = schema.get("properties", {})
        needed = [properties[name] for name in schema.get("required", ())]
    elif kinds == "array" or (kinds is None and ("items" in schema or "prefixItems" in schema)):
        needed = _needed_items(schema)
    else:
        return []
    return [id(part) for part in needed if not is_finite(part)][:1]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that a list cannot be without."""
    first = schema.get("prefixItems", [])
    least = schema.get("minItems", len(first))
    needed = list(first[:least])
    if least > len(first) and "items" in schema:
        needed.append(schema["items"])
    return needed
