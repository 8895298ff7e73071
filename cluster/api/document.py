"""The OpenAPI document of the API, made from the models of its requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Model,
    TokenizeRequest,
)

REFERENCE = "#/components/schemas/{model}"
POST: dict[str, tuple[type[Model], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Continue one or many prompts."),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, as items of a response."),
    "/v1/responses/input_tokens": (ResponsesRequest, "Number of tokens of such a conversation."),
    "/v1/messages": (MessagesRequest, "Answer a conversation, as Anthropic's API does."),
    "/v1/messages/count_tokens": (CountTokensRequest, "Number of tokens of a conversation."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
GET = {
    "/": "A page with the engine live and a chat.",
    "/v1/models": "The model that is served.",
    "/health": "200 while requests are taken and the engine answers, otherwise 503.",
    "/debug/trace": "The last steps as a Chrome trace; ?seconds=10 says how many.",
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
    models = [(model, "validation") for model in (Error, *(model for model, _ in POST.values()))]
    _, definitions = models_json_schema(models, ref_template=REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (model, summary) in POST.items():
        reference = REFERENCE.format(model=model.__name__)
        body = {"content": {"application/json": {"schema": {"$ref": reference}}}, "required": True}
        paths[path] = {
            "post": {"summary": summary, "requestBody": body, "responses": _responses("400", "413")}
        }
    for path, summary in GET.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Eagleray", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(*errors: str) -> dict[str, Any]:
    reference = REFERENCE.format(model="Error")
    failed = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": reference}}},
    }
    wrong = dict.fromkeys((*errors, "401", "404", "503"), failed)
    return {"200": {"description": "The answer."}} | wrong
