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
    MAX_SOURCE_BYTES,
    CallFormat,
    Format,
    calls_possible,
    calls_required,
    format_of,
    one_of,
    source_of,
)
from cluster.grammar.schemas import ANY_OBJECT, honored, loosened
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
    """An answer that must call tools, or may (`is_required`); with `only_one`, it ends after the
    first call. `otherwise`: what an answer without calls must match, if there may be one.
    """

    tools: tuple[CallableTool, ...]
    is_required: bool
    only_one: bool = False
    otherwise: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        """The bounds of schemas hold for each tool; see `candidates` for those of all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A format, and the tools whose arguments need not match their schemas."""

    format: Format
    loosened: tuple[str, ...]


def candidates(structure: CallStructure) -> Iterator[Candidate]:
    """The formats of a structure, the tightest first: at each step, half of the tools that are left
    may be called with any object, those with the largest schemas first. Raises `RequestError` if a
    strict tool cannot be honored, or if strict tools alone are too large.
    """
    calls, is_loose = [], []
    for tool in structure.tools:
        schema, has_dropped = _schema_of(tool)
        calls.append(CallFormat(name=tool.name, schema=schema))
        is_loose.append(has_dropped)
    sizes = [len(_text(call.schema).encode()) for call in calls]
    order = [
        place
        for place in sorted(range(len(calls)), key=lambda place: (-sizes[place], place))
        if not structure.tools[place].is_strict and sizes[place] > len(_text(ANY_OBJECT))
    ]
    otherwise = None if structure.otherwise is None else format_of(structure.otherwise)
    num_any = 0
    while True:
        loose = {*order[:num_any]}
        chosen = [
            CallFormat(name=call.name, schema=ANY_OBJECT if place in loose else call.schema)
            for place, call in enumerate(calls)
        ]
        whole = _format(structure, chosen, otherwise)
        excess = len(source_of(whole).encode()) - MAX_SOURCE_BYTES
        if excess <= 0:
            names = [
                call.name for place, call in enumerate(calls) if is_loose[place] or place in loose
            ]
            yield Candidate(format=whole, loosened=tuple(names))
        if num_any == len(order):
            break
        if excess > 0:
            num_any += _num_to_free([sizes[place] for place in order[num_any:]], excess)
        else:
            num_any += (len(order) - num_any + 1) // 2
    if excess > 0:
        raise RequestError(
            f"structured_outputs: the schemas of the tools are {excess} bytes larger than the"
            f" {MAX_SOURCE_BYTES} that are possible; give fewer tools, or shorter schemas to those"
            " with strict",
            "tools",
        )


def _schema_of(tool: CallableTool) -> tuple[Any, bool]:
    """(a schema that is honored, whether it leaves out a part of the tool's)"""
    if tool.parameters is None:
        return ANY_OBJECT, False
    where = f"the parameters of {tool.name}"
    if tool.is_strict:
        schema, has_dropped = honored(tool.parameters, where), False
    else:
        schema, has_dropped = loosened(tool.parameters, where)
    # Arguments are an object, also where the schema says nothing.
    return (ANY_OBJECT if schema is True or schema == {} else schema), has_dropped


def _format(structure: CallStructure, calls: list[CallFormat], otherwise: Format | None) -> Format:
    if not structure.is_required:
        return calls_possible(calls, only_one=structure.only_one)
    required_calls = calls_required(calls, only_one=structure.only_one)
    return required_calls if otherwise is None else one_of([otherwise, required_calls])


def _num_to_free(sizes: list[int], excess: int) -> int:
    """How many of the largest schemas to replace to save so many bytes; all if that is too few."""
    for place, size in enumerate(sizes):
        excess -= size - len(_text(ANY_OBJECT))
        if excess <= 0:
            return place + 1
    return len(sizes)


def _text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
