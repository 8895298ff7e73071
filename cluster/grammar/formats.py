"""Converts what a request asks of the form of its output to a structural tag, the language of
xgrammar (xgrammar.mlc.ai, "Structural Tag").

Whatever xgrammar would accept but not enforce is refused here, by name. Does not import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cluster.grammar import patterns
from cluster.grammar.markers import CALL, END_CALL, END_THINK, THINK, AnswerState
from cluster.grammar.schemas import ANY_OBJECT, honored_schema
from scheduler.bounds import check_schema_bounds, short_repr
from scheduler.params import StructuredOutputs

Format = dict[str, Any]

MAX_STRUCTURAL_TAG_BYTES = 64 * 1024
_MAX_WHITESPACE = 10  # in a row: enough to indent, but too few to go on forever


@dataclass(frozen=True, slots=True, kw_only=True)
class HonoredTool:
    """A tool by name; `schema` of its arguments, in keywords that are honored."""

    name: str
    schema: Any


def format_of(structure: StructuredOutputs) -> Format:
    """The format of the answer alone. Raises `RequestError` naming what is not possible."""
    if structure.json is not None:
        return _json_format(honored_schema(_parsed_schema(structure.json), "json"))
    if structure.json_object:
        return _json_format(ANY_OBJECT)
    if structure.regex is not None:
        return {"type": "regex", "pattern": patterns.rewritten_pattern(structure.regex, "regex")}
    if structure.choice is not None:
        return one_of([{"type": "const_string", "value": text} for text in structure.choice])
    assert structure.structural_tag is not None, "one of the forms is given"
    return dict(structure.structural_tag)  # the format alone, see `structural_tag_of`


def required_calls_format(
    tools: Iterable[HonoredTool], *, ends_after_one_call: bool = False
) -> Format:
    """At least one call of these tools and nothing else; at most one with `ends_after_one_call`."""
    return {
        "type": "tags_with_separator",
        "tags": [_call_format(tool) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": ends_after_one_call,
    }


def possible_calls_format(
    tools: Iterable[HonoredTool], *, ends_after_one_call: bool = False
) -> Format:
    """Free text, in which a call must be of one of these tools; with `ends_after_one_call`, the
    answer ends after the first call.
    """
    return {
        "type": "triggered_tags",
        "triggers": [CALL],
        "tags": [_call_format(tool) for tool in tools],
        "stop_after_first": ends_after_one_call,
    }


def format_after_thinking(answer_format: Format, state: AnswerState) -> Format:
    """The format of the reasoning, as far as `state` leaves any to come, and then the answer."""
    reasoning_text = {"type": "any_text", "excludes": [THINK, END_THINK]}
    blank_line = {"type": "const_string", "value": "\n\n"}
    if state is AnswerState.REASONING:
        thinking = {"type": "tag", "begin": "", "content": reasoning_text, "end": END_THINK}
        return {"type": "sequence", "elements": [thinking, blank_line, answer_format]}
    if state is AnswerState.UNDECIDED:
        thinking = {"type": "tag", "begin": THINK, "content": reasoning_text, "end": END_THINK}
        reasoning_block = {"type": "sequence", "elements": [thinking, blank_line]}
        optional_block = {"type": "optional", "content": reasoning_block}
        return {"type": "sequence", "elements": [optional_block, answer_format]}
    return answer_format


def structural_tag_of(answer_format: Format) -> str:
    """The structural tag, as JSON, the same for the same format."""
    return json.dumps({"type": "structural_tag", "format": answer_format}, ensure_ascii=False)


def _parsed_schema(schema: object) -> Any:
    """A schema, which may be given as text, within the bounds. Raises `RequestError`."""
    if not isinstance(schema, str):
        return schema
    try:
        schema = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise patterns.refusal(f"json is not a JSON schema: {short_repr(str(error))}") from None
    check_schema_bounds(schema, "structured_outputs.json", "structured_outputs")
    return schema


def _call_format(tool: HonoredTool) -> Format:
    name = json.dumps(tool.name, ensure_ascii=False)
    return {
        "type": "tag",
        "begin": f'{CALL}\n{{"name": {name}, "arguments": ',
        "content": _json_format(tool.schema, max_whitespace=1),
        "end": f"}}\n{END_CALL}",
    }


def _json_format(schema: Any, *, max_whitespace: int = _MAX_WHITESPACE) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_whitespace}


def one_of(formats: list[Format]) -> Format:
    """Any of the formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
