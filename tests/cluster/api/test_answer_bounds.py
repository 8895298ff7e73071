"""How long an answer with alternatives may be when its request names no length."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.api.chats import chat_job
from cluster.api.endpoints import Job, ServedModel
from cluster.api.schema import ChatRequest
from cluster.client.requests import RequestBuilder
from scheduler.bounds import field_limit
from scheduler.errors import RequestError
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import LIMITS, MODEL, TOKENIZER


def job_of(**fields: object) -> Job:
    sizes = dataclasses.replace(LIMITS, num_blocks=100_000, max_model_len=262_144)
    builder = RequestBuilder(MODEL, TOKENIZER, SamplingParams(), sizes, 0)
    served_model = ServedModel(name="tiny", builder=builder, tokenizer=TOKENIZER)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, **fields}
    return chat_job(ChatRequest.model_validate(chat), served_model)


def test_without_a_length_an_answer_is_as_long_as_its_alternatives_allow() -> None:
    assert job_of(n=4, top_logprobs=20).params.max_tokens == field_limit("alternatives") // (4 * 21)


def test_a_long_answer_with_all_alternatives_is_possible_and_many_are_not() -> None:
    assert job_of(max_tokens=32_768, top_logprobs=20).params.max_tokens == 32_768
    with pytest.raises(RequestError, match="too many"):
        job_of(max_tokens=32_768, top_logprobs=20, n=2)
