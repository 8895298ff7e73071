"""The requests of OpenAI's Responses API, with the fields that are honored. Everything that would
need stored state, and tools that the server would run, are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cluster.api.fields import REFUSED, WITHOUT_EFFECT, Asks
from cluster.api.schema import (
    JsonObjectFormat,
    ListOf,
    Model,
    Name,
    TextFormat,
)
from scheduler.bounds import most

_STATEFUL = "nothing is stored between requests; send the whole conversation as input"


class InputText(Model):
    type: Literal["input_text"]
    text: str


class OutputText(Model):
    """Text of an earlier answer, sent back unchanged."""

    type: Literal["output_text"]
    text: str
    annotations: ListOf[Any] | None = None
    logprobs: ListOf[Any] | None = None
    parsed: Any = None  # the openai client's own


class MessageItem(Model):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[Annotated[InputText | OutputText, Field(discriminator="type")]]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningText(Model):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Model):
    """Reasoning sent back. The summary is not used: answers of this server have the whole text."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: ListOf[Any] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


class CallItem(Model):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    parsed_arguments: Any = None  # the openai client's own


class CallOutputItem(Model):
    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[InputText]
    id: str | None = None
    status: str | None = None


def _type_of(item: Any) -> Any:
    """The type of an item; messages may come without one."""
    return item.get("type", "message") if isinstance(item, dict) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]


class FunctionTool(Model):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Model):
    """The one tool that must be called."""

    type: Literal["function"]
    name: str


class SchemaFormat(Model):
    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=most("name"))]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Model):
    """`verbosity` changes nothing here."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: str | None = None


class Reasoning(Model):
    """No summaries are written: the reasoning itself is in the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(Model):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Model):
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Asks, str]]] = {
        name: WITHOUT_EFFECT[name]
        for name in WITHOUT_EFFECT.keys() - {"metadata", "best_of", "suffix"}
    } | {
        "background": (lambda value: value is False, "answers are not made in the background"),
        "max_tool_calls": (lambda _: True, ""),  # limits only tools of the server
        "truncation": (
            lambda value: value == "disabled",
            "a conversation is not shortened; only 'disabled' is possible",
        ),
        "include": (
            # Clients that keep the conversation themselves ask for it; reasoning is not encrypted.
            lambda value: (
                isinstance(value, list) and not {*map(str, value)} - {"reasoning.encrypted_content"}
            ),
            "only 'reasoning.encrypted_content' is possible, which changes nothing",
        ),
    }
    REFUSED: ClassVar[dict[str, str]] = {
        "access_programs": "access programs are not supported",
        "background_options": "answers are not made in the background",
        "context_management": "a conversation is not shortened",
        "conversation": _STATEFUL,
        "image": "images are not supported",
        "moderation": REFUSED["moderation"],
        "previous_response_id": _STATEFUL,
        "prompt": "stored prompts are not supported; send the text as input",
        "top_logprobs": "logprobs are not part of responses here; ask /v1/chat/completions",
    }

    model: str | None = None
    input: str | ListOf[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Beyond OpenAI's, as in chats:
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
