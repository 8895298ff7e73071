"""The OpenAI Agents SDK: agents over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MODEL, SUM, V1, equal, run
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

set_tracing_disabled(True)


class Sum(BaseModel):
    """A sum."""

    sum: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def ask(make_model: Any, asked: Any, **options: Any) -> Any:
    """The result of a streamed run."""

    async def stream() -> Any:
        client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
        agent = Agent(name="A", model=make_model(MODEL, openai_client=client), **options)
        result = Runner.run_streamed(agent, asked)
        kinds = {event.type async for event in result.stream_events()}
        assert "raw_response_event" in kinds
        return result

    return asyncio.run(stream())


def stream() -> None:
    equal(ask(OpenAIChatCompletionsModel, "[[say It is 85.]]").final_output, "It is 85.")


def tool() -> None:
    equal(ask(OpenAIChatCompletionsModel, SUM, tools=[add]).final_output, "It is 85.")


def history() -> None:
    first = ask(OpenAIChatCompletionsModel, SUM, tools=[add]).to_input_list()
    asked = [*first, {"role": "user", "content": "[[say Two.]]"}]
    equal(ask(OpenAIChatCompletionsModel, asked, tools=[add]).final_output, "Two.")


def thinking() -> None:
    settings = ModelSettings(reasoning=Reasoning(effort="high"), store=False)
    result = ask(OpenAIResponsesModel, SUM, tools=[add], model_settings=settings)
    equal(result.final_output, "It is 85.")
    assert any(item.type == "reasoning_item" for item in result.new_items)
    asked = [*result.to_input_list(), {"role": "user", "content": "[[say Two.]]"}]
    equal(ask(OpenAIResponsesModel, asked, model_settings=settings).final_output, "Two.")


def objects() -> None:
    for make_model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        result = ask(make_model, '[[say {"sum": 85}]]', output_type=Sum)
        equal(result.final_output, Sum(sum=85))


run(stream, tool, history, thinking, objects)
