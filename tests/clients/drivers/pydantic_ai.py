"""Pydantic AI: agents over chats, responses and messages."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, SUM, URL, V1, equal, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=V1, api_key=KEY)
chats = OpenAIChatModel(MODEL, provider=provider)


class Sum(BaseModel):
    """A sum."""

    sum: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def ask_with_tool(model: Any, settings: Any = None) -> list[Any]:
    """The parts of the answers in a conversation with a tool."""
    result = Agent(model, tools=[add], retries=0, model_settings=settings).run_sync(SUM)
    equal(result.output.strip(), "It is 85.")
    return [part for message in result.all_messages() for part in message.parts]


def stream() -> None:
    result = Agent(chats).run_stream_sync("[[say It is 85.]]")
    equal("".join(result.stream_text(delta=True)), "It is 85.")


def tool() -> None:
    ask_with_tool(chats)


def history() -> None:
    agent = Agent(chats)
    first = agent.run_sync("[[say One.]]")
    second = agent.run_sync("[[say Two.]]", message_history=first.all_messages())
    equal(second.output, "Two.")


def thinking() -> None:
    parts = ask_with_tool(chats, {"openai_reasoning_effort": "high"})
    assert any(part.part_kind == "thinking" for part in parts)


def objects() -> None:
    for output in (NativeOutput(Sum), ToolOutput(Sum, name="answer")):
        agent: Any = Agent(chats, output_type=output, retries=0)
        asked = '[[call answer {"sum": 85}]] [[say {"sum": 85}]]'
        equal(agent.run_sync(asked).output, Sum(sum=85))


def responses() -> None:
    ask_with_tool(OpenAIResponsesModel(MODEL, provider=provider))


def messages() -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    thinking = {"type": "enabled", "budget_tokens": 1024}
    parts = ask_with_tool(model, {"anthropic_thinking": thinking, "max_tokens": 4000})
    assert any(part.part_kind == "thinking" for part in parts)


run(stream, tool, history, thinking, objects, responses, messages)
