"""The requests of Anthropic's Messages API (docs.anthropic.com, "Messages"), with the fields and
blocks that are honored; others are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.schema import ListOf, Model, Name


class Block(Model):
    """Base of the blocks. `cache_control` changes nothing: every prefix is cached."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[TextBlock] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Model):
    role: Literal["user", "assistant"]
    content: str | ListOf[AnyBlock]


class CustomTool(Block):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """A thinking budget has no effect: thinking ends when the model ends it, or at `max_tokens`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class CountTokensRequest(Model):
    model: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)]
    system: str | ListOf[TextBlock] | None = None
    tools: ListOf[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: ListOf[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
