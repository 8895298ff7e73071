"""Values that OpenAI documents are accepted, or refused with a reason."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from cluster.api.chats import rules_of
from cluster.api.reading import read_request
from cluster.api.schema import ChatRequest, CompletionRequest, RequestModel
from scheduler.errors import RequestError
from tests.cluster.api.scripted import Server, serve

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
COMPLETION: dict[str, Any] = {"prompt": "Hi"}
LEAST = {ChatRequest: CHAT, CompletionRequest: COMPLETION}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


COMMON = [
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 0},
    {"top_p": 1},
    {"presence_penalty": -2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2},
    {"n": 1},
    {"n": 128},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"seed": -1, "n": 2},
    {"logit_bias": {"5": -100, "6": 100, "7": 0.5}},
    {"logit_bias": {}},
    {"stop": None},
    {"stop": []},
    {"stop": ["a", "b", "c", "d"]},
    {"stream_options": None},
    {"max_tokens": 1},
    {"user": ""},
]


@pytest.mark.parametrize("fields", COMMON, ids=str)
@pytest.mark.parametrize(
    ("path", "least"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_the_ends_of_documented_ranges_are_possible(
    server: Server, path: str, least: dict[str, Any], fields: dict[str, Any]
) -> None:
    answer = httpx.post(server.url + path, json=least | {"max_tokens": 2} | fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": None, "top_logprobs": None},
        {"max_completion_tokens": 1},
        {"reasoning_effort": None},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
    ],
    ids=str,
)
def test_documented_values_of_chats_are_possible(server: Server, fields: dict[str, Any]) -> None:
    body = CHAT | {"max_tokens": 2} | fields
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"logprobs": 5}, {"echo": False}], ids=str)
def test_documented_values_of_completions_are_possible(
    server: Server, fields: dict[str, Any]
) -> None:
    body = COMPLETION | {"max_tokens": 2} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def literals_of(annotation: Any) -> Iterator[Any]:
    """The values of all literals that are alternatives of an annotation."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is typing.Union or get_origin(annotation) is typing.Required:
        for alternative in get_args(annotation):
            yield from literals_of(alternative)


# What is refused, as the table of fields says.
REFUSED_VALUES = {("function_call", "none"), ("function_call", "auto")}


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsNonStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsNonStreaming),
    ],
)
def test_every_word_that_the_installed_openai_documents_is_possible(
    model: type[RequestModel], params: Any
) -> None:
    num_words = 0
    for name, annotation in typing.get_type_hints(params).items():
        for word in literals_of(annotation):
            if name == "model" or (name, word) in REFUSED_VALUES:
                continue
            num_words += 1
            fields = LEAST[model] | {name: word}
            if name == "tool_choice":
                fields |= {"tools": [{"type": "function", "function": {"name": "f"}}]}
            read_request(model, json.dumps(fields).encode())
    assert num_words > 0


def content_of(message: dict[str, Any]) -> Any:
    """What the template gets of the first message."""
    [first, *_] = read_request(
        ChatRequest, json.dumps({"messages": [message, USER]}).encode()
    ).messages
    return first.for_template(arguments_as_text=True)["content"]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant", "content": None, "tool_calls": None}, ""),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "content": None, "reasoning_content": "hm"}, ""),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": "", "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": "Yes.", "refusal": None}, "Yes."),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
            "I cannot.",
        ),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}, "Yes."),
        ({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, "Hi"),
        ({"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}, "Hi"),
        ({"role": "user", "content": []}, ""),
        ({"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, "Be brief."),
        ({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]}, "4"),
        ({"role": "tool", "tool_call_id": "1", "content": None}, ""),
        ({"role": "user", "content": "Hi", "name": None}, "Hi"),
    ],
    ids=str,
)
def test_content_comes_in_every_form_that_clients_send(
    message: dict[str, Any], content: str
) -> None:
    assert content_of(message) == content


SENT_BACK: dict[str, Any] = {
    "parsed": {"a": 1},
    "annotations": [],
    "audio": None,
    "function_call": None,
    "refusal": None,
    "provider_specific_fields": {"refusal": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}],
    "reasoning_details": [],
    "token_ids": None,
    "index": 0,
    "cache_control": {"type": "ephemeral"},
    "images": [],
}


def test_what_any_server_gave_may_be_sent_back() -> None:
    added: dict[str, Any] = {"index": 0, "cache_control": None, "provider_specific_fields": {}}
    call: dict[str, Any] = CALL | added
    call["function"] = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    part = {"type": "text", "text": "Yes.", "annotations": [], "cache_control": {}, "index": 0}
    sent = {"role": "assistant", "content": [part], "tool_calls": [call]} | SENT_BACK
    plain_call = CALL | {"function": {"name": "f", "arguments": '{"a": 1}'}}
    plain = {"role": "assistant", "content": "Yes.", "tool_calls": [plain_call]}
    messages = [
        read_request(ChatRequest, json.dumps({"messages": [message]}).encode()).messages[0]
        for message in (sent, plain)
    ]
    forms = [message.for_template(arguments_as_text=True) for message in messages]
    assert forms[0] == forms[1]


def test_a_call_without_arguments_has_an_empty_object_for_templates_that_take_objects() -> None:
    body = {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
    [message] = read_request(ChatRequest, json.dumps(body).encode()).messages
    [call] = message.for_template(arguments_as_text=False)["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "input_image", "video_url"])
def test_parts_that_are_not_text_are_refused_by_their_kind(kind: str) -> None:
    message = USER | {"content": [{"type": kind, kind: {}}]}
    with pytest.raises(RequestError, match=rf"messages.0.content.*{kind}.*'text'") as refused:
        read_request(ChatRequest, json.dumps({"messages": [message]}).encode())
    assert refused.value.parameter == "messages"


def test_a_schema_of_a_format_may_be_left_out() -> None:
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}
    structure = read_request(ChatRequest, json.dumps(body).encode()).structure()
    assert structure is not None and structure.json_object


def tools_of(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools_of(*names)}}
    return CHAT | {"tools": tools_of("add", "sub", "mul"), "tool_choice": choice}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_offered(mode: str) -> None:
    request = read_request(ChatRequest, json.dumps(allowed(mode, "mul", "add")).encode())
    plain = CHAT | {"tools": tools_of("add", "mul"), "tool_choice": mode}
    assert rules_of(request) == rules_of(read_request(ChatRequest, json.dumps(plain).encode()))


def test_an_allowed_tool_that_is_no_tool_is_refused(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    assert httpx.post(url, json=allowed("auto", "add") | {"max_tokens": 2}).status_code == 200
    answer = httpx.post(url, json=allowed("auto", "add", "div"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tool_choice"
    assert error["message"].startswith("tool_choice allows 'div', which is not among the tools add")
