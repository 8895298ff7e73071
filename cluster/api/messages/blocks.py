"""The messages of the Messages API as the chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.api.messages.schema import (
    AnyBlock,
    CompactionBlock,
    DocumentBlock,
    Message,
    OtherBlock,
    ResultPart,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from cluster.api.omissions import Omissions
from cluster.client.prompts import Message as Turn
from scheduler.errors import RequestError


def turns_of(
    messages: Sequence[Message], omissions: Omissions, *, arguments_as_text: bool
) -> Iterator[Turn]:
    """Tool results become turns, before the rest of their message. Raises `RequestError`."""
    for message in messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield from _assistant_turn(message.content, omissions, arguments_as_text)
        else:
            yield from _user_turns(message.role, message.content, omissions)


def text_of(content: str | Sequence[TextBlock]) -> str:
    """The text of blocks of text, one block a line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _assistant_turn(
    blocks: Sequence[AnyBlock], omissions: Omissions, arguments_as_text: bool
) -> Iterator[Turn]:
    """One turn, or none if nothing of it is left: other servers answer with blocks of theirs."""
    texts: list[str] = []
    thinking_texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thinking_texts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            text = json.dumps(block.input, ensure_ascii=False) if arguments_as_text else None
            function = {"name": block.name, "arguments": block.input if text is None else text}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise _misplaced_blocks_error("assistant")
        elif isinstance(block, CompactionBlock):
            texts += [block.content] if block.content else []
        else:
            omissions.add(f"messages.{block.type}")
    if blocks and not (texts or thinking_texts or calls):
        return
    turn: Turn = {"role": "assistant", "content": "\n".join(texts)}
    if any(thinking_texts):
        turn["reasoning_content"] = "\n".join(thinking_texts)
    if calls:
        turn["tool_calls"] = calls
    yield turn


def _user_turns(role: str, blocks: Sequence[AnyBlock], omissions: Omissions) -> Iterator[Turn]:
    texts: list[str] = []
    has_results = False
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            has_results = True
            yield _tool_result_turn(block, omissions)
        elif isinstance(block, ThinkingBlock | ToolUseBlock):
            raise _misplaced_blocks_error(role)
        elif isinstance(block, CompactionBlock):
            texts += [block.content] if block.content else []
        else:
            texts.append(_part_text(block, "messages", omissions))
    if texts or not has_results:
        yield {"role": role, "content": "\n".join(texts)}


def _misplaced_blocks_error(role: str) -> RequestError:
    return RequestError(f"a message of role {role} has blocks of the other role", "messages")


def _tool_result_turn(block: ToolResultBlock, omissions: Omissions) -> Turn:
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(_part_text(part, "tool_result", omissions) for part in content)
    if block.is_error:
        content = f"Error: {content}"
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _part_text(part: ResultPart, holder: str, omissions: Omissions) -> str:
    """The text of a part, or a line in its place. `holder`: what has it, to name omissions."""
    if isinstance(part, TextBlock):
        return part.text
    if isinstance(part, SearchResultBlock):
        return "\n".join([part.title, part.source, text_of(part.content)])
    if isinstance(part, DocumentBlock) and (text := _document_text(part, omissions)) is not None:
        return "\n".join(filter(None, [part.title, part.context, text]))
    if not isinstance(part, OtherBlock | DocumentBlock):
        return part.tool_name
    return omissions.leave_out(holder, part.type)


def _document_text(document: DocumentBlock, omissions: Omissions) -> str | None:
    """None for a document that is not text."""
    source = document.source
    if source.type == "text":
        return source.data
    if source.type != "content" or source.content is None:
        return None
    if isinstance(source.content, str):
        return source.content
    return "\n".join(_part_text(part, "document", omissions) for part in source.content)
