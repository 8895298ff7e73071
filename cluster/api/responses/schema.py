"""The requests of OpenAI's Responses API, with the fields that are honored. Everything that would
need stored state is refused by name. Items, parts and tools that this server cannot read or run are
left out: agents send back what other servers have answered, and offer all the tools they have.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from cluster.api.fields import ANY_VALUE, FIELDS_WITHOUT_EFFECT, REFUSED_FIELDS, ValuePredicate
from cluster.api.schema import (
    FailFastList,
    JsonObjectFormat,
    Options,
    ReasoningEffort,
    RefusalPart,
    RequestModel,
    TextFormat,
    TextPart,
    ToolName,
    type_discriminator,
)
from scheduler.bounds import field_limit

_NO_STATE = "nothing is stored between requests; send the whole conversation as input"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"


_TAG_FORMAT = "[{}]"  # the path in an error leaves tags in brackets out, as OpenAI's does
_discriminator = partial(type_discriminator, tag_format=_TAG_FORMAT)


def _tag(kind: str) -> Tag:
    return Tag(_TAG_FORMAT.format(kind))


class OtherPart(RequestModel):
    """A part that this server does not read, such as an image."""

    type: str


Part = Annotated[
    Annotated[TextPart, _tag("input_text")]
    | Annotated[TextPart, _tag("output_text")]
    | Annotated[TextPart, _tag("text")]
    | Annotated[RefusalPart, _tag("refusal")]
    | Annotated[OtherPart, _tag("other")],
    _discriminator("input_text", "output_text", "text", "refusal"),
]


class MessageItem(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | FailFastList[Part]


class ReasoningText(RequestModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning sent back. An answer of this server has the whole text in `content` or `summary`,
    and in `encrypted_content` if that was asked for; of another's, at least a summary can be read.
    """

    type: Literal["reasoning"]
    summary: FailFastList[ReasoningText] | None = None
    content: FailFastList[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(RequestModel):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(RequestModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | FailFastList[Part]


class ItemReference(RequestModel):
    type: Literal["item_reference"]


class OtherItem(RequestModel):
    """An item that this server does not read, such as a search on the web."""

    type: str


Item = Annotated[
    Annotated[MessageItem, _tag("message")]
    | Annotated[ReasoningItem, _tag("reasoning")]
    | Annotated[FunctionCallItem, _tag("function_call")]
    | Annotated[CustomCallItem, _tag("custom_tool_call")]
    | Annotated[CallOutputItem, _tag("function_call_output")]
    | Annotated[CallOutputItem, _tag("custom_tool_call_output")]
    | Annotated[ItemReference, _tag("item_reference")]
    | Annotated[OtherItem, _tag("other")],
    _discriminator(
        *("message", "reasoning", "function_call", "custom_tool_call", "function_call_output"),
        *("custom_tool_call_output", "item_reference"),
        default="message",
    ),
]


class FunctionTool(Options):
    FIELD_PATH: ClassVar[str] = "tools"
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(RequestModel):
    """The form of the text of a custom tool: any, or a grammar, which the model is shown."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Options):
    """A tool that takes text."""

    FIELD_PATH: ClassVar[str] = "tools"
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(RequestModel):
    """A tool that this server would have to run, or whose arguments only OpenAI's models know."""

    type: str


class NamespaceTool(Options):
    """Tools under a common name."""

    FIELD_PATH: ClassVar[str] = "tools"
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: FailFastList[
        Annotated[
            Annotated[FunctionTool, _tag("function")]
            | Annotated[CustomTool, _tag("custom")]
            | Annotated[OtherTool, _tag("other")],
            _discriminator("function", "custom"),
        ]
    ]


Tool = Annotated[
    Annotated[FunctionTool, _tag("function")]
    | Annotated[CustomTool, _tag("custom")]
    | Annotated[NamespaceTool, _tag("namespace")]
    | Annotated[OtherTool, _tag("other")],
    _discriminator("function", "custom", "namespace"),
]


class NamedTool(Options):
    """A tool by name: the one that must be called, or one of those that may be."""

    FIELD_PATH: ClassVar[str] = "tool_choice"
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Options):
    """The only tools that may be called; with mode "required", one must be."""

    FIELD_PATH: ClassVar[str] = "tool_choice"
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[FailFastList[NamedTool], Field(max_length=field_limit("tools"))]


class SchemaFormat(Options):
    FIELD_PATH: ClassVar[str] = "text.format"
    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=field_limit("name"))]  # only repeated in the answer
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    description: str | None = None  # only repeated in the answer
    strict: bool | None = None  # changes nothing: any schema is kept


ResponseFormat = TextFormat | JsonObjectFormat | SchemaFormat


class TextOptions(Options):
    """`verbosity` changes nothing here."""

    FIELD_PATH: ClassVar[str] = "text"
    format: Annotated[ResponseFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class Reasoning(Options):
    """A summary, if one is asked for, is the whole reasoning: no other is written."""

    FIELD_PATH: ClassVar[str] = "reasoning"
    effort: ReasoningEffort | None = None  # any but "none" asks for thinking, all of them alike
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


class ResponsesStreamOptions(Options):
    FIELD_PATH: ClassVar[str] = "stream_options"
    include_obfuscation: bool | None = None  # padding, of which there is none


class ResponsesRequest(RequestModel):
    FIELDS_WITHOUT_EFFECT: ClassVar[dict[str, tuple[ValuePredicate, str]]] = {
        name: FIELDS_WITHOUT_EFFECT[name]
        for name in FIELDS_WITHOUT_EFFECT.keys() - {"metadata", "best_of", "suffix"}
    } | {
        "background": (lambda value: value is False, "answers are not made in the background"),
        "client_metadata": ANY_VALUE,
        "context_management": ANY_VALUE,  # a conversation is not shortened
        "max_tool_calls": ANY_VALUE,  # limits only tools of the server
        # True is the default of OpenAI's. Nothing is stored either way, as the answer says.
        "store": (lambda value: isinstance(value, bool), "must be true or false"),
        "truncation": (
            lambda value: value == "disabled",
            "a conversation is not shortened; only 'disabled' is possible",
        ),
    }
    REFUSED_FIELDS: ClassVar[dict[str, str]] = {
        "access_programs": "access programs are not supported",
        "background_options": "answers are not made in the background",
        "conversation": _NO_STATE,
        "image": "images are not supported",
        "moderation": REFUSED_FIELDS["moderation"],
        "previous_response_id": _NO_STATE,
        "prompt": "stored prompts are not supported; send the text as input",
    }

    model: str | None = None
    input: str | FailFastList[Item]
    instructions: str | None = None
    # What is not known would come from tools of the server.
    include: FailFastList[str] | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None  # only repeated in the answer
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    # Beyond OpenAI's, as in chats:
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | FailFastList[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def includes_encrypted_content(self) -> bool:
        return INCLUDE_ENCRYPTED in (self.include or ())

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives each token of the text has; None without log probabilities."""
        if INCLUDE_LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None
