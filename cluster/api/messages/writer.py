"""Answers of the Messages API: blocks of thinking, text and calls, whole or as events.

The order of events: message_start; per block content_block_start, its deltas, content_block_stop;
message_delta with the reason and the counts; message_stop.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from cluster.api.parser import AnswerParser, Parts, ToolCall
from cluster.api.replies import encode_json
from cluster.client.outputs import Chunk, CompletionOutput, Generation
from cluster.client.thinking import State

_EMPTY = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageWriter:
    """Answers one request of one output."""

    def __init__(self, model: str, generation: Generation, *, state: State, tools: bool) -> None:
        """As `ChatWriter`."""
        self._model, self._generation = model, generation
        self._state, self._tools = state, tools
        self._parser = AnswerParser(state, tools=tools)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the block that is not closed yet
        self._has_calls = self._has_started = False

    def events(self, place: int, chunk: Chunk) -> bytes:
        """What a chunk adds."""
        events: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            message = self._message([], None, None)
            events.append(named_event("message_start", {"message": message}))
        events += self._of_parts(self._parser.push(chunk.text))
        if chunk.finish_reason:
            events += self._of_parts(self._parser.finish()) + self._closed()
            done = self._generation.completions[0]
            reason, sequence = _stop(done, self._has_calls)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            events.append(named_event("message_delta", {"delta": delta, "usage": self._usage()}))
            events.append(named_event("message_stop", {}))
        return b"".join(events)

    def end(self, *, includes_usage: bool) -> bytes:
        """Nothing follows the last event."""
        return b""

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        [done] = self._generation.completions
        parser = AnswerParser(self._state, tools=self._tools)
        parts, rest = parser.push(done.text), parser.finish()
        content: list[dict[str, Any]] = []
        if thinking := parts.reasoning + rest.reasoning:
            content.append(_EMPTY["thinking"] | {"thinking": thinking})
        if text := parts.content + rest.content:
            content.append(_EMPTY["text"] | {"text": text})
        calls = parts.calls + rest.calls
        content += [_tool_use(call) | {"input": _input(call)} for call in calls]
        return self._message(content, *_stop(done, bool(calls)))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        cached = self._generation.num_cached_tokens
        return {
            "input_tokens": self._generation.requests[0].num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(self._generation.completions[0].token_ids),
        }

    def _of_parts(self, parts: Parts) -> list[bytes]:
        events: list[bytes] = []
        for kind, text in (("thinking", parts.reasoning), ("text", parts.content)):
            if text:
                events += self._opened(kind, _EMPTY[kind])
                events.append(self._delta({"type": f"{kind}_delta", kind: text}))
        for call in parts.calls:
            self._has_calls = True
            events += self._closed() + self._opened("tool_use", _tool_use(call) | {"input": {}})
            arguments = {"type": "input_json_delta", "partial_json": call.arguments}
            events += [self._delta(arguments), *self._closed()]
        return events

    def _opened(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        events = self._closed()
        self._open = kind
        start = {"index": self._num_blocks, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._num_blocks += 1
        return [named_event("content_block_stop", {"index": self._num_blocks - 1})]


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """One server-sent event with a name, which its body repeats."""
    return f"event: {name}\ndata: {encode_json({'type': name} | body)}\n\n".encode()


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}


def _input(call: ToolCall) -> Any:
    """The arguments, which are JSON, as an object; what is none stays visible."""
    value = json.loads(call.arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def _stop(done: CompletionOutput, has_calls: bool) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence)"""
    if done.finish_reason == "length":
        return "max_tokens", None
    if done.stop_string is not None:
        return "stop_sequence", done.stop_string
    return "tool_use" if has_calls else "end_turn", None
