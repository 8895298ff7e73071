"""Bodies of answers, whole and as events of a stream, in OpenAI's form.

A writer belongs to one request. It turns the chunks of its outputs into events, or the finished
outputs into one body; both go through the same parser and the same helpers, so that they agree.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from cluster.api.errors import openai_error_body
from cluster.api.parser import AnswerParser, AnswerParts, ToolCall
from cluster.api.prompts_scored import LogprobEntries, clamped_logprob, prompt_logprobs_field
from cluster.client.outputs import Chunk, CompletionOutput, Generation
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import AnswerState
from scheduler.messages import TokenLogprobs

DONE_EVENT = b"data: [DONE]\n\n"

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Line ends for some readers of streams, and halves of characters, which UTF-8 does not have.
_UNSAFE_CHARACTERS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
# Levels at which `json_pieces` looks into its value: body, choices, choice, logprobs, content.
_MAX_DEPTH = 5
_ITEMS_PER_PIECE = 64  # items of iterators that are encoded together
_FLAT_ITEMS_PER_PIECE = 4096  # items of lists of numbers or texts, or of deeper ones


def encode_json(value: object) -> str:
    """JSON in a single line. Numbers that JSON does not have become null."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text = _ENCODER.encode(_non_finite_to_none(value))
    return text if text.isascii() else _UNSAFE_CHARACTERS.sub(_escaped, text)


def json_pieces(value: Any, depth: int = 0) -> Iterator[bytes]:
    """A large value in the form of `encode_json`, a little at a time: the encoder holds the
    interpreter until it returns. Iterators become lists, of which only a part exists at a time.
    """
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        yield from _object_pieces(value, depth)
    elif isinstance(value, list) and depth < _MAX_DEPTH and isinstance(next(iter(value), 0), dict):
        yield b"["
        for index, item in enumerate(value):
            yield b"," * (index > 0)
            yield from json_pieces(item, depth + 1)
        yield b"]"
    elif isinstance(value, list | Iterator):
        items_per_piece = _ITEMS_PER_PIECE if isinstance(value, Iterator) else _FLAT_ITEMS_PER_PIECE
        yield b"["
        items, is_first_part = iter(value), True
        while part := list(islice(items, items_per_piece)):
            yield b"," * (not is_first_part)
            yield encode_json(part)[1:-1].encode()
            is_first_part = False
        yield b"]"
    else:
        yield encode_json(value).encode()


def _object_pieces(value: dict[str, Any], depth: int) -> Iterator[bytes]:
    yield b"{"
    for index, (key, item) in enumerate(value.items()):
        yield b"," * (index > 0) + encode_json(key).encode() + b":"
        yield from json_pieces(item, depth + 1)
    yield b"}"


def _non_finite_to_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _non_finite_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_non_finite_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(unsafe: re.Match[str]) -> str:
    return f"\\u{ord(unsafe[0]):04x}"


class TextEventTemplate:
    """An event of which only a text changes from one to the next: the rest is encoded once."""

    _PLACEHOLDER = uuid.uuid4().hex  # in the place of the text

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make`: the event for a text."""
        self._bytes_around_text = make(self._PLACEHOLDER).split(
            encode_json(self._PLACEHOLDER).encode()
        )

    def __call__(self, text: str) -> bytes:
        """What `make` would return."""
        return encode_json(text).encode().join(self._bytes_around_text)


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {encode_json(body)}\n\n".encode()


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """One server-sent event with a name, which its body repeats as its type."""
    return f"event: {name}\ndata: {encode_json({'type': name} | body)}\n\n".encode()


def usage_of(generations: list[Generation]) -> dict[str, Any]:
    """Token counts of a request: of its prompts, each counted once, and of all outputs."""
    num_prompt_tokens = sum(generation.requests[0].num_prompt_tokens for generation in generations)
    num_output_tokens = sum(len(c.token_ids) for g in generations for c in g.completions)
    num_cached_tokens = sum(generation.num_cached_tokens for generation in generations)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


class Writer(Protocol):
    """Answers one request."""

    def events(self, prompt_index: int, chunk: Chunk) -> bytes:
        """The events for a chunk of the prompt at `prompt_index`."""

    def end(self, *, includes_usage: bool) -> bytes:
        """What follows the last event."""

    def body(self) -> dict[str, Any]:
        """The whole answer, once every output has finished, for `json_pieces`."""

    def error(self, error: BaseException) -> bytes:
        """The events that end a stream that failed."""


class OpenAIWriter:
    """The fields that all events and bodies of one request share."""

    CHUNK_OBJECT: str

    def __init__(
        self,
        id_prefix: str,
        kind: str,
        model: str,
        generations: list[Generation],
        includes_token_ids: bool,
    ) -> None:
        """`includes_token_ids`: whether answers include those of prompts and outputs."""
        self._generations = generations
        self._includes_token_ids = includes_token_ids
        self._kind = kind
        self._fields: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _events(
        self, kind: str, choices: list[dict[str, Any]], more_fields: dict[str, Any] | None = None
    ) -> bytes:
        common_json = encode_json(self._fields | {"object": kind} | (more_fields or {}))[:-1]
        return "".join(
            f'data: {common_json},"choices":[{encode_json(choice)}]}}\n\n' for choice in choices
        ).encode()

    def end(self, *, includes_usage: bool) -> bytes:
        if not includes_usage:
            return DONE_EVENT
        usage = usage_of(self._generations)
        return (
            event(self._fields | {"object": self.CHUNK_OBJECT, "choices": [], "usage": usage})
            + DONE_EVENT
        )

    def error(self, error: BaseException) -> bytes:
        return event(openai_error_body(error)) + DONE_EVENT

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = usage_of(self._generations)
        return self._fields | {"object": self._kind, "choices": choices, "usage": usage}


class ChatWriter(OpenAIWriter):
    """Answers a chat."""

    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        generations: list[Generation],
        tokenizer: Tokenizer,
        *,
        state: AnswerState,
        looks_for_calls: bool,
        includes_token_ids: bool = False,
        num_prompt_top_logprobs: int | None = None,
    ) -> None:
        """`state`: the part with which an answer begins. `looks_for_calls`: as `AnswerParser`.
        `num_prompt_top_logprobs`: how many alternatives to report per token of the prompt, None for
        no log probabilities of it.
        """
        super().__init__(
            "chatcmpl", "chat.completion", model, generations, includes_token_ids=includes_token_ids
        )
        self._tokenizer, self._initial_state, self._looks_for_calls = (
            tokenizer,
            state,
            looks_for_calls,
        )
        self._num_prompt_top_logprobs = num_prompt_top_logprobs
        self._choices: dict[int, _ChatChoice] = {}
        self._is_text_only = not includes_token_ids  # as long as no chunk has log probabilities

    def events(self, prompt_index: int, chunk: Chunk) -> bytes:
        choice = self._choices.get(chunk.index)
        start = b""
        if choice is None:
            choice = self._choices[chunk.index] = self._new_choice(chunk.index)
            role_choice = _choice_chunk(chunk.index, {"role": "assistant", "content": ""})
            start = self._events(self.CHUNK_OBJECT, [role_choice], self._prompt_token_ids_field())
        parts = choice.parser.push(chunk.text)
        self._is_text_only = self._is_text_only and chunk.logprobs is None
        if self._is_text_only and not (start or chunk.finish_reason or parts.calls):
            return self._text_events(choice, parts)
        deltas = choice.deltas(parts)
        if chunk.finish_reason:
            is_cut_off = self._generations[0].completions[chunk.index].is_cut_off
            deltas += choice.deltas(choice.parser.finish(is_cut_off=is_cut_off))
        choice.withheld_logprobs += self._logprobs(chunk.token_ids, chunk.logprobs)
        choice.token_ids += chunk.token_ids
        choices = [_choice_chunk(chunk.index, delta) for delta in deltas]
        if deltas:
            choices[0]["logprobs"] = choice.take_logprobs()
        if chunk.finish_reason:
            end_choice = _choice_chunk(chunk.index, {})
            end_choice["logprobs"] = choice.take_logprobs()
            end_choice["finish_reason"] = _finish_reason(chunk.finish_reason, choice.calls)
            choices.append(end_choice)
        if choices and self._includes_token_ids:
            choices[0]["token_ids"], choice.token_ids = choice.token_ids, []
        return start + self._events(self.CHUNK_OBJECT, choices)

    def _text_events(self, choice: _ChatChoice, parts: AnswerParts) -> bytes:
        """The events for parts without calls, where nothing else is due."""
        events = choice.reasoning_template(parts.reasoning) if parts.reasoning else b""
        return events + (choice.content_template(parts.content) if parts.content else b"")

    def _new_choice(self, index: int) -> _ChatChoice:
        def reasoning(text: str) -> bytes:
            return self._events(self.CHUNK_OBJECT, [_choice_chunk(index, _reasoning(text))])

        def content(text: str) -> bytes:
            return self._events(self.CHUNK_OBJECT, [_choice_chunk(index, {"content": text})])

        parser = AnswerParser(self._initial_state, looks_for_calls=self._looks_for_calls)
        return _ChatChoice(parser, TextEventTemplate(reasoning), TextEventTemplate(content))

    def body(self) -> dict[str, Any]:
        [generation] = self._generations
        choices = [self._choice(completion) for completion in generation.completions]
        prompt_logprobs = prompt_logprobs_field(
            self._tokenizer, generation, self._num_prompt_top_logprobs
        )
        return self._body(choices) | self._prompt_token_ids_field() | prompt_logprobs

    def _prompt_token_ids_field(self) -> dict[str, Any]:
        if not self._includes_token_ids:
            return {}
        return {"prompt_token_ids": self._generations[0].prompt_token_ids}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        parser = AnswerParser(self._initial_state, looks_for_calls=self._looks_for_calls)
        parts = parser.push(completion.text)
        remaining_parts = parser.finish(is_cut_off=completion.is_cut_off)
        reasoning = parts.reasoning + remaining_parts.reasoning
        content: str | None = parts.content + remaining_parts.content
        calls = parts.calls + remaining_parts.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
            "reasoning": reasoning or None,
            "reasoning_content": reasoning or None,
        }
        if calls:
            message["tool_calls"] = [_tool_call(call.name, call.arguments) for call in calls]
        entries = self._logprobs(completion.token_ids, completion.logprobs)
        has_logprobs = any(completion.logprobs or ())
        return {
            "index": completion.index,
            "message": message,
            "logprobs": {"content": entries, "refusal": None} if has_logprobs else None,
            "finish_reason": _finish_reason(completion.finish_reason, calls),
        } | ({"token_ids": completion.token_ids} if self._includes_token_ids else {})

    def _logprobs(
        self, token_ids: list[int], logprobs: LogprobEntries | None
    ) -> Iterator[dict[str, Any]]:
        for token_id, entry in zip(token_ids, logprobs or [], strict=False):
            if entry is not None:
                yield token_entry(self._tokenizer, token_id, entry)


def token_entry(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
    """A token with its log probability and its alternatives, in OpenAI's form."""
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return _token(tokenizer, token_id, entry.logprob) | {
        "top_logprobs": [_token(tokenizer, top_token_id, value) for top_token_id, value in top]
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": clamped_logprob(logprob),
    }


class _ChatChoice:
    """One output of a chat while it streams."""

    def __init__(
        self,
        parser: AnswerParser,
        reasoning_template: TextEventTemplate,
        content_template: TextEventTemplate,
    ) -> None:
        self.parser = parser
        self.reasoning_template, self.content_template = reasoning_template, content_template
        self.calls: list[ToolCall] = []
        # Logprobs that are not sent yet: of chunks that gave no delta.
        self.withheld_logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []  # not sent yet

    def deltas(self, parts: AnswerParts) -> list[dict[str, Any]]:
        """What is new, in the order of the answer: reasoning, content, calls."""
        deltas: list[dict[str, Any]] = []
        if parts.reasoning:
            deltas.append(_reasoning(parts.reasoning))
        if parts.content:
            deltas.append({"content": parts.content})
        for call in parts.calls:
            index = {"index": len(self.calls)}
            deltas.append({"tool_calls": [index | _tool_call(call.name, call.arguments)]})
            self.calls.append(call)
        return deltas

    def take_logprobs(self) -> dict[str, Any] | None:
        """The logprobs of the text that is released now."""
        released_logprobs, self.withheld_logprobs = self.withheld_logprobs, []
        return {"content": released_logprobs, "refusal": None} if released_logprobs else None


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def _choice_chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _finish_reason(reason: str | None, calls: list[ToolCall]) -> str | None:
    """A call that a stop string has cut off is not to be carried out."""
    has_complete_calls = bool(calls) and all(call.is_complete for call in calls)
    return "tool_calls" if has_complete_calls and reason == "stop" else reason
