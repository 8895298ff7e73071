"""LlamaIndex: chats and an agent with functions."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import KEY, MODEL, SUM, V1, equal, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

OPTIONS: dict[str, Any] = {"model": MODEL, "api_base": V1, "api_key": KEY, "max_retries": 0}
llm = OpenAILike(
    **OPTIONS, is_chat_model=True, is_function_calling_model=True, context_window=100_000
)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def stream() -> None:
    chunks = llm.stream_chat([ChatMessage(role="user", content="[[say It is 85.]]")])
    equal("".join(chunk.delta or "" for chunk in chunks), "It is 85.")


def tool() -> None:
    async def ask() -> str:
        return str(await FunctionAgent(tools=[add], llm=llm).run(SUM))

    equal(asyncio.run(ask()), "It is 85.")


def history() -> None:
    messages = [ChatMessage(role="user", content="[[say One.]]")]
    messages += [llm.chat(messages).message, ChatMessage(role="user", content="[[say Two.]]")]
    equal(llm.chat(messages).message.content, "Two.")


def completion() -> None:
    plain = OpenAILike(**OPTIONS, is_chat_model=False, max_tokens=8)
    assert plain.complete("One").text


run(stream, tool, history, completion)
