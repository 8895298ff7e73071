"""Converts what a request asks of the form of its output to a structural tag, the language of
xgrammar (xgrammar.mlc.ai, "Structural Tag").

Whatever xgrammar would accept but not enforce is refused here, by name. Imports nothing of
xgrammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.client.thinking import CALL, END_CALL, END_THINK, THINK, State
from cluster.grammar.references import check_references
from scheduler.bounds import check, shown
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs

Format = dict[str, Any]

_MAX_SIZE = 10_000  # the largest limit on the length of a list
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment"),
}
# Keywords, with what they hold: nothing to look into, a schema, a list of schemas, schemas by name.
_PLAIN, _SCHEMA, _LIST, _BY_NAME = range(4)
_HONORED = {
    "type": _PLAIN,
    "enum": _PLAIN,
    "const": _PLAIN,
    "required": _PLAIN,
    "minItems": _PLAIN,
    "maxItems": _PLAIN,
    "minLength": _PLAIN,
    "maxLength": _PLAIN,
    "pattern": _PLAIN,
    "format": _PLAIN,
    "minimum": _PLAIN,
    "maximum": _PLAIN,
    "exclusiveMinimum": _PLAIN,
    "exclusiveMaximum": _PLAIN,
    "$ref": _PLAIN,
    "properties": _BY_NAME,
    "$defs": _BY_NAME,
    "definitions": _BY_NAME,
    "additionalProperties": _SCHEMA,
    "items": _SCHEMA,
    "prefixItems": _LIST,
    "anyOf": _LIST,
}
# Beside one of these keywords, some or all other keywords cannot be enforced.
_ALONE = {
    "pattern": {"minLength", "maxLength", "format"},
    "format": {"minLength", "maxLength"},
    "$ref": set(_HONORED) - {"$ref", "$defs", "definitions"},
    "anyOf": set(_HONORED) - {"anyOf", "$defs", "definitions"},
    "enum": set(_HONORED) - {"enum", "type", "$defs", "definitions"},
    "const": set(_HONORED) - {"const", "type", "$defs", "definitions"},
}
# Without a type these would have no effect.
_OF_TYPE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minimum", "exclusiveMinimum"), ("integer", "number")),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), ("integer", "number")),
}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


def _is_type(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(name in _TYPES for name in value)
    return value in _TYPES


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


# What the values of keywords must be. Those of the other keywords are checked where they are used.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "required": (_is_names, "a list of names"),
    **dict.fromkeys(("minItems", "maxItems"), (_is_size, f"a whole number from 0 to {_MAX_SIZE}")),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")
    ),
}
_CHARACTER = r"[^\"\\\u0000-\u001f]"  # characters of a JSON string that are not escaped
_DATE = (
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"  # the 29th of February is left out
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = r"[0-9a-fA-F]"
# Formats of strings, as patterns that match only valid ones.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
    "email": r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z]{2,})+$",
}
FORMATS = tuple(_FORMATS)
_MAX_DEPTH = 64
_MAX_LENGTH = 10_000  # the largest limit on the length of a string
_MAX_WHITESPACE = 10  # in a row: enough to indent, but too few to go on forever
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A tool that may be called; `schema` of its arguments, None for any object."""

    name: str
    schema: Any | None


def format_of(wanted: StructuredOutputs) -> Format:
    """The format of the answer alone. Raises `RequestError` naming what is not possible."""
    if wanted.json is not None:
        return _json(honored(_schema(wanted.json), "json"))
    if wanted.json_object:
        return _json(_ANY_OBJECT)
    if wanted.regex is not None:
        _check_pattern(wanted.regex, "regex")
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.choice is not None:
        return one_of([{"type": "const_string", "value": text} for text in wanted.choice])
    assert wanted.structural_tag is not None, "one of the forms is given"
    return dict(wanted.structural_tag)


def calls_required(tools: Iterable[ToolFormat], *, only_one: bool = False) -> Format:
    """At least one call of these tools and nothing else; at most one with `only_one`."""
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def calls_possible(tools: Iterable[ToolFormat], *, only_one: bool = False) -> Format:
    """Free text, in which a call must be of one of these tools; with `only_one`, the answer ends
    after the first call.
    """
    return {
        "type": "triggered_tags",
        "triggers": [CALL],
        "tags": [_call(tool) for tool in tools],
        "stop_after_first": only_one,
    }


def after_thinking(answer: Format, state: State) -> Format:
    """The format of the answer after the reasoning, which the prompt leaves open or with which the
    answer may begin.
    """
    thoughts = {"type": "any_text", "excludes": [THINK, END_THINK]}
    end = {"type": "const_string", "value": "\n\n"}
    if state is State.REASONING:
        thinking = {"type": "tag", "begin": "", "content": thoughts, "end": END_THINK}
        return {"type": "sequence", "elements": [thinking, end, answer]}
    if state is State.UNDECIDED:
        thinking = {"type": "tag", "begin": THINK, "content": thoughts, "end": END_THINK}
        reasoned = {"type": "sequence", "elements": [thinking, end]}
        return {
            "type": "sequence",
            "elements": [{"type": "optional", "content": reasoned}, answer],
        }
    return answer


def source_of(answer: Format) -> str:
    """The structural tag as text, the same for the same format."""
    return json.dumps({"type": "structural_tag", "format": answer}, ensure_ascii=False)


def honored(schema: object, where: str) -> Any:
    """A JSON schema in keywords that xgrammar enforces. Raises `RequestError` naming what it would
    accept but not enforce, what is no schema, and references that have no end.
    """
    rewritten = _honored(schema, where, 0)
    check_references(rewritten, where, _refused)
    return rewritten


def _honored(schema: object, where: str, depth: int) -> Any:
    """The part of a schema at `where`."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise _refused(f"{where} must be a JSON schema, got {_shown(schema)}")
    if depth > _MAX_DEPTH:
        raise _refused(f"{where} is deeper than {_MAX_DEPTH} levels")
    rewritten: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword not in _ANNOTATIONS:
            _check_kind(keyword, value, where)
            rewritten[keyword] = _part(schema, keyword, value, f"{where}.{keyword}", depth)
    _check_values(rewritten, where)
    lengths = [rewritten.pop(name, None) for name in ("minLength", "maxLength")]
    if lengths != [None, None]:
        least, most = lengths[0] or 0, "" if lengths[1] is None else lengths[1]
        rewritten["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    if "format" in rewritten:
        rewritten["pattern"] = _FORMATS[rewritten.pop("format")]
    if "pattern" in rewritten:
        rewritten["pattern"] = _without_optional_groups(rewritten["pattern"])
    return rewritten


def _part(schema: Mapping[str, Any], keyword: str, value: object, where: str, depth: int) -> Any:
    """The value of a keyword, rewritten."""
    kind = _HONORED.get(keyword)
    if kind is None:
        raise _refused(
            f"{where}: this keyword of JSON schemas is not supported; supported are"
            f" {', '.join(sorted(_HONORED))}"
        )
    others = _ALONE.get(keyword, set()) & schema.keys()
    if others:
        raise _refused(f"{where} cannot be honored together with {min(others)!r}")
    if kind == _SCHEMA:
        return _honored(value, where, depth + 1)
    if kind == _LIST:
        if not isinstance(value, list) or not value:
            raise _refused(f"{where} must be a list of schemas")
        return [_honored(each, f"{where}[{i}]", depth + 1) for i, each in enumerate(value)]
    if kind == _BY_NAME:
        if not isinstance(value, Mapping):
            raise _refused(f"{where} must map names to schemas")
        return {
            name: _honored(each, f"{where}.{name[:100]}", depth + 1) for name, each in value.items()
        }
    return value


def _check_kind(keyword: str, value: object, where: str) -> None:
    """Raise `RequestError` for a value that the keyword cannot have."""
    if keyword in _KINDS:
        is_possible, kind = _KINDS[keyword]
        if not is_possible(value):
            raise _refused(f"{where}.{keyword} must be {kind}, got {_shown(value)}")


def _check_values(schema: dict[str, Any], where: str) -> None:
    """Raise `RequestError` for values of keywords that cannot be honored."""
    name = schema.get("format")
    if name is not None and name not in FORMATS:
        raise _refused(
            f"{where}: the format {_shown(name)} is not supported; supported are"
            f" {', '.join(FORMATS)}"
        )
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise _refused(f"{where}: $ref {_shown(reference)} must point into the schema itself")
    if "pattern" in schema:
        _check_pattern(schema["pattern"], f"{where}.pattern")
        if re.search(r'"|\\\\', schema["pattern"]):
            raise _refused(f"{where}.pattern must not contain quotes or backslashes as characters")
    for limit in ("minLength", "maxLength"):
        length = schema.get(limit, 0)
        is_whole = isinstance(length, int) and not isinstance(length, bool)
        if not is_whole or not 0 <= length <= _MAX_LENGTH:
            raise _refused(
                f"{where}.{limit} must be between 0 and {_MAX_LENGTH}, got {_shown(length)}"
            )
    for keyword, needed in _OF_TYPE.items():
        if keyword in schema and "type" not in schema:
            raise _refused(f"{where}.{keyword} needs a type beside it: {' or '.join(needed)}")
    known = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in known]
    if missing:
        raise _refused(
            f"{where}.required names {_shown(missing[0])}, which properties does not have"
        )
    if "type" in schema and ("enum" in schema or "const" in schema):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        wrong = [value for value in values if not any(_is_of(value, kind) for kind in kinds)]
        if wrong:
            raise _refused(f"{where} lists {_shown(wrong[0])}, which is not of its type")


def _check_pattern(pattern: object, where: str) -> None:
    """Raise `RequestError` unless it is text in the part of the syntax that is honored."""
    if not isinstance(pattern, str):
        raise _refused(f"{where} must be text, got {_shown(pattern)}")
    check("pattern", len(pattern), where, "structured_outputs")
    if re.search(r"\(\?(?!:)", pattern):
        raise _refused(f"{where}: groups that begin with '(?', other than '(?:', are not supported")


def _without_optional_groups(pattern: str) -> str:
    """`(a)?` as `(a|)`. In a schema, `(ab+)?` of xgrammar 0.2.8 matches what `b*` matches."""
    parts, place, in_class = [], 0, False
    while place < len(pattern):
        length = 2 if pattern[place] == "\\" else 1
        part = pattern[place : place + length]
        if part == "[":
            in_class = True
        elif part == "]":
            in_class = False
        elif not in_class and part == ")" and pattern[place + 1 : place + 2] == "?":
            part, length = "|)", 2
        parts.append(part)
        place += length
    return "".join(parts)


def _is_of(value: object, kind: object) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    types: dict[object, Any] = {
        "string": str,
        "integer": int,
        "number": int | float,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    return isinstance(value, types.get(kind, ()))


def _schema(value: object) -> Any:
    """A schema, which may be given as text."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
        json.dumps(schema, ensure_ascii=False).encode()  # no half of a surrogate pair
        return schema
    except (ValueError, RecursionError) as error:
        raise _refused(f"json is not a JSON schema: {shown(str(error))}") from None


def _call(tool: ToolFormat) -> Format:
    name = json.dumps(tool.name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{CALL}\n{{"name": {name}, "arguments": ',
        "content": _json(_ANY_OBJECT if tool.schema is None else tool.schema, max_whitespace=1),
        "end": f"}}\n{END_CALL}",
    }


def _json(schema: Any, *, max_whitespace: int = _MAX_WHITESPACE) -> Format:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": max_whitespace,
    }


def one_of(formats: list[Format]) -> Format:
    """Any of the formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _refused(why: str) -> RequestError:
    return RequestError(f"structured_outputs: {why}", "structured_outputs")


def _shown(value: object) -> str:
    return shown(value)
