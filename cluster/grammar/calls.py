"""The formats of answers that call tools: the tightest that can be followed.

Arguments of a strict tool match its schema, or the request is refused. Those of another tool match
its schema as far as that can be honored, and may be any object where the schemas of all tools
together are too large for a grammar. Whose arguments need not match is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.grammar.formats import (
    MAX_STRUCTURAL_TAG_BYTES,
    Format,
    HonoredTool,
    format_of,
    one_of,
    possible_calls_format,
    required_calls_format,
    structural_tag_of,
)
from cluster.grammar.schemas import ANY_OBJECT, honored_schema, loosened_schema
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that may be called; `parameters` is its schema, None for any object."""

    name: str
    parameters: Any | None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStructure(StructuredOutputs):
    """An answer that may call tools. excludes_free_text: it is calls alone, or matches
    `no_call_structure` if that is given. ends_after_one_call: it ends after the first call.
    """

    tools: tuple[CallableTool, ...]
    excludes_free_text: bool
    ends_after_one_call: bool = False
    no_call_structure: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        """Bounds hold for each schema; for those of all together see `candidate_formats`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatCandidate:
    """A format, and the tools whose arguments need not match their schemas."""

    format: Format
    loosened_tools: tuple[str, ...]


def candidate_formats(structure: CallStructure) -> Iterator[FormatCandidate]:
    """The formats of a structure that fit, the tightest first: at each step, half of the tools that
    are left and not strict, or as many as it takes to fit, may be called with any object, those
    with the largest schemas first. Raises `RequestError` if a strict tool cannot be honored, or if
    even the last format is too large.
    """
    honored_tools, incomplete_indices = list[HonoredTool](), set[int]()
    for index, tool in enumerate(structure.tools):
        schema, has_dropped_keywords = _schema_of(tool)
        honored_tools.append(HonoredTool(name=tool.name, schema=schema))
        if has_dropped_keywords:
            incomplete_indices.add(index)
    sizes = [len(_json_text(tool.schema).encode()) for tool in honored_tools]
    loosening_order = [
        index
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
        if not structure.tools[index].is_strict and sizes[index] > len(_json_text(ANY_OBJECT))
    ]
    no_call = structure.no_call_structure
    no_call_format = None if no_call is None else format_of(no_call)
    num_any_object = 0
    while True:
        any_object_indices = {*loosening_order[:num_any_object]}
        chosen_tools = [*honored_tools]
        for index in any_object_indices:
            chosen_tools[index] = HonoredTool(name=honored_tools[index].name, schema=ANY_OBJECT)
        whole_format = _answer_format(structure, chosen_tools, no_call_format)
        excess = len(structural_tag_of(whole_format).encode()) - MAX_STRUCTURAL_TAG_BYTES
        if excess <= 0:
            loosened_indices = sorted(incomplete_indices | any_object_indices)
            names = (honored_tools[index].name for index in loosened_indices)
            yield FormatCandidate(format=whole_format, loosened_tools=tuple(names))
        if num_any_object == len(loosening_order):
            break
        if excess > 0:
            remaining_sizes = [sizes[index] for index in loosening_order[num_any_object:]]
            num_any_object += _num_to_loosen(remaining_sizes, excess)
        else:
            num_any_object += (len(loosening_order) - num_any_object + 1) // 2
    if excess > 0:
        raise RequestError(
            f"structured_outputs: the schemas of the tools are {excess} bytes larger than the"
            f" {MAX_STRUCTURAL_TAG_BYTES} that are possible; give fewer tools, or shorter schemas"
            " to those with strict",
            "tools",
        )


def _schema_of(tool: CallableTool) -> tuple[Any, bool]:
    """(a schema that is honored, whether it leaves out a part of the tool's)"""
    if tool.parameters is None:
        return ANY_OBJECT, False
    path = f"the parameters of {tool.name}"
    if tool.is_strict:
        schema, has_dropped_keywords = honored_schema(tool.parameters, path), False
    else:
        schema, has_dropped_keywords = loosened_schema(tool.parameters, path)
    # Arguments are an object, also where the schema says nothing.
    return (ANY_OBJECT if schema is True or schema == {} else schema), has_dropped_keywords


def _answer_format(
    structure: CallStructure, tools: list[HonoredTool], no_call_format: Format | None
) -> Format:
    if not structure.excludes_free_text:
        return possible_calls_format(tools, ends_after_one_call=structure.ends_after_one_call)
    required_calls = required_calls_format(tools, ends_after_one_call=structure.ends_after_one_call)
    return required_calls if no_call_format is None else one_of([no_call_format, required_calls])


def _num_to_loosen(sizes: list[int], excess: int) -> int:
    """How many of the largest schemas to replace to save so many bytes; all if that is too few."""
    for index, size in enumerate(sizes):
        excess -= size - len(_json_text(ANY_OBJECT))
        if excess <= 0:
            return index + 1
    return len(sizes)


def _json_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
