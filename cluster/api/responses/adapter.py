"""OpenAI's Responses API as an adapter over chats: a request becomes a chat request, and
`writer.py` writes the answer. Nothing is kept between requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cluster.api.endpoints import Job, Served, chat_job
from cluster.api.replies import Writer
from cluster.api.responses.schema import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputText,
    MessageItem,
    NamedFunction,
    OutputText,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)
from cluster.api.responses.writer import ResponseWriter
from cluster.api.schema import ChatRequest
from cluster.client.outputs import Generation
from cluster.client.thinking import state_after
from scheduler.errors import RequestError

# Fields that mean the same in both APIs.
_SAME = (
    *("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "cache_salt"),
    "chat_template_kwargs",
)


def responses_job(request: ResponsesRequest, served: Served, max_messages: int) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    job = chat_job(ChatRequest.model_validate(_chat(request)), served, max_messages)
    has_tools = bool(request.tools) and request.tool_choice != "none"

    def make_writer(generations: list[Generation]) -> Writer:
        [generation] = generations
        assert served.tokenizer is not None
        return ResponseWriter(
            _echo(request, job, served.name),
            generation,
            served.tokenizer,
            state=state_after(generation.prompt or ""),
            tools=has_tools,
        )

    return dataclasses.replace(job, make_writer=make_writer)


def _chat(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of the chat."""
    chat = {name: getattr(request, name) for name in _SAME}
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    chat["messages"] = messages + _messages(request)
    chat["max_completion_tokens"] = request.max_output_tokens
    chat["tools"] = [_tool(tool) for tool in request.tools or []] or None
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chat["tool_choice"] = choice
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    form = request.text.format if request.text is not None else None
    if isinstance(form, SchemaFormat):
        schema = form.model_dump(by_alias=True, exclude={"type"})
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        chat["response_format"] = {"type": form.type}
    return chat


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as messages of a chat. Consecutive reasoning, text and calls become one message of
    the assistant.
    """
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message, while more may belong to it
    for item in request.input:
        if isinstance(item, CallOutputItem):
            output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(output)
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            turn = None
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    if not messages or messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last item must be a user's message or the output of a call: continuing the"
            " beginning of an answer is not supported",
            "input",
        )
    return messages


def _add(turn: dict[str, Any], item: MessageItem | ReasoningItem | CallItem) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = "\n".join(filter(None, [turn["content"], _text(item.content)]))
    elif isinstance(item, ReasoningItem):
        texts = [turn.get("reasoning_content"), *(part.text for part in item.content or [])]
        if any(texts):
            turn["reasoning_content"] = "\n".join(filter(None, texts))
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _text(content: str | list[InputText] | list[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}


def _echo(request: ResponsesRequest, job: Job, model: str) -> dict[str, Any]:
    """What an answer repeats of its request, with the defaults that were used."""
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    form = text.format if text is not None else None
    return {
        "model": model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "temperature": job.params.temperature,
        "top_p": job.params.top_p,
        "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
        "tool_choice": choice.model_dump()
        if isinstance(choice, NamedFunction)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or []],
        "truncation": "disabled",
        "background": False,
    }
