"""Anthropic's Messages API as an adapter over chats: a request becomes a chat request, and
`writer.py` writes the answer. Nothing is kept between requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.api.endpoints import Job, Served, chat_job, chat_prompt
from cluster.api.messages.blocks import text_of, turns_of
from cluster.api.messages.schema import (
    AnyTool,
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    TextBlock,
    ToolChoice,
)
from cluster.api.messages.writer import MessageWriter
from cluster.api.omissions import Omissions
from cluster.api.replies import Writer
from cluster.api.schema import ChatRequest
from cluster.client.outputs import Generation
from cluster.grammar.markers import THINKING_SWITCH, state_after
from scheduler.errors import RequestError

# The line with which Claude Code begins its system prompt. It differs between sessions, so that
# nothing behind it would be cached for the next one.
BILLING_HEADER = "x-anthropic-billing-header:"


def messages_job(request: MessagesRequest, served: Served) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    omissions = Omissions(refuse=served.refuse_unknown)
    chat = _chat(request, served, omissions)
    chat |= {
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    job = chat_job(ChatRequest.model_validate(chat), served)
    has_tools = bool(chat["tools"]) and chat["tool_choice"] != "none"

    def make_writer(generations: list[Generation]) -> Writer:
        state = state_after(generations[0].prompt or "")
        return MessageWriter(served.name, generations[0], state=state, tools=has_tools)

    return dataclasses.replace(job, make_writer=make_writer, ignored=omissions.names)


def count_tokens(request: CountTokensRequest, served: Served) -> dict[str, Any]:
    """The answer of `/v1/messages/count_tokens`."""
    chat = ChatRequest.model_validate(
        _chat(request, served, Omissions(refuse=served.refuse_unknown))
    )
    prompt = chat_prompt(chat, served)
    return {"input_tokens": len(served.builder.encode(prompt))}


def _chat(request: CountTokensRequest, served: Served, omissions: Omissions) -> dict[str, Any]:
    """The parts of the prompt, as fields of a chat request."""
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "the last message must be of role user: continuing the beginning of an answer is not"
            " supported",
            "messages",
        )
    for name in ("container", "mcp_servers"):
        if getattr(request, name):
            omissions.add(name)
    system = _system(request.system or "", served.keep_billing_header)
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "model": request.model,
        "messages": [*messages, *turns_of(request.messages, omissions)],
        "tools": _tools(request.tools or [], omissions) or None,
        "response_format": _response_format(request),
        **_choice(request.tool_choice),
        **_variables(request, served),
    }


def _system(content: str | Sequence[TextBlock], keep_billing_header: bool) -> str:
    """The system prompt, by default without a first line about billing."""
    text = text_of(content)
    if keep_billing_header or not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2]


def _tools(tools: Sequence[AnyTool], omissions: Omissions) -> list[dict[str, Any]]:
    """The tools that have a schema; others are known to models of Anthropic's only, or would have
    to be run here.
    """
    functions = []
    for tool in tools:
        if isinstance(tool, CustomTool):
            function: dict[str, Any] = {"name": tool.name, "description": tool.description}
            function |= {"parameters": tool.input_schema, "strict": tool.strict}
            functions.append({"type": "function", "function": function})
        else:
            omissions.add(f"tools.{tool.type}")
    return functions


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {"tool_choice": None}
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice: a name goes with type 'tool'", "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    names = {"auto": "auto", "any": "required", "none": "none"}
    fields: dict[str, Any] = {"tool_choice": names.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    form = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        if form is not None:
            raise RequestError("give either output_config.format or output_format", "output_config")
        form = request.output_config.format
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}


def _variables(request: CountTokensRequest, served: Served) -> dict[str, Any]:
    """Whether the model thinks, for templates that can switch it. `thinking` decides; without it,
    an effort other than `none` asks for it.
    """
    tokenizer = served.tokenizer
    if tokenizer is None or THINKING_SWITCH not in tokenizer.template_variables:
        return {}
    effort = request.output_config.effort if request.output_config is not None else None
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
    else:
        thinks = effort not in (None, "none")
    return {"chat_template_kwargs": {THINKING_SWITCH: thinks}}
