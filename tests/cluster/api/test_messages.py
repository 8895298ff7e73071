"""The Messages API with Anthropic's own client, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, Server, serve

USER: Any = {"role": "user", "content": "What is 47 + 38?"}
ADD: Any = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
THOUGHT = (
    "<think>\nhm\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>\nSo be it.'
)


def prompt_of(request: Request) -> str:
    return TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens])


PROMPTS: list[str] = []


def script(request: Request) -> str:
    PROMPTS.append(prompt_of(request))
    return THOUGHT if "<tools>" in PROMPTS[-1] else "It is 85."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script, step_s=0.002) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def test_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="tiny",
        max_tokens=50,
        messages=[USER],
        system="Be brief.",
        extra_body={"temperature": 0.5, "top_k": 5},
    )
    [block] = answer.content
    assert block.type == "text" and block.text == "It is 85."
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert answer.usage.output_tokens > 3 and answer.usage.cache_read_input_tokens == 1
    assert "Be brief." in PROMPTS[-1]


def test_limits_and_stop_sequences_are_named(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(
        model="tiny", max_tokens=50, messages=[USER], stop_sequences=["zz", " is"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].type == "text" and stopped.content[0].text == "It"


def test_thinking_text_and_calls_whole(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="tiny",
        max_tokens=2000,
        messages=[USER],
        tools=[ADD],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    thinking, text, call, more = answer.content
    assert thinking.type == "thinking" and thinking.thinking == "hm"
    assert text.type == "text" and text.text == "Sure."
    assert call.type == "tool_use" and (call.name, call.input) == ("add", {"a": 1})
    assert more.type == "text" and more.text == "So be it."
    assert answer.stop_reason == "tool_use" and call.id.startswith("toolu_")


def test_events_come_in_order_and_add_up(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 2000, "messages": [USER], "tools": [ADD]}
    names, open_block = [], None
    with client.messages.stream(**asked) as stream:
        event: Any
        for event in stream:
            raw = event.type
            if raw in ("text", "thinking", "input_json", "signature"):
                continue  # an event of the client's own
            names.append(raw)
            if raw == "content_block_start":
                assert open_block is None
                open_block = event.index
            elif raw == "content_block_delta":
                assert event.index == open_block
            elif raw == "content_block_stop":
                assert event.index == open_block
                open_block = None
        streamed = stream.get_final_message()
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    whole = client.messages.create(**asked)
    without = {"id"}
    assert [b.model_dump(exclude=without) for b in streamed.content] == [
        b.model_dump(exclude=without) for b in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_a_whole_conversation_reaches_the_template(client: anthropic.Anthropic) -> None:
    client.messages.create(
        model="tiny",
        max_tokens=20,
        system=[{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
        tools=[ADD],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I add.", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": "ä"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "85"},
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": True},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
    )
    prompt = PROMPTS[-1]
    parts = [
        *("Add.", "What is 47 + 38?", "I add.", "Let me see.", '"arguments": {"a": 1, "b": "ä"}'),
        *("<tool_response>\n85", "Error: ", "So?"),
    ]
    places = [prompt.find(part) for part in parts]
    assert places == sorted(places) and places[0] >= 0, prompt


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    short = client.messages.count_tokens(model="tiny", messages=[USER]).input_tokens
    more = client.messages.count_tokens(
        model="tiny", messages=[USER], tools=[ADD], system="Be brief."
    )
    answer = client.messages.create(model="tiny", max_tokens=5, messages=[USER])
    assert short == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert more.input_tokens > short


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"max_tokens": 0}, "max_tokens must be"),
        (
            {"messages": [{"role": "user", "content": "word " * 2000}]},
            "prompt is too long: the prompt has ",
        ),
        ({"tools": [{"name": "add"}]}, "tools.0.custom.input_schema"),
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools.0.custom.name"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "must be of role user"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "a name goes with type 'tool'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "blocks of the other role",
        ),
    ],
)
def test_errors_have_the_form_of_that_api(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER]} | fields
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


def test_clients_errors_are_its_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
        client.messages.create(model="other", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="tiny", max_tokens=-1, messages=[USER])
