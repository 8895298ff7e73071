"""The paths of the API and what answers them, and the OpenAPI document made from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.api.chats import chat_job, tokenize
from cluster.api.endpoints import Job, ServedModel, completion_job, detokenize
from cluster.api.messages.adapter import count_tokens, messages_job
from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.responses.adapter import count_input, responses_job
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)

Result = TypeVar("Result")
MESSAGES_PATH = "/v1/messages"
SCHEMA_REFERENCE = "#/components/schemas/{model}"


class PostEndpoint(NamedTuple, Generic[Result]):
    """What a path takes, and what makes a job or an answer of it. prompt_field: of a job, the field
    that the prompt comes from.
    """

    model: type[RequestModel]
    convert: Callable[[Any, ServedModel], Result]
    summary: str
    prompt_field: str = "messages"


JOB_ENDPOINTS: dict[str, PostEndpoint[Job]] = {
    "/v1/chat/completions": PostEndpoint(ChatRequest, chat_job, "Answer a conversation."),
    "/v1/completions": PostEndpoint(
        CompletionRequest, completion_job, "Continue one or many prompts.", "prompt"
    ),
    "/v1/responses": PostEndpoint(
        ResponsesRequest, responses_job, "The same, as items of a response.", "input"
    ),
    MESSAGES_PATH: PostEndpoint(MessagesRequest, messages_job, "The same, as in Anthropic's API."),
}
TOKENIZER_ENDPOINTS: dict[str, PostEndpoint[dict[str, Any]]] = {
    "/v1/responses/input_tokens": PostEndpoint(
        ResponsesRequest, count_input, "Number of its tokens."
    ),
    f"{MESSAGES_PATH}/count_tokens": PostEndpoint(
        CountTokensRequest, count_tokens, "Number of its tokens."
    ),
    "/tokenize": PostEndpoint(TokenizeRequest, tokenize, "Token ids of a text or a conversation."),
    "/detokenize": PostEndpoint(DetokenizeRequest, detokenize, "Text of token ids."),
}
POST_ENDPOINTS: dict[str, PostEndpoint[Any]] = JOB_ENDPOINTS | TOKENIZER_ENDPOINTS
GET_SUMMARIES = {
    "/": "A page with the engine live and a chat.",
    "/v1/models": "The model that is served.",
    "/health": "200 while requests are taken and the engine answers, otherwise 503.",
    "/debug/trace": "The steps of the last ?seconds=10 as a Chrome trace.",
    "/live": "200 while the process lives.",
    "/version": "The version.",
    "/metrics": "Counters for Prometheus.",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """What a refused request is answered with."""

    error: ErrorDetails


def openapi(version: str) -> dict[str, Any]:
    """The document."""
    models: list[type[BaseModel]] = [
        Error,
        *(endpoint.model for endpoint in POST_ENDPOINTS.values()),
    ]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=SCHEMA_REFERENCE
    )
    error_response = {"description": "An error.", "content": _content(Error)}
    statuses = dict.fromkeys(("400", "401", "404", "413", "503"), error_response)
    responses = {"200": {"description": "The answer."}} | statuses
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": responses}}
        for path, summary in GET_SUMMARIES.items()
    }
    for path, endpoint in POST_ENDPOINTS.items():
        body = {"content": _content(endpoint.model), "required": True}
        paths[path] = {
            "post": {"summary": endpoint.summary, "requestBody": body, "responses": responses}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Eagleray", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(model: type[BaseModel]) -> dict[str, Any]:
    reference = SCHEMA_REFERENCE.format(model=model.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}
