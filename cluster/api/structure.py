"""What a chat request asks of the form of its answer: a format, calls of tools, or either."""

from __future__ import annotations

from cluster.api.schema import ChatRequest, NamedTool, Tool
from cluster.grammar.formats import (
    ToolFormat,
    calls_possible,
    calls_required,
    format_of,
    honored,
    one_of,
)
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs


def structure_of(request: ChatRequest, tools: list[Tool]) -> StructuredOutputs | None:
    """`tools`: those that may be called. Raises `RequestError` for requests that cannot be met."""
    wanted, choice = request.structure(), request.tool_choice
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
        calls = calls_required([tool_format(named[0])], only_one=True)
    elif choice == "required":
        calls = calls_required(map(tool_format, tools), only_one=only_one)
    elif wanted is not None:
        formats = map(tool_format, tools)
        calls = one_of([format_of(wanted), calls_required(formats, only_one=only_one)])
    elif only_one or any(tool.function.strict for tool in tools):
        calls = calls_possible(map(tool_format, tools), only_one=only_one)
    else:
        return None
    return StructuredOutputs(structural_tag=calls)


def tool_format(tool: Tool) -> ToolFormat:
    """Arguments of a strict tool match its schema, so an unsupported schema is refused. For other
    tools, an unsupported schema means that any object will do.
    """
    function = tool.function
    if function.parameters is None:
        return ToolFormat(name=function.name, schema=None)
    try:
        schema = honored(function.parameters, f"the parameters of {function.name}")
    except RequestError:
        if function.strict:
            raise
        schema = None
    return ToolFormat(name=function.name, schema=schema)
