"""The requests of Anthropic's Messages API (docs.anthropic.com, "Messages"), with the fields and
blocks that are honored. What else is inside a message or a tool is ignored: agents send what other
servers have answered.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cluster.api.fields import ANY_VALUE, FIELDS_WITHOUT_EFFECT, ValuePredicate
from cluster.api.schema import (
    FailFastList,
    Options,
    ReasoningEffort,
    RequestModel,
    ToolName,
    type_discriminator,
)


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(RequestModel):
    """Reasoning sent back. Any signature will do, of this server or another."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class SearchResultBlock(RequestModel):
    type: Literal["search_result"]
    title: str
    source: str
    content: FailFastList[TextBlock]


class ToolReferenceBlock(RequestModel):
    """The name of a tool that a search for tools has brought."""

    type: Literal["tool_reference"]
    tool_name: str


class CompactionBlock(RequestModel):
    """A summary in the place of earlier messages."""

    type: Literal["compaction"]
    content: str | None = None


class OtherBlock(RequestModel):
    """A block that this server does not read, such as an image."""

    type: str


class DocumentSource(RequestModel):
    """`data` is read if the type is `text`, `content` if it is `content`; other types are not."""

    type: str
    data: str | None = None
    content: (
        str
        | FailFastList[
            Annotated[
                Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")],
                type_discriminator("text"),
            ]
        ]
        | None
    ) = None


class DocumentBlock(RequestModel):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None


ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")],
    type_discriminator("text", "document", "search_result", "tool_reference"),
]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | FailFastList[ResultPart] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[OtherBlock, Tag("other")],
    type_discriminator(
        *("text", "thinking", "tool_use", "tool_result", "document", "search_result"),
        "compaction",
    ),
]


class Message(RequestModel):
    """A message of role `system` stands where it is in the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | FailFastList[AnyBlock]


class CustomTool(Options):
    """A tool that the client runs."""

    FIELD_PATH: ClassVar[str] = "tools"
    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None  # changes nothing: every prefix is cached


class TypedTool(RequestModel):
    """A tool without a schema, known to Anthropic's models by its type: it is left out."""

    type: str
    name: str | None = None


def _kind_of_tool(tool: Any) -> str:
    is_typed = isinstance(tool, dict) and "input_schema" not in tool and bool(tool.get("type"))
    # One in OpenAI's form is the client's, and refused for what it lacks.
    return "typed" if is_typed and tool["type"] not in ("custom", "function") else "custom"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[TypedTool, Tag("typed")],
    Discriminator(_kind_of_tool),
]


class ToolChoice(Options):
    FIELD_PATH: ClassVar[str] = "tool_choice"
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Options):
    """A thinking budget has no effect: thinking ends when the model ends it, or at `max_tokens`."""

    FIELD_PATH: ClassVar[str] = "thinking"
    type: Literal["enabled", "adaptive", "disabled"]  # the first two do not differ
    budget_tokens: int | None = None
    display: str | None = None  # changes nothing: thinking is always part of the answer


class OutputFormat(Options):
    FIELD_PATH: ClassVar[str] = "output_config.format"
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class OutputConfig(Options):
    """effort: any but "none" asks for thinking, where the request does not say and the template can
    switch it; the levels do not differ.
    """

    FIELD_PATH: ClassVar[str] = "output_config"
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class ConversationRequest(RequestModel):
    """What both requests have in common: all that becomes tokens."""

    FIELDS_WITHOUT_EFFECT: ClassVar[dict[str, tuple[ValuePredicate, str]]] = (
        FIELDS_WITHOUT_EFFECT
        | dict.fromkeys(
            (
                *("betas", "cache_control", "context_management", "diagnostics", "inference_geo"),
                *("speed", "user_profile_id"),
            ),
            ANY_VALUE,
        )
    )

    model: str | None = None
    messages: Annotated[FailFastList[Message], Field(min_length=1)]
    # Of tools that the server would run; left out, and named in the answer.
    container: Any = None
    mcp_servers: FailFastList[Any] | None = None
    system: str | FailFastList[TextBlock] | None = None
    tools: FailFastList[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # of older betas, for `output_config.format`


class MessagesRequest(ConversationRequest):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: FailFastList[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class CountTokensRequest(ConversationRequest):
    """What else a `MessagesRequest` may have changes no number of tokens."""

    FIELDS_WITHOUT_EFFECT: ClassVar[dict[str, tuple[ValuePredicate, str]]] = (
        ConversationRequest.FIELDS_WITHOUT_EFFECT
        | dict.fromkeys(
            sorted(MessagesRequest.field_names() - ConversationRequest.field_names()),
            ANY_VALUE,
        )
    )
