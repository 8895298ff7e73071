"""The requests of the API: what each field may be, and which fields of OpenAI's are known without
being honored.

Every field is in one of three lists: those of a model here are honored; those of `WITHOUT_EFFECT`
are accepted as far as they ask for nothing; all others are refused by name. A model of another API
may have lists of its own. The values of sampling parameters are checked by `SamplingParams`, which
knows their limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from scheduler.errors import RequestError
from scheduler.params import SamplingParams, StructuredOutputs

Asks = Callable[[Any], bool]


def _anything(_: Any) -> bool:
    return True


# Fields of OpenAI's that change nothing here, with the values for which that is true. Clients send
# them unasked.
WITHOUT_EFFECT: dict[str, tuple[Asks, str]] = {
    "user": (_anything, ""),
    "metadata": (_anything, ""),
    "service_tier": (_anything, ""),
    "safety_identifier": (_anything, ""),
    "verbosity": (_anything, ""),
    "prompt_cache_key": (_anything, ""),
    "prompt_cache_options": (_anything, ""),
    "prompt_cache_retention": (_anything, ""),
    "store": (lambda value: value is False, "nothing is stored; only false is possible"),
    "modalities": (lambda value: value == ["text"], 'only ["text"] is possible'),
    "best_of": (lambda value: value == 1, "only 1 is possible; ask for several outputs with n"),
    "suffix": (lambda value: value == "", "insertion is not supported"),
}
# Fields of OpenAI's that are refused, each with its own reason.
REFUSED: dict[str, str] = {
    "audio": "audio is not supported",
    "function_call": "deprecated; use tool_choice",
    "functions": "deprecated; use tools",
    "moderation": "moderation is not supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
}


class Model(BaseModel):
    """Base of all requests: exact types, and no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True)
    WITHOUT_EFFECT: ClassVar[dict[str, tuple[Asks, str]]] = WITHOUT_EFFECT
    REFUSED: ClassVar[dict[str, str]] = REFUSED


Request = TypeVar("Request", bound=Model)


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generate(Model):
    """What chats and completions have in common; see `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream_interval: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, structure: StructuredOutputs | None
    ) -> SamplingParams:
        """The sampling parameters. Raises `RequestError` for a value that is not possible."""
        names = SamplingParams.__dataclass_fields__.keys() & Generate.model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        return SamplingParams.from_dict(
            values
            | {
                "stop": self.stop or None,  # clients send an empty list for none
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "structured_outputs": structure,
            }
        )

    def structure(self) -> StructuredOutputs | None:
        """What the answer must match. Raises `RequestError`."""
        if self.structured_outputs is None:
            return None
        return StructuredOutputs.from_dict(self.structured_outputs)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(Generate):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(Model):
    type: Literal["text"]
    text: str


class FunctionCall(Model):
    name: str
    arguments: str


class MessageCall(Model):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Model):
    """A message of a conversation. Clients send answers back as they got them, with fields that are
    null.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """The message as chat templates expect it. Raises `RequestError` without content."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        if content is None:
            if not self.tool_calls:
                raise RequestError(f"a message of role {self.role} needs content", "messages")
            content = ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": role, "content": content}
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        message |= {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments
                        if arguments_as_text
                        else _object(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


class Function(Model):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    type: Literal["function"]
    function: Function


class FunctionName(Model):
    name: str


class NamedTool(Model):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Model):
    type: Literal["text"]


class JsonObjectFormat(Model):
    type: Literal["json_object"]


class JsonSchema(Model):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Model):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(Generate):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def structure(self) -> StructuredOutputs | None:
        """As `Generate.structure`, or from the response format."""
        wanted = super().structure()
        form = self.response_format
        if form is None or isinstance(form, TextFormat):
            return wanted
        if wanted is not None:
            raise RequestError(
                "give either response_format or structured_outputs", "response_format"
            )
        if isinstance(form, JsonObjectFormat):
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=form.json_schema.schema_)


class TokenizeRequest(Model):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: list[int]


def read(model: type[Request], body: bytes) -> Request:
    """A request from the bytes of its JSON. Raises `RequestError` naming the field at fault."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    for name in [name for name in values if name not in model.model_fields]:
        _check_other(name, values.pop(name), model)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        field = errors[0]["loc"][:1]
        # For a union, pydantic lists the errors of every alternative. The one that was meant is
        # most likely the one whose error lies deepest.
        found = max((e for e in errors if e["loc"][:1] == field), key=lambda e: len(e["loc"]))
        # Names of kinds, "str" or "list[...]", are no part of the place.
        place = [str(part) for part in found["loc"] if part != "str" and "[" not in str(part)]
        given = repr(found["input"])
        shown = given if len(given) <= 100 else given[:100] + "..."
        raise RequestError(
            f"{'.'.join(place)}: {found['msg']}; got {shown}", place[0] if place else None
        ) from None


def _check_other(name: str, value: Any, model: type[Model]) -> None:
    """Raise `RequestError` unless a field that is not honored asks for nothing."""
    if name in model.WITHOUT_EFFECT:
        is_possible, advice = model.WITHOUT_EFFECT[name]
        if value is None or is_possible(value):
            return
        raise RequestError(f"{name}: {advice}", name)
    if name in model.REFUSED:
        if value is None:
            return
        raise RequestError(f"{name}: {model.REFUSED[name]}", name)
    known = ", ".join(sorted(model.model_fields))
    raise RequestError(f"unknown field {name[:100]!r}; known are {known}", name[:100])


def _object(arguments: str) -> Any:
    """The arguments of a call as an object, for templates that do not take text."""
    try:
        return from_json(arguments)
    except ValueError as error:
        raise RequestError(f"tool_calls: arguments are not JSON: {error}", "messages") from None
