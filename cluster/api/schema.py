"""The requests of the API: what each field may be, and which fields of OpenAI's are known without
being honored.

Every field is in one of three lists: those of a model here are honored; those of `WITHOUT_EFFECT`
are accepted as far as they ask for nothing; all others are refused by name. A model of another API
may have lists of its own. The values of sampling parameters are checked by `SamplingParams`, which
knows their limits; `reading.py` makes requests of bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from scheduler.bounds import most
from scheduler.errors import RequestError
from scheduler.params import SamplingParams, StructuredOutputs

Asks = Callable[[Any], bool]
T = TypeVar("T")
Name = Annotated[str, Field(min_length=1, max_length=most("name"))]  # of a tool
# A list whose check ends at the first wrong item. Errors take a hundred times the memory of what is
# wrong, so every list of a request is one of these.
ListOf = Annotated[list[T], Field(fail_fast=True)]


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
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    stream_interval: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        structure: StructuredOutputs | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The sampling parameters. `prompt_logprobs`: in place of the field, if the answer needs
        more. Raises `RequestError` for a value that is not possible.
        """
        names = SamplingParams.__dataclass_fields__.keys() & Generate.model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        wanted = [num for num in (self.prompt_logprobs, prompt_logprobs) if num is not None]
        return SamplingParams.from_dict(
            values
            | {
                "stop": self.stop or None,  # clients send an empty list for none
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "structured_outputs": structure,
                "prompt_logprobs": max(wanted) if wanted else None,
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
    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
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
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: ListOf[Any] | None = None
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
    name: Name
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
    name: Annotated[str, Field(max_length=most("name"))]
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
    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ListOf[Tool] | None = None
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
    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)] | None = None
    tools: ListOf[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: ListOf[int]


def _object(arguments: str) -> Any:
    """The arguments of a call as an object, for templates that do not take text. Their size has
    been checked with that of the body.
    """
    try:
        return from_json(arguments)
    except ValueError as error:
        raise RequestError(f"tool_calls: arguments are not JSON: {error}", "messages") from None
