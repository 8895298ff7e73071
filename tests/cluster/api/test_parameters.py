"""Every parameter that an API takes has its effect: what reads a request leaves none out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api.endpoints import Job
from cluster.api.messages.adapter import messages_job
from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.reading import read_request
from cluster.api.responses.adapter import responses_job
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import GenerationRequest
from tests.cluster.api.scripted import Server, serve

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "stop": "end",
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "cache_salt": "salt",
    "stream": True,
    "stop_sequences": ["end"],
    "max_tokens": 5,
}
NAMES_OF_MESSAGES = {"stop_sequences": "stop"}
# Not parameters of a job: one is checked, and the other is about the form of a stream.
CHOOSE_NOTHING = {"model", "stream_options"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


def value_in(job: Job, name: str) -> object:
    """What a job does with the parameter called `name` in chats."""
    if name == "stream":
        return job.is_streamed
    return job.prompts[0].cache_salt if name == "cache_salt" else getattr(job.params, name)


@pytest.mark.parametrize(
    "name",
    sorted(
        (ResponsesRequest.model_fields.keys() & GenerationRequest.model_fields.keys())
        - CHOOSE_NOTHING
    ),
)
def test_a_parameter_of_the_responses_api_reaches_the_job(server: Server, name: str) -> None:
    body = json.dumps({"input": "Hi", name: VALUES[name]}).encode()
    job = responses_job(read_request(ResponsesRequest, body), server.api._served_model)
    assert value_in(job, name) == VALUES[name]


@pytest.mark.parametrize(
    "name", sorted(MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys())
)
def test_a_parameter_of_the_messages_api_reaches_the_job(server: Server, name: str) -> None:
    """Its fields beyond those that count tokens."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    request = read_request(MessagesRequest, json.dumps(body | {name: VALUES[name]}).encode())
    job = messages_job(request, server.api._served_model)
    assert value_in(job, NAMES_OF_MESSAGES.get(name, name)) == VALUES[name]
