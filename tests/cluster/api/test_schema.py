"""Every field that OpenAI documents is honored, known to have no effect, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from cluster.api.fields import FIELDS_WITHOUT_EFFECT, REFUSED_FIELDS
from cluster.api.reading import read_request
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)
from scheduler.errors import RequestError

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES}


def body(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields).encode()


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, response_params.ResponseCreateParamsStreaming),
    ],
)
def test_each_field_that_the_installed_openai_sends_is_in_one_list(
    model: type[RequestModel], params: Any
) -> None:
    fields: set[str] = set()
    for each in params.__mro__[:-1] + params.__orig_bases__:
        fields |= set(getattr(each, "__annotations__", {}))
    assert {"model", "stream", "temperature"} <= fields
    lists = [set(model.model_fields), set(model.FIELDS_WITHOUT_EFFECT), set(model.REFUSED_FIELDS)]
    for field in sorted(fields):
        assert sum(field in each for each in lists) == 1, f"{field} is in no list, or in several"


@pytest.mark.parametrize("field", FIELDS_WITHOUT_EFFECT)
def test_a_field_without_effect_is_accepted_while_it_asks_for_nothing(field: str) -> None:
    assert read_request(ChatRequest, body(**{field: None})) == read_request(ChatRequest, body())
    nothing = {
        "store": False,
        "modalities": ["text"],
        "best_of": 1,
        "suffix": "",
    }
    read_request(ChatRequest, body(**{field: nothing.get(field, "anything")}))
    if field in nothing:
        with pytest.raises(RequestError, match=f"^{field}: ") as refused:
            read_request(ChatRequest, body(**{field: {"something": "else"}}))
        assert refused.value.parameter == field


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_what_is_not_done_here_is_refused_by_name(field: str) -> None:
    read_request(ChatRequest, body(**{field: None}))
    with pytest.raises(RequestError, match=f"^{field}: ") as refused:
        read_request(ChatRequest, body(**{field: {}}))
    assert refused.value.parameter == field


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"guided_json": {}}, "guided_json", "guided_json: this constraint would not be kept"),
        ({"temperature": "1"}, "temperature", "temperature: .*valid number; got '1'"),
        ({"n": 1.5}, "n", "n: .*integer"),
        ({"stream": 1}, "stream", "stream: .*boolean"),
        ({"messages": []}, "messages", "messages: .*at least 1 item"),
        ({"messages": [{"role": "thief", "content": ""}]}, "messages", "messages.0.role: "),
        ({"messages": [{"role": "user", "content": 1}]}, "messages", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "messages.0.content",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function: Field required"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools",
            "tools.0.function.strict",
        ),
        ({"tool_choice": "always"}, "tool_choice", "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format: .*json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "response_format.json_schema.json_schema.name: Field required",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "reasoning_effort: "),
    ],
)
def test_a_wrong_field_is_named_and_shown(
    fields: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        read_request(ChatRequest, body(**fields))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": {}}]},
            "input.0.output",
        ),
        ({"input": [{"role": "tool", "content": "Hi"}]}, "input.0.role"),
    ],
)
def test_the_path_of_a_wrong_field_of_a_response_is_that_of_the_request(
    fields: dict[str, Any], path: str
) -> None:
    """Without the kind that follows from the type, which may be the name of a field."""
    with pytest.raises(RequestError, match=f"^{path}: "):
        read_request(ResponsesRequest, json.dumps({"input": "Hi"} | fields).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [' + b"[" * 5000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        with pytest.raises(RequestError):
            read_request(model, data)


def test_a_message_reaches_the_template_in_its_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "2", "name": "f"},
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": []},
    ]
    request = read_request(ChatRequest, body(messages=messages))
    system, user, assistant, tool, last = (
        message.for_template(arguments_as_text=True) for message in request.messages
    )
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "a\nb"}
    assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"] == [call]
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    assert last == {"role": "assistant", "content": "x"}
    as_object = request.messages[2].for_template(arguments_as_text=False)
    assert as_object["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_message_without_content_and_calls_is_refused() -> None:
    request = read_request(ChatRequest, body(messages=[{"role": "user"}]))
    with pytest.raises(RequestError, match="a message of role user needs content"):
        request.messages[0].for_template(arguments_as_text=True)
