"""The requests of the API: what each field may be.

The fields of a model here are honored; those of `FIELDS_WITHOUT_EFFECT` are accepted as far as they
ask for nothing; those of `REFUSED_FIELDS` are refused; `unknown.py` says what becomes of others. A
model of another API may have lists of its own. The values of sampling parameters are checked by
`SamplingParams`, which knows their limits; `reading.py` makes requests of bodies.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from cluster.api.fields import (
    FIELDS_OF_OTHER_PATHS,
    FIELDS_REFUSED_EVERYWHERE,
    FIELDS_WITHOUT_EFFECT,
    REFUSED_FIELDS,
    ValuePredicate,
)
from cluster.api.unknown import UnknownFields
from cluster.client.prompts import join_parts
from scheduler.bounds import field_limit
from scheduler.errors import RequestError
from scheduler.params import SamplingParams, StructuredOutputs

T = TypeVar("T")
# "none" asks for no thinking; all others are alike.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolName = Annotated[str, Field(min_length=1, max_length=field_limit("name"))]  # of a tool
# A list whose check ends at the first wrong item. Errors take a hundred times the memory of what is
# wrong, so every list of a request is one of these.
FailFastList = Annotated[list[T], Field(fail_fast=True)]


def type_discriminator(
    *kinds: str, default: str | None = None, tag_format: str = "{}"
) -> Discriminator:
    """Chooses the model of a value by its type, `default` in JSON that has none; all other types
    are one kind, "other". `tag_format` makes the tag of a model from its kind.
    """

    def tag_of(value: Any) -> str:
        is_json = isinstance(value, dict)  # otherwise a model, when it is written
        kind = value.get("type", default) if is_json else getattr(value, "type", None)
        return tag_format.format(kind if kind in kinds else "other")

    return Discriminator(tag_of)


class RequestModel(BaseModel):
    """Base of all requests and of what is in them: exact types. Unknown fields of messages, parts
    and calls are ignored: clients send back what any server gave them.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    FIELDS_WITHOUT_EFFECT: ClassVar[dict[str, tuple[ValuePredicate, str]]] = FIELDS_WITHOUT_EFFECT
    REFUSED_FIELDS: ClassVar[dict[str, str]] = REFUSED_FIELDS

    @model_validator(mode="wrap")
    @classmethod
    def _let_threads_switch(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Checks as usual, but through Python code, where the interpreter may switch threads: a
        body has up to 32,768 objects, and pydantic alone would not let go between two of them.
        """
        return check(values)

    @classmethod
    @functools.cache
    def field_names(cls) -> frozenset[str]:
        """The names of the fields in JSON."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @functools.cache
    def fields_without_effect(cls) -> dict[str, tuple[ValuePredicate, str]]:
        """Fields that are accepted as far as they ask for nothing, and what is possible."""
        unlisted_fields = dict(FIELDS_OF_OTHER_PATHS)
        for name in (*cls.field_names(), *cls.REFUSED_FIELDS):
            unlisted_fields.pop(name, None)
        return unlisted_fields | cls.FIELDS_WITHOUT_EFFECT

    @classmethod
    @functools.cache
    def refused_fields(cls) -> dict[str, str]:
        """Fields that are refused, and why."""
        unlisted_fields = dict(FIELDS_REFUSED_EVERYWHERE)
        for name in (*cls.field_names(), *cls.FIELDS_WITHOUT_EFFECT):
            unlisted_fields.pop(name, None)
        return unlisted_fields | cls.REFUSED_FIELDS


class Options(RequestModel):
    """Base of what says how to answer: options, tools, formats. Its unknown fields are
    treated as those of the request, if an `UnknownFields` is the context of the validation.
    `FIELD_PATH`: where it is in the request. `IS_IN_PROMPT`: the model reads all of it, so no field
    of it is ignored. `MISPLACED_FIELDS`: fields that are refused because they have another place,
    with that.
    """

    FIELD_PATH: ClassVar[str]
    IS_IN_PROMPT: ClassVar[bool] = False
    MISPLACED_FIELDS: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_unknown_fields(cls, values: Any, info: ValidationInfo) -> Any:
        if not (isinstance(values, dict) and isinstance(info.context, UnknownFields)):
            return values
        values = dict(values)
        info.context.remove_unknown(
            values,
            cls.field_names(),
            path=cls.FIELD_PATH,
            is_in_prompt=cls.IS_IN_PROMPT,
            refused_fields=cls.MISPLACED_FIELDS,
        )
        return values


class StreamOptions(Options):
    FIELD_PATH: ClassVar[str] = "stream_options"
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding, of which there is none


class GenerationRequest(RequestModel):
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
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    stream_interval: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling_params(
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
        names = SamplingParams.__dataclass_fields__.keys() & GenerationRequest.model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        counts = [num for num in (self.prompt_logprobs, prompt_logprobs) if num is not None]
        return SamplingParams.from_dict(
            values
            | {
                "stop": self.stop or None,  # clients send an empty list for none
                "max_tokens": max_tokens,
                "logprobs": logprobs,
                "structured_outputs": structure,
                "prompt_logprobs": max(counts, default=None),
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


class CompletionRequest(GenerationRequest):
    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    echo: bool | None = None
    logprobs: int | None = None


class TextPart(RequestModel):
    """Text; the first type is that of chats, the others are those of responses. Some clients send
    them where the other is meant.
    """

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(RequestModel):
    name: str
    arguments: str


class MessageCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """A message of a conversation. Clients send answers back as they got them, from any server.
    `refusal`: what the assistant said instead of `content`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | FailFastList[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None
    ) = None
    name: str | None = None
    tool_calls: FailFastList[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    def for_template(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """The message for chat templates. Raises `RequestError` for a question without content and,
        without `arguments_as_text`, for arguments of calls that are not JSON.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._text()}
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        optional_fields = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        message |= {name: value for name, value in optional_fields.items() if value is not None}
        for call in self.tool_calls or ():
            name, arguments = call.function.name, call.function.arguments
            message.setdefault("tool_calls", []).append(
                template_call(call.id, name, arguments, arguments_as_text=arguments_as_text)
            )
        return message

    def _text(self) -> str:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise RequestError(f"a message of role {self.role} needs content", "messages")
        if not self.content:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return join_parts(p.text if isinstance(p, TextPart) else p.refusal for p in self.content)


class Function(Options):
    FIELD_PATH: ClassVar[str] = "tools.function"
    IS_IN_PROMPT: ClassVar[bool] = True
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    _given_tool: dict[str, Any] | None = None  # of which this is the function

    def for_template(self) -> dict[str, Any]:
        """The tool for chat templates, which write it as it is: in the client's own order, with all
        of its keys, if it came in the form that templates read.
        """
        if self._given_tool is not None:
            return self._given_tool
        return {"type": "function", "function": self.model_dump(exclude_unset=True)}


class Tool(Options):
    FIELD_PATH: ClassVar[str] = "tools"
    IS_IN_PROMPT: ClassVar[bool] = True
    MISPLACED_FIELDS: ClassVar[dict[str, str]] = {
        "strict": "it has its place in the tool's function"
    }
    type: Literal["function"]
    function: Function

    @model_validator(mode="wrap")
    @classmethod
    def _keep_given(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        tool = check(values)
        tool.function._given_tool = values
        return tool


class FunctionName(Options):
    FIELD_PATH: ClassVar[str] = "tool_choice.function"
    name: str


class NamedTool(Options):
    """A tool by name: the one that must be called, or one of those that may be."""

    FIELD_PATH: ClassVar[str] = "tool_choice"
    type: Literal["function"]
    function: FunctionName


class AllowedToolSet(Options):
    FIELD_PATH: ClassVar[str] = "tool_choice.allowed_tools"
    mode: Literal["auto", "required"]
    tools: Annotated[FailFastList[NamedTool], Field(max_length=field_limit("tools"))]


class AllowedTools(Options):
    """The only tools that may be called; with mode "required", one must be."""

    FIELD_PATH: ClassVar[str] = "tool_choice"
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


class TextFormat(Options):
    FIELD_PATH: ClassVar[str] = "response_format"
    type: Literal["text"]


class JsonObjectFormat(Options):
    """Clients of other servers add a schema, which is honored."""

    FIELD_PATH: ClassVar[str] = "response_format"
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class JsonSchema(Options):
    FIELD_PATH: ClassVar[str] = "response_format.json_schema"
    name: Annotated[str, Field(max_length=field_limit("name"))]  # changes nothing
    description: str | None = None  # changes nothing
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None  # changes nothing: answers match the schema anyway


class JsonSchemaFormat(Options):
    FIELD_PATH: ClassVar[str] = "response_format"
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(GenerationRequest):
    messages: Annotated[FailFastList[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None  # as in Qwen's own API
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # if given, the opposite of the next one
    continue_final_message: bool | None = None

    def structure(self) -> StructuredOutputs | None:
        """As `GenerationRequest.structure`, or from the response format."""
        given_structure = super().structure()
        response_format = self.response_format
        if response_format is None or isinstance(response_format, TextFormat):
            return given_structure
        if given_structure is not None:
            raise RequestError(
                "give either response_format or structured_outputs", "response_format"
            )
        if isinstance(response_format, JsonObjectFormat):
            return schema_structure(response_format.schema_)
        return schema_structure(response_format.json_schema.schema_)


class TokenizeRequest(RequestModel):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[FailFastList[ChatMessage], Field(min_length=1)] | None = None
    tools: FailFastList[Tool] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # if given, the opposite of the next one
    continue_final_message: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: FailFastList[int]


def schema_structure(schema: Any) -> StructuredOutputs:
    """An answer that matches a JSON schema; any object if that is None. Raises `RequestError`."""
    return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)


def template_call(
    call_id: str | None, name: str, arguments: str, *, arguments_as_text: bool
) -> dict[str, Any]:
    """A call for chat templates; `arguments_as_text`: see `ChatTemplate`. Raises `RequestError`."""
    function = {
        "name": name,
        "arguments": arguments if arguments_as_text else _arguments_object(arguments),
    }
    return {"id": call_id, "type": "function", "function": function}


def _arguments_object(arguments: str) -> Any:
    """The arguments of a call; those of a call that was cut off as far as they go. Their size has
    been checked with that of the body.
    """
    try:  # OpenAI's models write nothing for no arguments
        return from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError as error:
        raise RequestError(f"tool_calls: arguments are not JSON: {error}", "messages") from None
