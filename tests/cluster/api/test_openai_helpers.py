"""The helpers of the official openai client for chats, two turns each: the first answer goes back
as the helper made it, and reaches the template as if it had been written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, Server, serve

# The client's own: it serializes the `parsed` of its answers when they are sent back.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")

USER: Any = {"role": "user", "content": "What is 47 + 38?"}
THANKS: Any = {"role": "user", "content": "Thanks."}
CALL = '<tool_call>\n{"name": "Add", "arguments": {"a":  47, "b": 38}}\n</tool_call>'
SUM = '{"total":  85}'
THOUGHT = "<think>\nhm\n</think>\n\n"
prompts: list[str] = []  # as the template rendered them


def script(request: Request) -> str:
    prompt = TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens])
    prompts.append(prompt)
    return THOUGHT + (CALL if "<tools>" in prompt else SUM)


class Sum(BaseModel):
    total: int


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


TOOLS: Any = [openai.pydantic_function_tool(Add)]
ANSWER = {"role": "assistant", "content": SUM, "reasoning_content": "hm"}
CALL_BY_HAND = {
    "type": "function",
    "function": {"name": "Add", "arguments": '{"a":  47, "b": 38}'},
}
CALLED = {"role": "assistant", "reasoning_content": "hm"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def check_second_turn(client: openai.OpenAI, *forms: Any, tools: Any = openai.omit) -> None:
    """Send an answer back in some forms, and compare with one that is written by hand."""
    by_hand: Any = dict(ANSWER)
    last = THANKS
    if tools is not openai.omit:
        call_id = forms[-1]["tool_calls"][0]["id"]
        by_hand = CALLED | {"tool_calls": [CALL_BY_HAND | {"id": call_id}]}
        last = {"role": "tool", "tool_call_id": call_id, "content": SUM}
    rendered = set()
    for turn in (by_hand, *forms):
        client.chat.completions.create(model="tiny", messages=[USER, turn, last], tools=tools)
        rendered.add(prompts[-1])
    [prompt] = rendered
    assert ('{"a":  47, "b": 38}' if tools is not openai.omit else SUM) in prompt


def forms_of(message: BaseModel) -> list[Any]:
    """A message as programs send it back."""
    return [message, message.model_dump(exclude_none=True), message.model_dump()]


def test_parse_with_a_model_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=[USER], response_format=Sum)
    message: Any = answer.choices[0].message
    assert message.parsed == Sum(total=85)
    check_second_turn(client, *forms_of(message))
    again = client.chat.completions.parse(
        model="tiny", messages=[USER, message, THANKS], response_format=Sum
    )
    assert again.choices[0].message.parsed == Sum(total=85)


def test_parse_with_a_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=[USER], tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Add(a=47, b=38)
    check_second_turn(client, *forms_of(message), tools=TOOLS)


def test_stream_with_a_model_of_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny",
        messages=[USER],
        response_format=Sum,
        stream_options={"include_usage": True},
    ) as stream:
        events = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= events
    assert message.parsed == Sum(total=85)
    check_second_turn(client, *forms_of(message))


def test_stream_with_a_tool(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS) as stream:
        events = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in events
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Add(a=47, b=38)
    check_second_turn(client, *forms_of(message), tools=TOOLS)


def merge(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Put deltas together as many programs do: texts are joined, lists are joined by `index`."""
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value or ():
                calls = whole.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"index": part["index"]})
                merge(calls[part["index"]], part)
        elif isinstance(value, dict):
            merge(whole.setdefault(name, {}), value)
        elif isinstance(value, str) and name not in ("id", "type", "role"):
            whole[name] = (whole.get(name) or "") + value
        else:
            whole.setdefault(name, value)


@pytest.mark.parametrize("tools", [openai.omit, TOOLS], ids=["text", "tool"])
def test_deltas_that_a_program_puts_together_itself(client: openai.OpenAI, tools: Any) -> None:
    whole: dict[str, Any] = {}
    chunks = client.chat.completions.create(model="tiny", messages=[USER], tools=tools, stream=True)
    for chunk in chunks:
        merge(whole, chunk.choices[0].delta.model_dump())
    check_second_turn(client, whole, tools=tools)
