"""OpenAI's Responses API as an adapter over chats: a request becomes a chat request, and
`writer.py` writes the answer. Nothing is kept between requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster.api.endpoints import Job, Served, chat_job, chat_prompt
from cluster.api.omissions import Omissions
from cluster.api.replies import Writer
from cluster.api.responses.items import messages_of
from cluster.api.responses.schema import (
    AllowedTools,
    NamedTool,
    ResponseFormat,
    ResponsesRequest,
    SchemaFormat,
)
from cluster.api.responses.tools import ToolTable
from cluster.api.responses.writer import ResponseWriter
from cluster.api.schema import ChatRequest, Model
from cluster.client.outputs import Generation
from cluster.grammar.markers import state_after

# Fields that mean the same in both APIs.
_SAME = (
    *("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt"),
    "chat_template_kwargs",
)


def responses_job(request: ResponsesRequest, served: Served) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    omissions = Omissions(refuse=served.refuse_unknown)
    table = ToolTable(request.tools or [], omissions)
    chat = ChatRequest.model_validate(_chat(request, table, omissions))
    job = chat_job(chat, served)
    has_tools = bool(table.functions) and request.tool_choice != "none"

    def make_writer(generations: list[Generation]) -> Writer:
        [generation] = generations
        assert served.tokenizer is not None
        return ResponseWriter(
            _echo(request, table, job, served.name),
            generation,
            served.tokenizer,
            state=state_after(generation.prompt or ""),
            tools=table if has_tools else None,
            summarizes=request.reasoning is not None and request.reasoning.wants_summary,
            encrypts=request.encrypts_reasoning,
            logprobs=request.num_logprobs is not None,
        )

    return dataclasses.replace(job, make_writer=make_writer, ignored=omissions.names)


def count_input(request: ResponsesRequest, served: Served) -> dict[str, Any]:
    """The answer of `/v1/responses/input_tokens`."""
    omissions = Omissions(refuse=served.refuse_unknown)
    table = ToolTable(request.tools or [], omissions)
    chat = ChatRequest.model_validate(_chat(request, table, omissions))
    num_tokens = len(served.builder.encode(chat_prompt(chat, served)))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _chat(request: ResponsesRequest, table: ToolTable, omissions: Omissions) -> dict[str, Any]:
    """The fields of the chat."""
    chat = {name: getattr(request, name) for name in _SAME}
    messages = messages_of(request.input, omissions)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    chat["messages"] = messages
    chat["max_completion_tokens"] = request.max_output_tokens
    chat["tools"] = table.functions or None
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        chat["tool_choice"] = _named(choice)
    elif isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        chat["tool_choice"] = choice
    chat["response_format"] = _response_format(request)
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.num_logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": request.num_logprobs}
    return chat


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text is not None else None
    if isinstance(form, SchemaFormat):
        schema = form.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}
    return None if form is None else form.model_dump(by_alias=True)


def _echo_of_format(form: ResponseFormat | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    return form.model_dump(by_alias=True, exclude_unset=not isinstance(form, SchemaFormat))


def _echo(request: ResponsesRequest, table: ToolTable, job: Job, model: str) -> dict[str, Any]:
    """What an answer repeats of its request, with the defaults that were used. Of the tools, it has
    those that the model was offered."""
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    form = text.format if text is not None else None
    return {
        "model": model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": False,
        "temperature": job.params.temperature,
        "top_p": job.params.top_p,
        "text": {"format": _echo_of_format(form)},
        "tool_choice": choice.model_dump() if isinstance(choice, Model) else choice or "auto",
        "tools": [tool.model_dump() for tool in table.tools],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
    }
