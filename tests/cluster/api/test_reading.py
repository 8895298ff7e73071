"""How much a body holds is counted in its bytes, before anything is made of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cluster.api import reading
from cluster.api.messages.schema import MessagesRequest
from cluster.api.reading import count_json, read_request
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import ChatRequest, CompletionRequest, RequestModel
from scheduler.bounds import FIELD_BOUNDS, JSON_BOUNDS, field_limit
from scheduler.errors import RequestError

USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER]}


def containers_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_of, value.values()))
    return 1 + sum(map(containers_of, value)) if isinstance(value, list) else 0


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, inner))


def texts_of(value: Any) -> int:
    """Keys among them."""
    if isinstance(value, dict):
        return len(value) + sum(map(texts_of, value.values()))
    return sum(map(texts_of, value)) if isinstance(value, list) else isinstance(value, str)


def any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind == 0:
        return rng.randrange(100)
    if kind in (1, 2):
        return "".join(rng.choice('ab,:[]{}"\\\n') for _ in range(rng.randrange(12)))
    if kind == 3:
        return {f'{i}"[,': any_json(rng, depth + 1) for i in range(rng.randrange(5))}
    return [any_json(rng, depth + 1) for _ in range(rng.randrange(5))]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 65_536])
def test_what_texts_contain_is_not_counted_wherever_slices_end(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", size)
    for seed in range(300):
        value = any_json(random.Random(seed))
        counts = count_json(json.dumps(value).encode())
        assert counts["containers"] == containers_of(value), value
        assert counts["texts"] == texts_of(value), value
        # An empty list counts as one with a value.
        assert values_of(value) <= counts["values"] <= 2 * values_of(value), value


@pytest.mark.parametrize(
    ("model", "fields", "name", "place"),
    [
        (CompletionRequest, {"prompt": ["a"] * 129}, "prompt", "prompt"),
        (CompletionRequest, {"prompt": [[1]] * 129}, "prompt", "prompt"),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * 33}, "stop", "stop"),
        (
            CompletionRequest,
            {"prompt": "a", "stop_token_ids": [1] * 1025},
            "stop_token_ids",
            "stop_token_ids",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(i): 0 for i in range(1025)}},
            "logit_bias",
            "logit_bias",
        ),
        (CompletionRequest, {"prompt": "a", "cache_salt": "a" * 1025}, "cache_salt", "cache_salt"),
        (CompletionRequest, {"prompt": "a", "model": "a" * 513}, "model", "model"),
        (CompletionRequest, {"prompt": "a", "user": "a" * 2049}, "user", "user"),
        (ChatRequest, CHAT | {"metadata": dict.fromkeys("abcdefghijklmnopq")}, "metadata", ""),
        (ChatRequest, CHAT | {"metadata": {"a": "a" * 2049}}, "metadata text", "metadata"),
        (ChatRequest, {"messages": [USER] * 2049}, "messages", "messages"),
        (ChatRequest, CHAT | {"tools": [{}] * 257}, "tools", "tools"),
        (
            ChatRequest,
            CHAT | {"tools": [{"function": {"parameters": {"a": "a" * 70_000}}}]},
            "schema",
            "tools.0.parameters",
        ),
        (
            ChatRequest,
            {"messages": [USER | {"content": [{}] * 1025}]},
            "parts",
            "messages.0.content",
        ),
        (
            ChatRequest,
            {"messages": [USER, USER | {"tool_calls": [{}] * 257}]},
            "tool_calls",
            "messages.1.tool_calls",
        ),
        (
            ChatRequest,
            CHAT | {"chat_template_kwargs": dict.fromkeys(map(str, range(65)))},
            "chat_template_kwargs",
            "chat_template_kwargs",
        ),
        (MessagesRequest, CHAT | {"stop_sequences": ["a"] * 33}, "stop", "stop_sequences"),
        (
            MessagesRequest,
            {"messages": [USER | {"content": [{"content": [{}] * 1025}]}]},
            "parts",
            "messages.0.content",
        ),
        (ResponsesRequest, {"input": [USER] * 8193}, "input", "input"),
        (ChatRequest, CHAT | {"stop": dict.fromkeys(map(str, range(2049)))}, "stop", "stop"),
        (
            ChatRequest,
            CHAT | {"user": {"a": dict.fromkeys(map(str, range(2049)))}},
            "keys",
            "an object in the body",
        ),
    ],
)
def test_what_is_too_much_is_named_with_the_bound(
    model: type[RequestModel], fields: dict[str, Any], name: str, place: str
) -> None:
    limit = (FIELD_BOUNDS.get(name) or JSON_BOUNDS[name]).maximum
    with pytest.raises(RequestError, match=rf"^{place}.* are too many; at most {limit} are"):
        read_request(model, json.dumps(fields).encode())


def test_a_body_at_its_bounds_is_read() -> None:
    prompts = [[1] * 40_960] * 12
    assert (
        read_request(CompletionRequest, json.dumps({"prompt": prompts}).encode()).prompt == prompts
    )
    many = read_request(
        ChatRequest, json.dumps({"messages": [USER] * field_limit("messages")}).encode()
    )
    assert len(many.messages) == field_limit("messages")


def test_more_messages_are_read_where_the_server_allows_them() -> None:
    body = json.dumps({"messages": [USER] * 3000}).encode()
    assert len(read_request(ChatRequest, body, max_messages=3000).messages) == 3000
    with pytest.raises(RequestError, match="messages: 3000 messages are too many; at most 2999"):
        read_request(ChatRequest, body, max_messages=2999)


def test_depth_is_bounded_below_what_the_parser_does() -> None:
    for depth, message in ((161, "160"), (5000, "160")):
        body = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(RequestError, match=message):
            read_request(ChatRequest, body)


def test_arguments_of_calls_are_counted_together() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps([[]] * 20_000)}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    read_request(ChatRequest, json.dumps({"messages": [turn]}).encode())
    with pytest.raises(RequestError, match="the arguments of all calls in the body: 40002 lists"):
        read_request(ChatRequest, json.dumps({"messages": [turn, turn]}).encode())


def test_a_message_of_an_error_is_short_whatever_is_wrong() -> None:
    for wrong in ("a" * 10**6, [[0] * 1000] * 100, {"a" * 10**5: 1}):
        with pytest.raises(RequestError) as refused:
            read_request(ChatRequest, json.dumps(CHAT | {"n": wrong}).encode())
        assert len(str(refused.value)) < 300
