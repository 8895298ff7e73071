"""What a chat asks of the form of its answer: a format, calls of tools, or either."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from cluster.api.schema import Function
from cluster.client.outputs import Generation
from cluster.grammar.calls import CallableTool, CallStructure
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs

LOOSENED_HEADER = "x-eagleray-loosened"
MAX_NAMES_BYTES = 4096  # in the header, before the number of the others


def loosened_headers(generations: list[Generation]) -> dict[str, str]:
    """The header that names the tools whose arguments need not match their schemas although calls
    follow a grammar; none if there are none. Names are escaped as in addresses.
    """
    names = [quote(name) for name in generations[0].loosened_tools]
    num_listed_names, num_bytes = 0, 0
    while (
        num_listed_names < len(names)
        and num_bytes + len(names[num_listed_names]) + 2 <= MAX_NAMES_BYTES
    ):
        num_bytes += len(names[num_listed_names]) + 2
        num_listed_names += 1
    others_note = (
        [f"and {len(names) - num_listed_names} more"] if num_listed_names < len(names) else []
    )
    return {LOOSENED_HEADER: ", ".join(names[:num_listed_names] + others_note)} if names else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which tools may be called; whether one must be, and which; whether at most one may be."""

    tools: Sequence[Function] = ()
    is_required: bool = False
    named_tool: str | None = None
    ends_after_one_call: bool = False


def call_rules(
    tools: Sequence[Function],
    choice: str | None,
    *,
    named_tool: str | None = None,
    allowed_names: Collection[str] | None = None,
    parallel_tool_calls: bool | None = None,
) -> CallRules:
    """`choice`: "none" for no call, "required" for at least one, anything else for either.
    `allowed_names`: the names of the tools that may be called, None for all. `parallel_tool_calls`:
    whether several calls are possible. Raises `RequestError` for an allowed name that no tool has.
    """
    if allowed_names is not None:
        names = [tool.name for tool in tools]
        if missing_names := sorted(set(allowed_names).difference(names)):
            raise RequestError(
                f"tool_choice allows {missing_names[0]!r}, which is not among the tools"
                f" {', '.join(names)}",
                "tool_choice",
            )
        tools = [tool for tool in tools if tool.name in allowed_names]
    return CallRules(
        tools=() if choice == "none" else tools,
        is_required=choice == "required" or named_tool is not None,
        named_tool=named_tool,
        ends_after_one_call=parallel_tool_calls is False,
    )


def structure_of(
    rules: CallRules, answer_structure: StructuredOutputs | None
) -> StructuredOutputs | None:
    """What the whole answer must match, calls included; `answer_structure`: one without calls.
    Raises `RequestError` for a call that must be made and that no tool allows.
    """
    tools, name = rules.tools, rules.named_tool
    if not tools:
        if rules.is_required:
            raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
        return answer_structure
    if name is not None:
        tools = [tool for tool in tools if tool.name == name][:1]
        if not tools:
            names = ", ".join(tool.name for tool in rules.tools)
            raise RequestError(
                f"tool_choice names {name!r}, which is not among the tools {names}", "tool_choice"
            )
    is_unconstrained = not (
        rules.is_required or rules.ends_after_one_call or any(tool.strict for tool in tools)
    )
    if answer_structure is None and is_unconstrained:
        return None
    return CallStructure(
        tools=tuple(
            CallableTool(name=tool.name, parameters=tool.parameters, is_strict=bool(tool.strict))
            for tool in tools
        ),
        excludes_free_text=rules.is_required or answer_structure is not None,
        ends_after_one_call=rules.ends_after_one_call or name is not None,
        no_call_structure=None if rules.is_required else answer_structure,
    )
