"""Unknown fields are ignored and named; misspelled ones, and those that change the answer, are
refused.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from cluster.api.errors import HttpError, anthropic_error_body, openai_error_body
from cluster.api.fields import (
    FIELD_SYNONYMS,
    FIELDS_REFUSED_EVERYWHERE,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
)
from cluster.api.messages.schema import MessagesRequest
from cluster.api.reading import read_request
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import ChatRequest, CompletionRequest, RequestModel
from cluster.api.unknown import (
    IGNORED_HEADER,
    MAX_HEADER_LENGTH,
    MAX_LOGGED_NAMES,
    IgnoredFields,
    UnknownFields,
    header_of,
    meant_field,
)
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs
from tests.cluster.api.scripted import Server, serve

USER = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
LEAST: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: CHAT,
    CompletionRequest: {"prompt": "Hi"},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: CHAT | {"max_tokens": 5},
}


def ignored(
    fields: dict[str, Any], model: type[RequestModel] = ChatRequest, *, refuse: bool = False
) -> list[str]:
    """The names that are ignored in a request with these fields."""
    unknown_fields = UnknownFields(refuse=refuse)
    request = read_request(
        model, json.dumps(LEAST[model] | fields).encode(), unknown_fields=unknown_fields
    )
    if not fields.keys() & {"tools", "stream_options", "response_format"}:
        assert request == read_request(model, json.dumps(LEAST[model]).encode())
    return list(unknown_fields.names)


@pytest.mark.parametrize("model", LEAST, ids=lambda model: model.__name__)
def test_a_field_that_nobody_knows_is_ignored_and_named(model: type[RequestModel]) -> None:
    assert ignored({"next_years_field": {"a": [1]}, "x": 0}, model) == ["next_years_field", "x"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("temprature", "temperature"),
        ("temparature", "temperature"),
        ("temperatrue", "temperature"),
        ("temperture", "temperature"),
        ("temp_erature", "temperature"),
        ("top-p", "top_p"),
        ("topP", "top_p"),
        ("topk", "top_k"),
        ("top.k", "top_k"),
        ("stops", "stop"),
        ("tool", "tools"),
        ("toolChoice", "tool_choice"),
        ("presense_penalty", "presence_penalty"),
        ("freqency_penalty", "frequency_penalty"),
        ("repitition_penalty", "repetition_penalty"),
        ("repition_penalty", "repetition_penalty"),
        ("response_fromat", "response_format"),
        ("responseFormat", "response_format"),
        ("structured_output", "structured_outputs"),
        ("reasoning_efort", "reasoning_effort"),
        ("steam", "stream"),
        ("stoop", None),
        ("streem", "stream"),
        ("top_logprob", "top_logprobs"),
        ("max_completion_token", "max_completion_tokens"),
        ("chat_template_kwarg", "chat_template_kwargs"),
    ],
)
def test_a_misspelled_field_is_refused_with_the_one_that_is_meant(
    name: str, meant: str | None
) -> None:
    if meant is None:  # too short to be told from another word
        assert ignored({name: 1}) == [name]
        return
    with pytest.raises(RequestError, match=re.escape(f"did you mean {meant!r}?")) as refused:
        ignored({name: 1})
    assert refused.value.parameter == name
    assert ignored({name: None}) == []


@pytest.mark.parametrize("model", LEAST, ids=lambda model: model.__name__)
def test_a_field_that_clients_are_known_to_send_is_never_taken_for_a_misspelling(
    model: type[RequestModel],
) -> None:
    for name in IGNORED_FIELDS:
        is_field_of_ours = name in model.field_names() or "." in name
        if (
            not is_field_of_ours
            and not {name} & (model.refused_fields() | model.fields_without_effect()).keys()
        ):
            assert ignored({name: 1}, model) == [name]


def test_the_table_of_harmless_fields_wins_over_the_resemblance() -> None:
    assert meant_field("models", ChatRequest.field_names()) == "model"
    assert ignored({"models": ["a", "b"]}) == ["models"]


def test_known_fields_do_not_look_like_each_other() -> None:
    for model in LEAST:
        for name in model.field_names():
            others = model.field_names() - {name}
            if (other := meant_field(name, others)) is not None:
                assert {name, other} == {"min_tokens", "max_tokens"}


@pytest.mark.parametrize("name", FIELDS_REFUSED_EVERYWHERE)
def test_what_would_change_the_answer_is_refused_in_every_api(name: str) -> None:
    for model in LEAST:
        if name in model.field_names():
            continue
        nothing: Any
        neutral = NEUTRAL_VALUES.get(name)
        for nothing in (None, False, "", [], neutral):
            assert ignored({name: nothing}, model) == []
        for something in ({}, {"a": 1}, "a", ["a"], 2, 1, True):
            if something == neutral:
                continue
            with pytest.raises((RequestError, HttpError), match=f"^{name}: ") as refused:
                ignored({name: something}, model)
            assert openai_error_body(refused.value)["error"]["param"] == name


@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [
        ("response_format", {}, {"type": "json_object"}),
        ("structured_outputs", {}, {"regex": "a"}),
        ("text", {"verbosity": "low"}, {"format": {"type": "json_object"}}),
        ("output_config", {"effort": "low"}, {"format": {"type": "json_schema"}}),
        ("tools", [], [{}]),
        ("tool_choice", "auto", "required"),
        ("parallel_tool_calls", True, False),
        ("n", 1, 2),
        ("echo", False, True),
        ("logprobs", 0, 3),
        ("prompt_logprobs", False, 0),
        ("return_token_ids", False, True),
        ("logit_bias", {}, {"5": 1}),
        ("min_tokens", 0, 1),
        ("cache_salt", "", "mine"),
        ("chat_template_kwargs", {}, {"a": 1}),
    ],
)
def test_what_only_other_paths_honor_is_refused_unless_it_asks_for_nothing(
    name: str, nothing: object, something: object
) -> None:
    refusing = [model for model in LEAST if name not in model.field_names()]
    assert refusing
    for model in refusing:
        assert ignored({name: nothing}, model) == []
        with pytest.raises(RequestError, match=f"^{name}: ") as refused:
            ignored({name: something}, model)
        assert refused.value.parameter == name


HARMLESS_ELSEWHERE = {
    *("add_generation_prompt", "ignore_eos", "min_p", "seed", "stream", "stream_interval"),
    *("stream_options", "top_k", "top_p", "temperature", "suffix", "best_of"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("enable_thinking", "reasoning_effort", "reasoning", "thinking", "background", "include"),
    *("max_tool_calls", "truncation", "access_programs", "background_options"),
    *(
        "context_management",
        "image",
        "metadata",
        "store",
        "client_metadata",
        "diagnostics",
        "speed",
    ),
    *("user_profile_id", "cache_control", "inference_geo", "betas"),
}


def test_each_field_that_changes_answers_of_a_path_is_known_in_the_others() -> None:
    for model in LEAST:
        for other in LEAST:
            fates = (
                other.field_names(),
                other.fields_without_effect(),
                other.refused_fields(),
                FIELD_SYNONYMS,
            )
            conditional = {
                name for name, (_, advice) in model.FIELDS_WITHOUT_EFFECT.items() if advice
            }
            for name in model.field_names() | conditional | model.REFUSED_FIELDS.keys():
                known = any(name in fate for fate in fates)
                assert known or name in HARMLESS_ELSEWHERE, f"{name} of {model} in {other}"


def test_a_thread_is_refused_with_the_code_after_which_clients_send_everything() -> None:
    with pytest.raises(HttpError, match="send the whole conversation") as refused:
        ignored({"thread": {"type": "continue", "id": "x"}}, MessagesRequest)
    assert refused.value.status == 400
    for body in (anthropic_error_body(refused.value), openai_error_body(refused.value)):
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_another_name_of_a_field_is_refused_alone_and_ignored_beside_it() -> None:
    with pytest.raises(RequestError, match="'max_new_tokens'; did you mean 'max_tokens'"):
        ignored({"max_new_tokens": 5})
    unknown_fields = UnknownFields()
    body = json.dumps(CHAT | {"max_new_tokens": 5, "max_tokens": 5}).encode()
    assert read_request(ChatRequest, body, unknown_fields=unknown_fields).max_tokens == 5
    assert list(unknown_fields.names) == ["max_new_tokens"]
    for model in LEAST:
        for name, meant in FIELD_SYNONYMS.items():
            is_honored = name in model.field_names() or name in model.refused_fields()
            if (
                not is_honored
                and model.field_names() & set(meant)
                and not set(meant) & set(LEAST[model])
            ):
                with pytest.raises(RequestError, match=f"unknown field '{name}'; did you mean "):
                    ignored({name: 1}, model)


def test_options_within_a_request_follow_the_rule_and_are_named_with_their_place() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert ignored({"stream_options": options}) == ["stream_options.continuous_usage_stats"]
    with pytest.raises(
        RequestError, match=r"'tools.function.parameter'; did you mean 'parameters'"
    ) as refused:
        ignored({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]})
    assert refused.value.parameter == "tools"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": True, "version": 1}}
    assert ignored({"response_format": schema}) == ["response_format.json_schema.version"]


def test_what_is_unknown_in_a_tool_is_in_the_prompt_and_so_not_ignored() -> None:
    tool = {"x": 1, "function": {"return": {}, "name": "f"}, "type": "function"}
    unknown_fields = UnknownFields()
    body = json.dumps(CHAT | {"tools": [tool]}).encode()
    request = read_request(ChatRequest, body, unknown_fields=unknown_fields)
    assert request.tools is not None and not unknown_fields.names
    assert json.dumps(request.tools[0].function.for_template()) == json.dumps(tool)


def test_every_unknown_field_is_refused_by_name_where_that_is_wished() -> None:
    with pytest.raises(RequestError, match=r"unknown field 'x'; known are .*, messages, .*top_p"):
        ignored({"x": 1}, refuse=True)
    with pytest.raises(RequestError, match=r"unknown field 'stream_options.x'; known are include"):
        ignored({"stream_options": {"x": 1}}, refuse=True)
    for name in IGNORED_FIELDS:
        with pytest.raises(RequestError, match="unknown field"):
            ignored({name: 1}, refuse=True)
    assert ignored({"user": "me", "store": False}, refuse=True) == []
    # What clients send back is no choice of theirs.
    body = {"messages": [USER | {"mood": "good"}]}
    read_request(ChatRequest, json.dumps(body).encode(), unknown_fields=UnknownFields(refuse=True))


def test_the_number_of_unknown_fields_is_bounded() -> None:
    many = {f"field{i}": i for i in range(256)}
    assert len(ignored(many)) == 256
    with pytest.raises(RequestError, match="the body: 257 unknown fields are too many"):
        ignored(many | {"x": 1})
    tool = {"type": "function", "function": {"name": "f"} | many}
    with pytest.raises(RequestError, match="unknown fields are too many") as refused:
        ignored({"tools": [tool, tool | {"x": 1}]})
    assert refused.value.parameter == "tools"


def test_fields_that_many_tools_have_count_once() -> None:
    added = {"defer_loading": False, "eager_input_streaming": True, "allowed_callers": ["direct"]}
    tools = [{"name": f"tool_{i}", "input_schema": {}} | added for i in range(256)]
    assert ignored({"tools": tools}, MessagesRequest) == [f"tools.{name}" for name in added]


def test_a_schema_beside_json_object_is_honored() -> None:
    body = CHAT | {"response_format": {"type": "json_object", "schema": {"type": "integer"}}}
    request = read_request(ChatRequest, json.dumps(body).encode())
    assert request.structure() == StructuredOutputs(json={"type": "integer"})


def test_strict_in_the_wrong_place_of_a_tool_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert ignored({"tools": [tool | {"strict": False}]}) == []
    with pytest.raises(RequestError, match="strict: it has its place in the tool's function"):
        ignored({"tools": [tool | {"strict": True}]})


def test_padding_of_a_stream_may_be_asked_for() -> None:
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert read_request(ChatRequest, json.dumps(CHAT | options).encode()).stream


def test_the_worst_names_are_compared_in_a_few_milliseconds() -> None:
    known = ChatRequest.field_names()
    meant_field("warm", known)
    names = ["t" + "emperatur" * 6 + str(i) for i in range(256)]
    began_s = time.thread_time()
    assert all(meant_field(name, known) is None for name in names)
    assert time.thread_time() - began_s < 0.02, "3 ms on an idle core"
    assert meant_field("a" * 10**6, known) is None


def test_the_header_is_safe_and_short_whatever_names_are_sent() -> None:
    assert header_of(["b", "a"]) == "b, a"
    assert header_of(["a\r\nx: y, \U0001f600\0"]) == "a??x??y????"
    value = header_of([f"{i}" * 100 for i in range(1000)])
    assert len(value) <= MAX_HEADER_LENGTH and value.endswith(", ...")
    assert re.fullmatch(r"[A-Za-z0-9_.?, -]*", value)


def counter_of(registry: CollectorRegistry) -> Counter:
    return Counter("ignored", "Fields.", ["field"], registry=registry)


def test_only_known_names_are_labels() -> None:
    registry = CollectorRegistry()
    fields = IgnoredFields(counter_of(registry))
    fields.note(["provider", "evil1", "evil2"])
    fields.note(["provider"])
    counts = {
        sample.labels["field"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "ignored_total"
    }
    assert counts == {"provider": 2, "other": 2}


def test_a_name_is_logged_once_and_so_many_in_all(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields(counter_of(CollectorRegistry()))
    with caplog.at_level(logging.WARNING, "eagleray.api"):
        for _ in range(2):
            fields.note(["a\nb"])
        assert caplog.messages == ["requests have the field 'a\\nb', which is ignored"]
        fields.note(map(str, range(1000)))
    assert len(caplog.messages) == MAX_LOGGED_NAMES
    assert caplog.messages[-1].endswith("further names are not logged")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_the_answer_names_what_was_ignored(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    plain = httpx.post(server.url + path, json=fields)
    assert plain.status_code == 200 and IGNORED_HEADER not in plain.headers
    answer = httpx.post(server.url + path, json=fields | {"x": 1, "provider": {}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "x, provider"


def test_what_was_ignored_is_named_in_an_error_too_and_counted(server: Server) -> None:
    body = CHAT | {"provider": {}, "top_p": 7, "z" * 100: 0, "padding": " " * 20_000}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_p"
    assert answer.headers[IGNORED_HEADER] == f"provider, {'z' * 64}, padding"
    text = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'eagleray_api_ignored_fields_total\{field="provider"\} \d', text)
    assert "zzz" not in text and "padding" not in text


def test_a_server_that_refuses_unknown_fields_says_which() -> None:
    with serve(refuse_unknown=True) as running:
        body = CHAT | {"provider": {}}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "provider"
