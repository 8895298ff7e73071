"""Answers of the Responses API: items of reasoning, text and calls, whole or as events.

The order of events: response.created, response.in_progress; per item response.output_item.added,
what is inside it, response.output_item.done; response.completed, or response.incomplete if a
limit cut the answer off. Inside a message or a reasoning item: content_part.added, the deltas, the
text's done, content_part.done; for reasoning as a summary, the same events of a summary.
Inside a call: function_call_arguments.delta and .done, or custom_tool_call_input.delta and .done.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, NamedTuple

from cluster.api.errors import openai_error_body
from cluster.api.parser import AnswerParser, AnswerParts, ToolCall
from cluster.api.replies import named_event
from cluster.api.responses.items import encode_reasoning
from cluster.api.responses.logprobs import MessageLogprobs
from cluster.api.responses.tools import ToolTable
from cluster.client.outputs import Chunk, Generation
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import AnswerState

# Characters of reasoning that are tokenized together to be counted, in a few milliseconds.
REASONING_PART_CHARS = 4096


class _ItemNames(NamedTuple):
    """How the text of an item is written: events of its part and its text, the name of the part's
    index in them, and the field of the item that has the part.
    """

    part_event: str
    text_event: str
    index_field: str
    parts_field: str
    part_type: str


_MESSAGE = _ItemNames("content_part", "output_text", "content_index", "content", "output_text")
_REASONING = _ItemNames(
    "content_part", "reasoning_text", "content_index", "content", "reasoning_text"
)
_SUMMARY = _ItemNames(
    "reasoning_summary_part", "reasoning_summary_text", "summary_index", "summary", "summary_text"
)


class ResponseWriter:
    """Answers one request of one output, with the same items, whole or as events."""

    def __init__(
        self,
        echo: dict[str, Any],
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        state: AnswerState,
        tools: ToolTable | None,
        summarizes: bool = False,
        includes_encrypted_content: bool = False,
        logprobs: bool = False,
    ) -> None:
        """`echo`: what the answer repeats of its request. `state`: the part with which it begins.
        `tools`: those that may be called; None if calls are text. `summarizes`: reasoning is
        written as a summary. `includes_encrypted_content`: it is repeated in the form in which
        clients send it back. `logprobs`: of messages.
        """
        self._echo, self._generation, self._tokenizer = echo, generation, tokenizer
        self._tools, self._includes_encrypted_content = tools, includes_encrypted_content
        self._parser = AnswerParser(state, looks_for_calls=tools is not None)
        self._logprobs: MessageLogprobs | None = None
        if logprobs:
            self._logprobs = MessageLogprobs(tokenizer, state, looks_for_calls=tools is not None)
        self._num_messages = 0  # that have begun
        self._num_logprobs_sent = 0  # of the last one
        self._names_by_kind = {
            "message": _MESSAGE,
            "reasoning": _SUMMARY if summarizes else _REASONING,
        }
        self._id, self._created_s = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_last_item_open = False  # the last of the items
        self._texts: list[str] = []  # of the item that is open
        self._uncounted_reasoning = ""  # that is not counted yet
        self._num_reasoning_tokens = 0
        self._num_events = 0

    def events(self, prompt_index: int, chunk: Chunk) -> bytes:
        """What a chunk adds."""
        events: list[bytes] = []
        if not self._num_events:
            for name in ("created", "in_progress"):
                events.append(self._event(name, {"response": self._response("in_progress")}))
        if self._logprobs is not None:
            self._logprobs.push(chunk.token_ids, chunk.logprobs)
            if chunk.finish_reason:
                self._logprobs.finish(is_cut_off=self._is_cut_off)
        for piece in self._parser.pieces(chunk.text):
            events += self._piece_events(piece)
        if chunk.finish_reason:
            status = _status(chunk.finish_reason)
            events += self._piece_events(self._parser.finish(is_cut_off=self._is_cut_off))
            events += self._closing_events(status)
            events.append(self._event(status, {"response": self._response(status)}))
        return b"".join(events)

    def end(self, *, includes_usage: bool) -> bytes:
        """Nothing follows the last event."""
        return b""

    def error(self, error: BaseException) -> bytes:
        """The event that ends a stream that failed. It has the `error` field that clients of the
        other streams look for.
        """
        fields_of_error = openai_error_body(error)["error"]
        fields = {name: fields_of_error[name] for name in ("code", "message", "param")}
        return self._event("error", fields | {"error": fields_of_error}, prefix="")

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        [completion] = self._generation.completions
        reason = completion.finish_reason or "stop"
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        whole_chunk = Chunk(
            index=0, text=text, token_ids=token_ids, logprobs=logprobs, finish_reason=reason
        )
        self.events(0, whole_chunk)
        return self._response(_status(reason))

    @property
    def _is_cut_off(self) -> bool:  # by a limit or a stop string
        return self._generation.completions[0].is_cut_off

    def _response(self, status: str) -> dict[str, Any]:
        incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        is_over = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "output": list(self._items) if is_over else [],
            "usage": self._usage() if is_over else None,
        } | self._echo

    def _usage(self) -> dict[str, Any]:
        """Counts of tokens."""
        num_input = self._generation.requests[0].num_prompt_tokens
        num_output = len(self._generation.completions[0].token_ids)
        num_cached = self._generation.num_cached_tokens
        num_reasoning = self._num_reasoning_tokens
        if self._uncounted_reasoning:
            num_reasoning += len(self._tokenizer.encode(self._uncounted_reasoning))
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, num_output)},
            "total_tokens": num_input + num_output,
        }

    def _count_reasoning(self, text: str) -> None:
        """Reasoning is counted by encoding its text: in parts, because all of it at the end would
        hold up others. They end before a space, where tokens do too.
        """
        self._uncounted_reasoning += text
        while len(self._uncounted_reasoning) > REASONING_PART_CHARS:
            end = self._uncounted_reasoning.rfind(" ", 1, REASONING_PART_CHARS)
            end = end if end > 0 else REASONING_PART_CHARS
            part = self._uncounted_reasoning[:end]
            self._uncounted_reasoning = self._uncounted_reasoning[end:]
            self._num_reasoning_tokens += len(self._tokenizer.encode(part))

    def _piece_events(self, piece: AnswerParts) -> list[bytes]:
        events: list[bytes] = []
        if piece.reasoning:
            self._count_reasoning(piece.reasoning)
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if text:
                events += self._switch_item_events(kind)
                self._texts.append(text)
                item_names = self._names_by_kind[kind]
                delta_fields: dict[str, Any] = {item_names.index_field: 0, "delta": text}
                if kind == "message":
                    delta_fields["logprobs"] = self._new_logprobs(self._num_logprobs_sent)
                    self._num_logprobs_sent += len(delta_fields["logprobs"])
                events.append(self._item_event(f"{item_names.text_event}.delta", delta_fields))
        for call in piece.calls:
            events += self._closing_events("completed") + self._call_events(call)
        return events

    def _switch_item_events(self, kind: str) -> list[bytes]:
        if self._is_last_item_open and self._items[-1]["type"] == kind:
            return []
        events = self._closing_events("completed")
        self._is_last_item_open = True
        item_names = self._names_by_kind[kind]
        self._items.append(_new_item(kind, item_names))
        if kind == "message":
            self._num_messages, self._num_logprobs_sent = self._num_messages + 1, 0
        item_without_parts = self._items[-1] | {item_names.parts_field: []}
        part_fields = {
            item_names.index_field: 0,
            "part": dict(self._items[-1][item_names.parts_field][0]),
        }
        return [
            *events,
            self._item_event("output_item.added", {"item": item_without_parts}),
            self._item_event(f"{item_names.part_event}.added", part_fields),
        ]

    def _closing_events(self, status: str) -> list[bytes]:
        if not self._is_last_item_open:
            return []
        self._is_last_item_open = False
        item = self._items[-1]
        item["status"] = status
        item_names = self._names_by_kind[item["type"]]
        [part] = item[item_names.parts_field]
        part["text"] = "".join(self._texts)
        self._texts.clear()
        if item["type"] == "reasoning" and self._includes_encrypted_content:
            item["encrypted_content"] = encode_reasoning(part["text"])
        text_fields = {item_names.index_field: 0, "text": part["text"]}
        if item["type"] == "message":
            part["logprobs"] = text_fields["logprobs"] = self._new_logprobs(0)
        return [
            self._item_event(f"{item_names.text_event}.done", text_fields),
            self._item_event(
                f"{item_names.part_event}.done", {item_names.index_field: 0, "part": part}
            ),
            self._item_event("output_item.done", {"item": item}),
        ]

    def _new_logprobs(self, start: int) -> list[dict[str, Any]]:
        """Those of the last message from its token `start` on, as far as they are known."""
        if self._logprobs is None or self._num_messages > len(self._logprobs.messages):
            return []
        return self._logprobs.messages[self._num_messages - 1][start:]

    def _call_events(self, call: ToolCall) -> list[bytes]:
        assert self._tools is not None
        item = self._tools.item_of(call)
        self._items.append(item)
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        call_event = "custom_tool_call_input" if is_custom else "function_call_arguments"
        done_fields = {field: item[field]} | ({} if is_custom else {"name": item["name"]})
        return [
            self._item_event(
                "output_item.added", {"item": item | {field: "", "status": "in_progress"}}
            ),
            self._item_event(f"{call_event}.delta", {"delta": item[field]}),
            self._item_event(f"{call_event}.done", done_fields),
            self._item_event("output_item.done", {"item": item}),
        ]

    def _item_event(self, name: str, fields: dict[str, Any]) -> bytes:
        """An event about the last item."""
        location: dict[str, Any] = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            location["item_id"] = self._items[-1]["id"]
        return self._event(name, location | fields)

    def _event(self, name: str, fields: dict[str, Any], prefix: str = "response.") -> bytes:
        self._num_events += 1
        return named_event(prefix + name, {"sequence_number": self._num_events - 1} | fields)


def _status(reason: str) -> str:
    return "completed" if reason == "stop" else "incomplete"


def _new_item(kind: str, item_names: _ItemNames) -> dict[str, Any]:
    part = {"type": item_names.part_type, "text": ""}
    if kind == "reasoning":
        item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid.uuid4().hex}", "summary": []}
        return item | {item_names.parts_field: [part], "status": "in_progress"}
    return {
        "type": kind,
        "id": f"msg_{uuid.uuid4().hex}",
        "role": "assistant",
        item_names.parts_field: [part | {"annotations": [], "logprobs": []}],
        "status": "in_progress",
    }
