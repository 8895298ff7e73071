"""A conversation has the same tokens over HTTP and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.api.chats import chat_of, tokenize
from cluster.api.endpoints import ServedModel
from cluster.api.reading import read_request
from cluster.api.schema import ChatRequest, TokenizeRequest
from cluster.client.prompts import parse_prompt
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import LIMITS, MODEL

TOKENIZER = Tokenizer(Path(DEFAULT_MODEL_DIR))
BUILDER = RequestBuilder(MODEL, TOKENIZER, SamplingParams(), LIMITS, 0)
SERVED_MODEL = ServedModel(name="tiny", builder=BUILDER, tokenizer=TOKENIZER)
USER = {"role": "user", "content": "What is 47 + 38?"}


def check_same_tokens(**prompt: Any) -> None:
    body = json.dumps(prompt).encode()
    expected_ids = BUILDER.encode(parse_prompt(prompt))
    chat = chat_of(read_request(ChatRequest, body), SERVED_MODEL)
    assert TOKENIZER.decode(BUILDER.encode(chat.prompt)) == TOKENIZER.decode(expected_ids)
    assert BUILDER.encode(chat.prompt) == expected_ids
    assert tokenize(read_request(TokenizeRequest, body), SERVED_MODEL)["tokens"] == expected_ids


def test_of_content_in_parts() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "47 + 38?"}]
    check_same_tokens(messages=[{"role": "user", "content": parts}])


def test_of_tools_in_any_order_and_with_any_keys() -> None:
    parameters = {"type": "object", "properties": {"b": {"type": "integer"}, "a": True}}
    function = {
        "strict": False,
        "parameters": parameters,
        "return": {"type": "integer"},  # as transformers' `get_json_schema` writes it
        "description": "Adds.",
        "name": "add",
    }
    tool = {"function": function, "version": 1, "type": "function"}
    plain_tool = {"type": "function", "function": {"name": "now"}}
    check_same_tokens(messages=[USER], tools=[tool, plain_tool])
