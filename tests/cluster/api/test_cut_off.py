"""What ends an answer early: a limit of tokens in the middle of a call, and stop strings. The same
whole and streamed, in all APIs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cluster.api.schema import ChatMessage, FunctionCall, MessageCall
from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, Server, serve

USER: Any = {"role": "user", "content": "What is 47 + 38?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "one two", "b": [1, 2]}}\n</tool_call>'
TEXT = f"<think>\nFirst. Then.\n</think>\n\nSure, why not.\n{CALL}"


def script(request: Request) -> str:
    return TEXT


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script, step_s=0.0005) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def limit_at(text: str) -> int:
    """How many tokens the answer has up to the end of the first place of a text."""
    return len(TOKENIZER.encode(TEXT[: TEXT.index(text) + len(text)]))


LIMITS = [
    limit_at(text)
    for text in (
        '{"na',
        '"add',
        '"add"',
        '"arguments": ',
        '"one',
        '"b": [1',
        "]}",
        "}}",
        "</tool_c",
    )
]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_chat_that_is_cut_off_in_a_call_has_the_call_so_far(
    client: openai.OpenAI, limit: int
) -> None:
    wanted: Any = {
        "model": "tiny",
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": limit,
    }
    whole: Any = client.chat.completions.create(**wanted).choices[0]
    assert whole.finish_reason == "length"
    assert whole.message.content == "Sure, why not."
    calls = [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or []
    ]
    arguments = TEXT[TEXT.index('{"a"') : TEXT.index("}\n</tool")]
    assert [name for name, _ in calls] == ["add"] * (limit >= limit_at('"add"'))
    assert all(arguments.startswith(part) for _, part in calls)
    content, streamed, reason = "", [], None
    for chunk in client.chat.completions.create(**wanted, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            streamed.append((call.function.name, call.function.arguments))
        reason = choice.finish_reason or reason
    assert (content, streamed, reason) == (whole.message.content, calls, "length")


def test_the_arguments_are_those_that_came(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    answer: Any = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        tools=tools,
        max_tokens=limit_at('"one'),
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.arguments == '{"a": "one'


@pytest.mark.parametrize("limit", LIMITS)
def test_a_response_that_is_cut_off_in_a_call_has_the_call_so_far(
    client: openai.OpenAI, limit: int
) -> None:
    wanted: Any = {
        "model": "tiny",
        "input": "Hi",
        "tools": [{"type": "function", "strict": False} | FUNCTION],
        "max_output_tokens": limit,
    }
    whole = client.responses.create(**wanted)
    *_, last = client.responses.create(**wanted, stream=True)
    assert last.type == "response.incomplete" and whole.status == "incomplete"
    for response in (whole, last.response):
        assert response.output_text == "Sure, why not."
        calls = [item for item in response.output if item.type == "function_call"]
        assert len(calls) == (limit >= limit_at('"add"'))
        is_open = limit < limit_at("}}")
        assert all(call.status == "incomplete" for call in calls) or not is_open
    assert [item.arguments for item in whole.output if item.type == "function_call"] == [
        item.arguments for item in last.response.output if item.type == "function_call"
    ]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_message_that_is_cut_off_in_a_call_has_the_call_so_far(
    claude: anthropic.Anthropic, limit: int
) -> None:
    wanted: Any = {
        "model": "tiny",
        "messages": [USER],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "max_tokens": limit,
    }
    whole: Any = claude.messages.create(**wanted)
    with claude.messages.stream(**wanted) as stream:
        streamed: Any = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "max_tokens"
        assert [block.text for block in message.content if block.type == "text"] == [
            "Sure, why not."
        ]
    inputs = [
        [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        for message in (whole, streamed)
    ]
    assert inputs[0] == inputs[1]
    if limit == limit_at('"b": [1'):
        assert inputs[0] == [("add", {"a": "one two", "b": [1]})]
    assert len(inputs[0]) == (limit >= limit_at('"add"'))


def test_a_completion_is_text_as_it_comes(client: openai.OpenAI) -> None:
    limit = limit_at('"one')
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=limit)
    assert answer.choices[0].text.endswith('<tool_call>\n{"name": "add", "arguments": {"a": "one')


# Stop strings


def test_a_stop_string_does_not_end_the_reasoning_of_a_chat(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "tiny", "messages": [USER], "stop": ["."]}
    whole: Any = client.chat.completions.create(**wanted).choices[0]
    assert whole.finish_reason == "stop"
    assert (whole.message.content, whole.message.reasoning) == (
        "Sure, why not",
        "First. Then.",
    )
    content = ""
    for chunk in client.chat.completions.create(**wanted, stream=True):
        content += chunk.choices[0].delta.content or ""
    assert content == "Sure, why not"


def test_a_stop_sequence_does_not_end_the_thinking_of_a_message(
    claude: anthropic.Anthropic,
) -> None:
    answer: Any = claude.messages.create(
        model="tiny",
        messages=[USER],
        max_tokens=500,
        stop_sequences=["Then", "why"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Sure, "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "why")


@pytest.mark.parametrize(("stop", "calls"), [('dd"', []), ("two", [("add", '{"a": "one ')])])
def test_a_call_that_a_stop_string_cuts_off_is_no_text_and_not_to_be_carried_out(
    client: openai.OpenAI, claude: anthropic.Anthropic, stop: str, calls: list[Any]
) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    wanted: Any = {"model": "tiny", "messages": [USER], "tools": tools, "stop": stop}
    whole: Any = client.chat.completions.create(**wanted).choices[0]
    assert whole.message.content == "Sure, why not." and whole.finish_reason == "stop"
    made = [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or []
    ]
    assert made == calls
    content, streamed, reason = "", [], None
    for chunk in client.chat.completions.create(**wanted, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            streamed.append((call.function.name, call.function.arguments))
        reason = choice.finish_reason or reason
    assert (content, streamed, reason) == (whole.message.content, calls, "stop")
    functions: Any = [{"type": "function"} | FUNCTION]
    response: Any = client.responses.create(
        model="tiny", input="Hi", tools=functions, extra_body={"stop": stop}
    )
    assert response.output_text == "Sure, why not."
    items = [item for item in response.output if item.type == "function_call"]
    assert [(item.name, item.arguments, item.status) for item in items] == [
        (*call, "incomplete") for call in calls
    ]
    functions = [{"name": "add", "input_schema": SCHEMA}]
    message: Any = claude.messages.create(
        model="tiny", messages=[USER], tools=functions, max_tokens=500, stop_sequences=[stop]
    )
    assert message.stop_reason == "stop_sequence" and message.content[1].text == "Sure, why not."
    assert [block.type for block in message.content[2:]] == ["tool_use"] * len(calls)


def test_arguments_that_were_cut_off_may_come_back() -> None:
    call = MessageCall(function=FunctionCall(name="add", arguments='{"a": "one tw'))
    message = ChatMessage(role="assistant", tool_calls=[call])
    for arguments_as_text, arguments in ((False, {"a": "one tw"}), (True, '{"a": "one tw')):
        [shown] = message.for_template(arguments_as_text=arguments_as_text)["tool_calls"]
        assert shown["function"]["arguments"] == arguments


def test_a_stop_string_ends_a_completion_wherever_it_is(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hi", stop=".", max_tokens=500)
    assert answer.choices[0].text == "<think>\nFirst"


# Schemas that are not followed


def test_an_answer_names_the_tools_whose_schemas_are_not_followed(server: Server) -> None:
    odd = SCHEMA | {"properties": {"a": {"not": {}}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("fits", SCHEMA), ("odd", odd), ("größer", odd))
    ]
    for choice, stream in (("required", False), ("required", True), ("auto", False)):
        body = {"messages": [USER], "tools": tools, "tool_choice": choice, "stream": stream}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            content=json.dumps(body),
            timeout=60,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 200, answer.text
        named = answer.headers.get("x-eagleray-loosened")
        assert named == ("odd, gr%C3%B6%C3%9Fer" if choice == "required" else None)
