"""Anthropic's Messages API as an adapter over chats: a request becomes a chat request, and
`writer.py` writes the answer. Nothing is kept between requests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Seq
from typing import Any

from cluster.api.endpoints import Job, Served, chat_job, chat_prompt
from cluster.api.messages.schema import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from cluster.api.messages.writer import MessageWriter
from cluster.api.replies import Writer
from cluster.api.schema import ChatRequest
from cluster.client.outputs import Generation
from cluster.client.thinking import state_after
from scheduler.errors import RequestError


def messages_job(request: MessagesRequest, served: Served, max_messages: int) -> Job:
    """Raises `RequestError`, and `HttpError` for another model."""
    chat = _chat(request, served)
    chat |= {
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    job = chat_job(ChatRequest.model_validate(chat), served, max_messages)
    has_tools = bool(chat["tools"]) and chat["tool_choice"] != "none"

    def make_writer(generations: list[Generation]) -> Writer:
        state = state_after(generations[0].prompt or "")
        return MessageWriter(served.name, generations[0], state=state, tools=has_tools)

    return dataclasses.replace(job, make_writer=make_writer)


def count_tokens(request: CountTokensRequest, served: Served, max_messages: int) -> dict[str, Any]:
    """The answer of `/v1/messages/count_tokens`."""
    chat = ChatRequest.model_validate(_chat(request, served))
    prompt = chat_prompt(chat, served, max_messages)
    return {"input_tokens": len(served.builder.encode(prompt))}


def _chat(request: CountTokensRequest, served: Served) -> dict[str, Any]:
    """The parts of the prompt, as fields of a chat request."""
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "the last message must be of role user: continuing the beginning of an answer is not"
            " supported",
            "messages",
        )
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for message in request.messages:
        messages += _turns(message)
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(tool.model_dump()) for tool in request.tools or []] or None,
        "tool_choice": None,
    }
    choice = request.tool_choice
    if choice is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise RequestError("tool_choice: a name goes with type 'tool'", "tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        names = {"auto": "auto", "any": "required", "none": "none"}
        chat["tool_choice"] = names.get(choice.type, named)
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    tokenizer = served.tokenizer
    if thinks or (tokenizer is not None and "enable_thinking" in tokenizer.template_variables):
        chat["chat_template_kwargs"] = {"enable_thinking": thinks}
    return chat


def _turns(message: Message) -> list[dict[str, Any]]:
    """A message as messages of a chat; each tool result becomes a message of its own, before the
    rest.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, thoughts, calls = [], [], [], []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            results.append(_result(block))
    of_the_other = results if message.role == "assistant" else thoughts or calls
    if of_the_other:
        raise RequestError(
            f"a message of role {message.role} has blocks of the other role", "messages"
        )
    turn: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return results + ([turn] if texts or calls or thoughts or not results else [])


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["input_schema"],
        "strict": tool["strict"],
    }
    return {"type": "function", "function": function}


def _text(content: str | Seq[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
