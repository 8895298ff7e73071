"""The input of a response as messages that the chat template reads."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from cluster.api.omissions import Omissions
from cluster.api.responses.schema import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemReference,
    MessageItem,
    OtherItem,
    OtherPart,
    Part,
    ReasoningItem,
)
from cluster.api.responses.tools import custom_tool_arguments, full_name
from cluster.api.schema import RefusalPart, template_call
from cluster.client.prompts import Message
from scheduler.errors import RequestError

_ENCRYPTED_PREFIX = "eagleray."  # begins encrypted reasoning of this server


def messages_of(
    items: str | Sequence[Item], omissions: Omissions, *, arguments_as_text: bool
) -> list[Message]:
    """Consecutive items of the assistant become one message. Raises `RequestError`."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    turn: Message | None = None  # the assistant's message, while more may belong to it
    for item in items:
        if isinstance(item, OtherItem):
            omissions.add(f"input.{item.type}")
        elif isinstance(item, ItemReference):
            raise RequestError(
                "an item refers to one of an earlier answer, and nothing is stored between"
                " requests; send the item itself",
                "input",
            )
        elif isinstance(item, CallOutputItem):
            content = _text(item.output, "output", omissions)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            content = _text(item.content, "input", omissions)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": content})
            turn = None
        else:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item, omissions, arguments_as_text)
    if not messages or messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last item must be a user's message or the output of a call: continuing the"
            " beginning of an answer is not supported",
            "input",
        )
    return messages


def encode_reasoning(reasoning: str) -> str:
    """Reasoning in the form in which clients send it back without looking at it. Anybody can read
    it: it is the user's own.
    """
    return _ENCRYPTED_PREFIX + base64.b64encode(reasoning.encode()).decode()


def _add(
    turn: Message,
    item: MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem,
    omissions: Omissions,
    arguments_as_text: bool,
) -> None:
    if isinstance(item, MessageItem):
        text = _text(item.content, "input", omissions)
        turn["content"] = "\n".join(filter(None, [turn["content"], text]))
    elif isinstance(item, ReasoningItem):
        if text := _reasoning(item, omissions):
            earlier_reasoning = turn.get("reasoning_content")
            turn["reasoning_content"] = "\n".join(filter(None, [earlier_reasoning, text]))
    else:
        arguments = (
            item.arguments
            if isinstance(item, FunctionCallItem)
            else custom_tool_arguments(item.input)
        )
        name = full_name(item.name, item.namespace)
        call = template_call(item.call_id, name, arguments, arguments_as_text=arguments_as_text)
        turn.setdefault("tool_calls", []).append(call)


def _reasoning(item: ReasoningItem, omissions: Omissions) -> str:
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        text = _decode_reasoning(item.encrypted_content)
        if text is not None:
            return text
        omissions.add("input.reasoning.encrypted_content")
    return "\n".join(part.text for part in item.summary or ())


def _decode_reasoning(content: str) -> str | None:
    """None for the reasoning of another server."""
    if not content.startswith(_ENCRYPTED_PREFIX):
        return None
    try:
        return base64.b64decode(content[len(_ENCRYPTED_PREFIX) :], validate=True).decode()
    except ValueError:
        return None


def _text(content: str | Sequence[Part], holder: str, omissions: Omissions) -> str:
    """The text of the parts, a line for any other. `holder`: what has them, to name omissions."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, OtherPart):
            texts.append(omissions.leave_out(holder, part.type))
        else:
            texts.append(part.refusal if isinstance(part, RefusalPart) else part.text)
    return "\n".join(texts)
