"""JSON schemas in keywords that xgrammar enforces.

xgrammar accepts many keywords that it does not enforce, or not together with others; here each one
is honored, rewritten, or refused by name. Random walks through grammars, judged by `jsonschema`,
say which is which (`tests/cluster/grammar/test_schemas.py`). What is rewritten may allow less than
the schema does, never more: properties that are not named come only where a schema says so, and no
list is longer than grammars can count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.grammar import keywords, merging, patterns
from cluster.grammar.merging import CannotMergeError, Merger
from cluster.grammar.ranges import NotHonoredError
from cluster.grammar.references import References, check_satisfiable
from scheduler.bounds import check_schema_bounds, short_repr
from scheduler.errors import RequestError

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
# Keywords, with what they hold: nothing to look into, a schema, a list of schemas, schemas by name.
_PLAIN, _SCHEMA, _LIST, _SCHEMAS_BY_NAME = range(4)
_HONORED_KEYWORDS = {
    **dict.fromkeys(("type", "enum", "const", "required", "pattern", "format", "$ref"), _PLAIN),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _PLAIN),
    **dict.fromkeys(("minProperties", "maxProperties", "multipleOf"), _PLAIN),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _PLAIN),
    **dict.fromkeys(("properties", "patternProperties"), _SCHEMAS_BY_NAME),
    **dict.fromkeys(("additionalProperties", "items", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _LIST),
}
# Beside one of these keywords, the others cannot be enforced.
_CONFLICTING_KEYWORDS = {
    "pattern": {"minLength", "maxLength", "format"},
    "format": {"minLength", "maxLength"},
    "enum": set(_HONORED_KEYWORDS) - {"enum", "type"},
    "const": set(_HONORED_KEYWORDS) - {"const", "type"},
}
# Values for which a keyword asks for nothing.
_INEFFECTIVE_VALUES: dict[str, Any] = {
    "uniqueItems": False,
    "dependentRequired": {},
    "dependentSchemas": {},
    "dependencies": {},
    "patternProperties": {},
    "minContains": 0,
    "allOf": [],
}
_MERGED_KEYWORDS = ("allOf", "$ref", "anyOf", "oneOf")  # what is merged, in this order
_UNEVALUATED_KEYWORDS = {"unevaluatedProperties", "unevaluatedItems"}
_SCALAR_TYPES = ("string", "integer", "number", "boolean", "null")
_MAX_DEPTH = 64  # levels of a schema; also merges in a row that one part needs
# Parts of one schema that are rewritten, with the values that they list, and so many characters of
# names and patterns for one. What references with other keywords beside them lead to is rewritten
# for each, which may multiply. So many do not fit into a grammar.
_MAX_PARTS, _CHARACTERS_PER_PART = 20_000, 8
ANY_OBJECT = {"type": "object", "additionalProperties": True}


def honored_schema(schema: object, path: str) -> Any:
    """A JSON schema in keywords that xgrammar enforces. `path`: its name in messages, in which the
    way to a part follows. Raises `RequestError` naming what xgrammar would accept but not enforce,
    what is no schema or fits nothing, and references that have no end.
    """
    try:
        rewritten = _Rewriter(schema, path, drops_keywords=False).rewritten()
    except NotHonoredError as error:
        raise patterns.refusal(str(error)) from None
    if rewritten is False:
        raise patterns.refusal(f"{path}: no value fits this schema")
    return rewritten


def loosened_schema(schema: object, path: str) -> tuple[Any, bool]:
    """(as `honored_schema`, but without what cannot be honored, and any object where that fails or
    leaves a boolean; whether either has happened). Raises nothing.
    """
    try:
        rewriter = _Rewriter(schema, path, drops_keywords=True)
        rewritten = rewriter.rewritten()
    except (NotHonoredError, RequestError):
        return ANY_OBJECT, True
    if isinstance(rewritten, bool):
        return ANY_OBJECT, True
    return rewritten, rewriter.has_dropped_keywords


class _Rewriter:
    """Rewrites one schema. What references lead to is rewritten once each, and only if something
    leads there. With `drops_keywords`, keywords that are not honored are left out.
    """

    def __init__(self, root: Any, path: str, *, drops_keywords: bool) -> None:
        self.has_dropped_keywords = False
        self._has_references = False
        self._num_parts = 0
        self._root = root
        self._path = path
        self._drops_keywords = drops_keywords
        self._references = References(root)
        self._merger = Merger(self._references)
        self._name_by_target_id: dict[int, str] = {id(root): "#"}
        self._reference_by_name: dict[str, str] = {"#": "#"}
        self._unwritten_targets: list[tuple[str, Any, str]] = []

    def rewritten(self) -> Any:
        """The whole schema. Raises `NotHonoredError` and `RequestError`."""
        root = self._rewritten_part(self._root, self._path, 0)
        targets: dict[str, Any] = {}
        while self._unwritten_targets:
            name, target, reference = self._unwritten_targets.pop()
            path = self._path + reference.removeprefix("#").replace("/", ".")
            rewritten_target = self._rewritten_part(target, path, 0)
            if rewritten_target is False:
                raise NotHonoredError(f"{path}: no value fits this schema")
            targets[name.removeprefix("#/$defs/")] = rewritten_target
        if targets and isinstance(root, dict):
            root["$defs"] = targets
        # What properties share is written for each of them.
        check_schema_bounds(root, f"{self._path}, written out", "structured_outputs")
        if self._has_references:
            check_satisfiable(root, self._reference_by_name, self._path, NotHonoredError)
        return root

    def _rewritten_part(self, schema: Any, path: str, depth: int) -> Any:
        """A part of the schema, rewritten; with `drops_keywords`, without keywords that are not
        honored. Raises `RequestError` for too many parts.
        """
        self._num_parts += 1 + merging.num_listed_values(schema)
        if self._num_parts > _MAX_PARTS:
            raise patterns.refusal(
                f"{self._path} becomes more than {_MAX_PARTS} parts, listed values and text"
                f" together, of which {_CHARACTERS_PER_PART} characters count as a part; simplify"
                " it, above all references with other keywords beside them"
            )
        if _has_type_alone(schema):
            return {"type": schema["type"]}
        if self._drops_keywords and isinstance(schema, Mapping):
            schema = self._without_unsupported_keywords(schema)
        try:
            merged = self._rewrite_or_drop_keywords(
                schema, lambda schema: self._checked_schema(schema, path, depth)
            )
            if isinstance(merged, bool):
                return merged
            if "$ref" in merged:
                return self._rewritten_reference(merged, path)
            rewritten = {
                name: self._rewritten_value(name, value, f"{path}.{name}", depth)
                for name, value in merged.items()
                if name in _HONORED_KEYWORDS
            }
            if "oneOf" in rewritten:
                self._check_one_of(merged["oneOf"], path)
            for name in ("oneOf", "anyOf"):
                if name in rewritten:
                    return _alternatives(rewritten[name])
            return self._rewrite_or_drop_keywords(
                rewritten, lambda kept: keywords.enforceable_schema(dict(kept), path)
            )
        except NotHonoredError:
            if not self._drops_keywords:
                raise
            self.has_dropped_keywords = True
            return _any_of_type(schema)

    def _rewrite_or_drop_keywords(self, schema: Any, rewrite: Callable[[Any], Any]) -> Any:
        """What `rewrite` makes of a schema; with `drops_keywords`, of one without the keywords that
        it cannot honor. It must not look into other schemas, which would be looked at again each
        time.
        """
        while True:
            try:
                return rewrite(schema)
            except NotHonoredError as error:
                is_mapping = isinstance(schema, Mapping)
                if not self._drops_keywords or not is_mapping or error.keyword not in schema:
                    raise
                self.has_dropped_keywords = True
                remaining = {name: schema[name] for name in schema if name != error.keyword}
                schema = self._references.register_copy(schema, remaining)

    def _without_unsupported_keywords(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without the keywords that are never honored, which may be many."""
        normalized = _normalized(schema)
        kept_names = [n for n in normalized if n in _HONORED_KEYWORDS or _is_annotation(n)]
        if len(kept_names) == len(normalized):
            return schema
        self.has_dropped_keywords = True
        return self._references.register_copy(schema, {n: normalized[n] for n in kept_names})

    def _checked_schema(self, schema: Any, path: str, depth: int) -> Any:
        """One schema with keywords that are known, for all that are merged in it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise NotHonoredError(f"{path} must be a JSON schema, got {short_repr(schema)}")
        if depth > _MAX_DEPTH:
            raise NotHonoredError(f"{path} is deeper than {_MAX_DEPTH} levels")
        merged = self._merged(_normalized(schema), path)
        if not isinstance(merged, bool):
            self._check_keywords(merged, path)
        return merged

    def _check_keywords(self, schema: Mapping[str, Any], path: str) -> None:
        """Raise `NotHonoredError` for a keyword that is unknown, misused, or not beside another."""
        for keyword in schema:
            if _is_annotation(keyword):
                continue
            if keyword not in _HONORED_KEYWORDS:
                raise NotHonoredError(
                    f"{path}.{keyword}: this keyword of JSON schemas is not supported; supported"
                    f" are {', '.join(sorted(_HONORED_KEYWORDS))}",
                    keyword,
                )
            conflicting_keywords = _CONFLICTING_KEYWORDS.get(keyword, set()) & schema.keys()
            if conflicting_keywords:
                other = min(conflicting_keywords)
                raise NotHonoredError(
                    f"{path}.{keyword} cannot be honored together with {other!r}", other
                )
            keywords.check_value(keyword, schema[keyword], path)
            value_kind = _HONORED_KEYWORDS[keyword]
            if value_kind == _LIST and not (isinstance(schema[keyword], list) and schema[keyword]):
                raise NotHonoredError(f"{path}.{keyword} must be a list of schemas", keyword)
            if value_kind == _SCHEMAS_BY_NAME and not isinstance(schema[keyword], Mapping):
                raise NotHonoredError(f"{path}.{keyword} must map names to schemas", keyword)
        if "$ref" in schema:
            self._target(schema, path)

    def _rewritten_value(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        """The value of a keyword, rewritten."""
        value_kind = _HONORED_KEYWORDS[keyword]
        if value_kind == _SCHEMA:
            if keyword == "propertyNames" and isinstance(value, Mapping):
                value = {"type": "string", **value}
            return self._rewritten_part(value, path, depth + 1)
        if value_kind == _LIST:
            return [
                self._rewritten_part(part, f"{path}[{i}]", depth + 1)
                for i, part in enumerate(value)
            ]
        if value_kind == _SCHEMAS_BY_NAME:
            self._num_parts += sum(map(len, value)) // _CHARACTERS_PER_PART
            return {
                name: self._rewritten_part(part, f"{path}.{name[:100]}", depth + 1)
                for name, part in value.items()
            }
        if isinstance(value, str):
            self._num_parts += len(value) // _CHARACTERS_PER_PART
        return value

    def _merged(self, schema: Mapping[str, Any], path: str) -> Any:
        """A schema without `allOf`, and with nothing beside `$ref`, `anyOf` and `oneOf`."""
        for _ in range(_MAX_DEPTH):
            keyword = next((k for k in _MERGED_KEYWORDS if _needs_merging(schema, k)), None)
            if keyword is None:
                return schema
            try:
                merged = self._merge_keyword(keyword, schema, path)
            except CannotMergeError as error:
                raise NotHonoredError(
                    f"{path}.{keyword} cannot be honored here: {error}", keyword
                ) from None
            if isinstance(merged, bool):
                return merged
            schema = _normalized(merged)
        raise NotHonoredError(f"{path}: schemas apply to each other again and again", keyword)

    def _merge_keyword(self, keyword: str, schema: Mapping[str, Any], path: str) -> Any:
        """A keyword and what is beside it, in one schema. Raises `CannotMergeError`."""
        value = schema[keyword]
        siblings = {name: other for name, other in schema.items() if name != keyword}
        if keyword == "$ref":
            self._target(schema, path)
            reference = self._references.register_copy(schema, {keyword: value})
            return self._merger.merged([reference, siblings], _without_annotations)
        if not isinstance(value, list) or not value:
            raise NotHonoredError(f"{path}.{keyword} must be a list of schemas", keyword)
        if keyword == "allOf":
            return self._merger.merged([siblings, *value], _without_annotations)
        for part in value:  # counts, and says what cannot be
            self._merger.merged([siblings, part], _without_annotations)
        return {keyword: [{"allOf": [siblings, part]} for part in value]}

    def _rewritten_reference(self, schema: Mapping[str, Any], path: str) -> Any:
        target = self._target(schema, path)
        self._has_references = True
        if isinstance(target, bool):
            return target
        name = self._name_by_target_id.get(id(target))
        if name is None:
            name = self._name_by_target_id[id(target)] = f"#/$defs/{len(self._name_by_target_id)}"
            self._reference_by_name[name] = schema["$ref"]
            self._unwritten_targets.append((name, target, schema["$ref"]))
        return {"$ref": name}

    def _target(self, schema: Mapping[str, Any], path: str) -> Any:
        reference = schema["$ref"]
        target = None
        if isinstance(reference, str):
            target = self._references.target(schema, reference)
        if target is None and not (isinstance(reference, str) and reference.startswith("#")):
            raise NotHonoredError(
                f"{path}: $ref {short_repr(reference)} must point into the schema itself", "$ref"
            )
        if target is None:
            raise NotHonoredError(f"{path}: $ref {reference[:100]!r} leads to no schema", "$ref")
        return target

    def _check_one_of(self, alternatives: list[Any], path: str) -> None:
        """Raise `NotHonoredError` unless at most one of the alternatives fits any value; with
        `drops_keywords`, any of them may.
        """
        try:
            self._merger.check_disjoint(
                [
                    self._merged(_normalized(part), path) if isinstance(part, Mapping) else part
                    for part in alternatives
                ]
            )
        except CannotMergeError as error:
            if not self._drops_keywords:
                raise NotHonoredError(f"{path}.oneOf: {error}", "oneOf") from None
            self.has_dropped_keywords = True


def _has_type_alone(schema: Any) -> bool:
    """Whether a schema, like most, asks for nothing but one of the simple types."""
    if not isinstance(schema, Mapping) or schema.get("type") not in _SCALAR_TYPES:
        return False
    return all(name == "type" or _is_annotation(name) for name in schema)


def _needs_merging(schema: Mapping[str, Any], keyword: str) -> bool:
    if keyword not in schema:
        return False
    return keyword == "allOf" or any(n != keyword and not _is_annotation(n) for n in schema)


def _is_annotation(keyword: str) -> bool:
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if not _is_annotation(name)}


def _normalized(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without keywords that ask for nothing, with today's or plainer names for some."""
    ineffective_names = schema.keys() & _INEFFECTIVE_VALUES.keys()
    ineffective_names = {n for n in ineffective_names if schema[n] == _INEFFECTIVE_VALUES[n]}
    is_normalized = not ineffective_names and not schema.keys() & _UNEVALUATED_KEYWORDS
    if is_normalized and not isinstance(schema.get("items"), list):
        return schema
    normalized = {name: schema[name] for name in schema if name not in ineffective_names}
    if isinstance(normalized.get("items"), list) and "prefixItems" not in normalized:
        normalized["prefixItems"] = normalized.pop("items")
        if "additionalItems" in normalized:
            normalized["items"] = normalized.pop("additionalItems")
    for old_name, new_name in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        # Where nothing is beside them that evaluates others, they mean the same.
        if (
            old_name in normalized
            and new_name not in normalized
            and not normalized.keys() & merging.EVALUATING_KEYWORDS
        ):
            normalized[new_name] = normalized.pop(old_name)
    return normalized


def _alternatives(parts: list[Any]) -> Any:
    """Any of the parts."""
    possible_parts = [part for part in parts if part is not False]
    return {"anyOf": possible_parts} if possible_parts else False


def _any_of_type(schema: Any) -> Any:
    """What is left of a schema that cannot be honored at all."""
    type_name = schema.get("type") if isinstance(schema, Mapping) else None
    if type_name == "object":
        return dict(ANY_OBJECT)
    return {"type": type_name} if type_name in _SCALAR_TYPES else True
