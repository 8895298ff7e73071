"""Answers of the Messages API: blocks of thinking, text and calls, whole or as events.

The order of events: message_start; per block content_block_start, its deltas, content_block_stop;
message_delta with the reason and the counts; message_stop.

Clients send thinking back unchanged only if it is signed, so the last delta of its block is a
signature. It proves nothing and is not checked: thinking is text like any other here.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import operator
import uuid
from typing import Any

from pydantic_core import from_json

from cluster.api.errors import anthropic_error_body
from cluster.api.parser import AnswerParser, AnswerParts, ToolCall
from cluster.api.replies import TextEventTemplate, named_event
from cluster.client.outputs import Chunk, CompletionOutput, Generation
from cluster.grammar.markers import AnswerState

_EMPTY_BLOCKS = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageWriter:
    """Answers one request of one output."""

    def __init__(
        self, model: str, generation: Generation, *, state: AnswerState, looks_for_calls: bool
    ) -> None:
        """`state`: the part that begins the answer. Without `looks_for_calls`, calls are text."""
        self._model, self._generation = model, generation
        self._initial_state, self._looks_for_calls = state, looks_for_calls
        self._parser = AnswerParser(state, looks_for_calls=looks_for_calls)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._block_index = 0  # of the block that is open or opens next
        self._open_kind: str | None = None  # the kind of the block that is open
        self._thinking_hash = hashlib.sha256()  # of the block that is open
        self._open_text_template: TextEventTemplate | None = None
        self._has_calls = self._has_started = False

    def events(self, prompt_index: int, chunk: Chunk) -> bytes:
        """What a chunk adds."""
        events: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            message = self._message([], None, None)
            events.append(named_event("message_start", {"message": message}))
        for piece in self._parser.pieces(chunk.text):
            events += self._parts_events(piece)
        if chunk.finish_reason:
            completion = self._generation.completions[0]
            remaining_parts = self._parser.finish(is_cut_off=completion.is_cut_off)
            events += self._parts_events(remaining_parts) + self._closing_events()
            reason, stop_sequence = _stop_reason_and_sequence(completion, self._has_calls)
            delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
            events.append(named_event("message_delta", {"delta": delta, "usage": self._usage()}))
            events.append(named_event("message_stop", {}))
        return b"".join(events)

    def end(self, *, includes_usage: bool) -> bytes:
        """Nothing follows the last event."""
        return b""

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        [completion] = self._generation.completions
        parser = AnswerParser(self._initial_state, looks_for_calls=self._looks_for_calls)
        pieces = list(parser.pieces(completion.text))
        pieces.append(parser.finish(is_cut_off=completion.is_cut_off))
        texts_and_calls = (entry for piece in pieces for entry in _texts_and_calls(piece))
        content: list[dict[str, Any]] = []
        for kind, group in itertools.groupby(texts_and_calls, operator.itemgetter(0)):
            if kind == "tool_use":
                content += [_tool_use(call) | {"input": _input(call)} for _, call in group]
            else:
                text = "".join(text for _, text in group)
                content.append(_EMPTY_BLOCKS[kind] | {kind: text})
                if kind == "thinking":
                    content[-1]["signature"] = _signature(hashlib.sha256(text.encode()))
        has_calls = any(piece.calls for piece in pieces)
        return self._message(content, *_stop_reason_and_sequence(completion, has_calls))

    def error(self, error: BaseException) -> bytes:
        """The event that ends a stream that failed."""
        return named_event("error", anthropic_error_body(error))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop_sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        num_cached_tokens = self._generation.num_cached_tokens
        return {
            "input_tokens": self._generation.requests[0].num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": len(self._generation.completions[0].token_ids),
        }

    def _parts_events(self, parts: AnswerParts) -> list[bytes]:
        events: list[bytes] = []
        for kind, text in _texts(parts):
            events += self._switch_block_events(kind, _EMPTY_BLOCKS[kind])
            events.append(self._text_template(kind)(text))
            if kind == "thinking":
                self._thinking_hash.update(text.encode())
        for call in parts.calls:
            self._has_calls = True
            events += self._closing_events() + self._switch_block_events(
                "tool_use", _tool_use(call) | {"input": {}}
            )
            arguments = {"type": "input_json_delta", "partial_json": _input_json(call)}
            events += [self._delta(arguments), *self._closing_events()]
        return events

    def _switch_block_events(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._open_kind == kind:
            return []
        events = self._closing_events()
        self._open_kind = kind
        start = {"index": self._block_index, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": self._block_index, "delta": delta})

    def _text_template(self, kind: str) -> TextEventTemplate:
        """That of the block that is open."""
        if self._open_text_template is None:
            self._open_text_template = TextEventTemplate(
                lambda text: self._delta({"type": f"{kind}_delta", kind: text})
            )
        return self._open_text_template

    def _closing_events(self) -> list[bytes]:
        if self._open_kind is None:
            return []
        events: list[bytes] = []
        if self._open_kind == "thinking":
            signature = _signature(self._thinking_hash)
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
            self._thinking_hash = hashlib.sha256()
        events.append(named_event("content_block_stop", {"index": self._block_index}))
        self._open_kind = self._open_text_template = None
        self._block_index += 1
        return events


def _signature(thinking_hash: hashlib._Hash) -> str:
    return base64.b64encode(thinking_hash.digest()).decode()


def _texts(piece: AnswerParts) -> list[tuple[str, str]]:
    texts = (("thinking", piece.reasoning), ("text", piece.content))
    return [(kind, text) for kind, text in texts if text]


def _texts_and_calls(piece: AnswerParts) -> list[tuple[str, Any]]:
    """The texts and calls of a piece, each with the kind of its block."""
    return [*_texts(piece), *(("tool_use", call) for call in piece.calls)]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}


def _input(call: ToolCall) -> Any:
    """The arguments as an object; those of a call that is cut off as far as they go, which is what
    clients make of the same stream.
    """
    if call.is_complete:
        return json.loads(_input_json(call))
    try:
        return from_json(_input_json(call) or "{}", allow_partial=True)
    except ValueError:
        return {}


def _input_json(call: ToolCall) -> str:
    """JSON of the arguments; a value that is no object is wrapped in one, left out if cut off."""
    if not call.is_complete and not call.arguments.startswith("{"):
        return ""
    is_object = call.arguments.startswith("{")
    return call.arguments if is_object else f'{{"arguments": {call.arguments}}}'


def _stop_reason_and_sequence(
    completion: CompletionOutput, has_calls: bool
) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence)"""
    if completion.finish_reason == "length":
        return "max_tokens", None
    if completion.stop_string is not None:
        return "stop_sequence", completion.stop_string
    return "tool_use" if has_calls else "end_turn", None
