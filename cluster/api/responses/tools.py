"""The tools of a response's request as functions of a chat, and calls of them as items.

A function in a namespace is offered as `namespace.name`, and a custom tool, which takes text, as a
function with one argument. An item of a call says both again as the request did.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from cluster.api.omissions import Omissions
from cluster.api.parser import ToolCall
from cluster.api.responses.schema import CustomTool, FunctionTool, NamespaceTool, OtherTool, Tool
from cluster.api.schema import Function
from scheduler.bounds import check_bound

_TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfferedTool:
    name: str  # without the namespace
    namespace: str | None
    is_custom: bool


class ToolTable:
    """functions: what the model may be offered, as tools of a chat. tools: the same, as given."""

    def __init__(self, tools: Sequence[Tool], omissions: Omissions) -> None:
        """Raises `RequestError` for too many tools, too long a name, and as `Omissions.add`."""
        self.functions: list[Function] = []
        self.tools: list[Tool] = []
        self._offered_tools: dict[str, _OfferedTool] = {}  # by full name
        for tool in tools:
            if isinstance(tool, OtherTool):
                omissions.add(f"tools.{tool.type}")
                continue
            if isinstance(tool, NamespaceTool):
                self._add_namespace(tool, omissions)
            else:
                self.tools.append(tool)
                self._add(tool, None, tool.description)
        check_bound("tools", len(self.functions), "tools")

    def _add_namespace(self, namespace: NamespaceTool, omissions: Omissions) -> None:
        """Its description stands before that of the first tool in it."""
        kept_tools = []
        intro = namespace.description
        for tool in namespace.tools:
            if isinstance(tool, OtherTool):
                omissions.add(f"tools.{tool.type}")
                continue
            kept_tools.append(tool)
            self._add(tool, namespace.name, "\n".join(filter(None, [intro, tool.description])))
            intro = None
        self.tools.append(namespace.model_copy(update={"tools": kept_tools}))

    def _add(
        self, tool: FunctionTool | CustomTool, namespace: str | None, description: str | None
    ) -> None:
        name = full_name(tool.name, namespace)
        check_bound("name", len(name), "tools")
        if isinstance(tool, FunctionTool):
            function = tool.model_dump(exclude={"type"}, exclude_unset=True)
        else:
            function = {"parameters": _TEXT_PARAMETERS}
            description = _description_with_grammar(tool, description)
        function |= {"name": name} | ({} if description is None else {"description": description})
        self.functions.append(Function.model_construct(**function))
        is_custom = isinstance(tool, CustomTool)
        self._offered_tools[name] = _OfferedTool(
            name=tool.name, namespace=namespace, is_custom=is_custom
        )

    def item_of(self, call: ToolCall) -> dict[str, Any]:
        """The item of a call that the model has made."""
        offered_tool = self._offered_tools.get(call.name)
        item: dict[str, Any] = {
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "status": "completed" if call.is_complete else "incomplete",
        }
        if offered_tool is not None and offered_tool.is_custom:
            item |= {"type": "custom_tool_call", "id": f"ctc_{uuid.uuid4().hex}"}
            item |= {"name": offered_tool.name, "input": _input_text(call.arguments)}
        else:
            item |= {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}"}
            item |= {
                "name": offered_tool.name if offered_tool else call.name,
                "arguments": call.arguments,
            }
        if offered_tool is not None and offered_tool.namespace is not None:
            item["namespace"] = offered_tool.namespace
        return item


def full_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def custom_tool_arguments(text: str) -> str:
    """The arguments with which the model calls a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _description_with_grammar(tool: CustomTool, description: str | None) -> str:
    """The description with the form of the text."""
    lines = [description, "The text is the argument `input`."]
    if tool.format is not None and tool.format.definition is not None:
        lines += [f"It must match this grammar ({tool.format.syntax}):", tool.format.definition]
    return "\n".join(filter(None, lines))


def _input_text(arguments: str) -> str:
    """The text for a custom tool, as far as it goes in a call that was cut off; all of the
    arguments if they are not what was asked for.
    """
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
