"""What a chat request asks of the form of its answer: a format, calls of tools, or either."""

from __future__ import annotations

from urllib.parse import quote

from cluster.api.schema import ChatRequest, NamedTool, Tool
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
    names = [quote(name) for name in generations[0].loosened]
    shown, size = 0, 0
    while shown < len(names) and size + len(names[shown]) + 2 <= MAX_NAMES_BYTES:
        size += len(names[shown]) + 2
        shown += 1
    others = [f"and {len(names) - shown} more"] if shown < len(names) else []
    return {LOOSENED_HEADER: ", ".join(names[:shown] + others)} if names else {}


def structure_of(request: ChatRequest) -> StructuredOutputs | None:
    """Of a request whose tools may all be called. Raises `RequestError` if it cannot be met."""
    wanted, choice, tools = request.structure(), request.tool_choice, request.tools
    if not tools:
        if choice == "required" or isinstance(choice, NamedTool):
            raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
        return wanted
    only_one = request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            names = ", ".join(tool.function.name for tool in tools)
            raise RequestError(
                f"tool_choice names {choice.function.name!r}, which is not among the tools {names}",
                "tool_choice",
            )
        return CallStructure(tools=_callable(named[:1]), is_required=True, only_one=True)
    if choice == "required":
        return CallStructure(tools=_callable(tools), is_required=True, only_one=only_one)
    if wanted is not None:
        return CallStructure(
            tools=_callable(tools), is_required=True, only_one=only_one, otherwise=wanted
        )
    if only_one or any(tool.function.strict for tool in tools):
        return CallStructure(tools=_callable(tools), is_required=False, only_one=only_one)
    return None


def _callable(tools: list[Tool]) -> tuple[CallableTool, ...]:
    functions = [tool.function for tool in tools]
    return tuple(
        CallableTool(name=f.name, parameters=f.parameters, is_strict=bool(f.strict))
        for f in functions
    )
