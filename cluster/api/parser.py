"""Reasoning and tool calls in the text of a Qwen3 answer, found while the text arrives.

The text is cut by four markers: `<think>`, `</think>`, `<tool_call>` and `</tool_call>` (the Hermes
form: a JSON object with `name` and `arguments` between the last two). Whole answers go through the
same parser in one push, and however the text is cut into pushes, the parts add up to the same. For
that, text that may be the beginning of a marker is held back, and so are line ends that may turn
out to be next to a marker, where they are part of the format and not of the text.

A call is reported when it is complete, with the arguments exactly as the model wrote them. A call
that is not JSON, or is cut off, stays in the content unchanged: nothing is completed or dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.client.thinking import CALL, END_CALL, END_THINK, THINK, State

_LINE_ENDS = "\n\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(slots=True)
class Parts:
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Parses one answer."""

    def __init__(self, state: State, *, tools: bool) -> None:
        """Without `tools`, calls are left in the content."""
        self._state = state
        self._tools = tools
        self._text = ""  # not yet reported
        self._skips_line_ends = True  # line ends after a marker belong to it

    def push(self, text: str) -> Parts:
        """Parse the next text. Returns what it adds to the answer."""
        added = Parts()
        for parts in self.pieces(text):
            added.reasoning += parts.reasoning
            added.content += parts.content
            added.calls += parts.calls
        return added

    def pieces(self, text: str) -> Iterator[Parts]:
        """As `push`, in the order of the text: each piece is reasoning, content or a call."""
        self._text += text
        goes_on = True
        while goes_on:
            parts = Parts()
            goes_on = self._advance(parts)
            if parts:
                yield parts

    def finish(self) -> Parts:
        """What is left at the end of the answer."""
        parts = Parts()
        if self._state is State.CALL:
            self._text = CALL + self._text
        if self._state is State.REASONING:
            parts.reasoning = self._text
        else:
            parts.content = self._text
        self._text = ""
        return parts

    def _advance(self, parts: Parts) -> bool:
        """Report what is certain. True if a marker was passed, so that more may be certain now."""
        if self._state is State.UNDECIDED:
            return self._decide()
        if self._state is State.CALL:
            return self._take_call(parts)
        if self._skips_line_ends:
            self._text = self._text.lstrip(_LINE_ENDS)
            self._skips_line_ends = not self._text
        if self._state is State.REASONING:
            text, is_passed = self._until(END_THINK, State.CONTENT)
            parts.reasoning += text
            return is_passed
        if not self._tools:
            parts.content, self._text = parts.content + self._text, ""
            return False
        text, is_passed = self._until(CALL, State.CALL)
        parts.content += text
        return is_passed

    def _decide(self) -> bool:
        start = self._text.lstrip()
        if start.startswith(THINK):
            self._text, self._state = start[len(THINK) :], State.REASONING
            return True
        if THINK.startswith(start):
            return False
        self._state, self._skips_line_ends = State.CONTENT, False
        return True

    def _until(self, marker: str, following: State) -> tuple[str, bool]:
        """(text before a marker, without the line ends next to it, or the text that is certain if
        there is no marker yet; whether there is one).
        """
        before, found, after = self._text.partition(marker)
        if found:
            self._text, self._state, self._skips_line_ends = after, following, True
            return before.rstrip(_LINE_ENDS), True
        num_begun = next(n for n in range(len(marker), -1, -1) if before.endswith(marker[:n]))
        certain = before[: len(before) - num_begun].rstrip(_LINE_ENDS)
        self._text = before[len(certain) :]
        return certain, False

    def _take_call(self, parts: Parts) -> bool:
        end = _end_of_call(self._text)
        if end is None:
            return False
        body, self._text = self._text[:end], self._text[end + len(END_CALL) :]
        self._state, self._skips_line_ends = State.CONTENT, True
        call = _read_call(body)
        if call is not None:
            parts.calls.append(call)
        else:
            parts.content += CALL + body + END_CALL
            self._skips_line_ends = False
        return True


def _end_of_call(text: str) -> int | None:
    """The position of the end marker of a call, ignoring those inside JSON strings."""
    start = 0
    while (end := text.find(END_CALL, start)) >= 0:
        if not _ends_in_string(text[:end]):
            return end
        start = end + 1
    return None


def _ends_in_string(text: str) -> bool:
    """Whether a JSON string is open at the end of a text."""
    is_open = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = is_open
        elif char == '"':
            is_open = not is_open
    return is_open


def _read_call(body: str) -> ToolCall | None:
    """The call in a JSON object, None if there is none."""
    try:
        value = json.loads(body)
        arguments = _source_of("arguments", body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() - {"name", "arguments"}:
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    return ToolCall(name=name, arguments=arguments or "{}")


def _source_of(key: str, text: str) -> str | None:
    """The value of a key exactly as it is written in a JSON object. Raises `ValueError`."""
    decoder, found = json.JSONDecoder(), None
    place = text.index("{") + 1
    while True:
        place = _skip_space(text, place)
        if text[place] == "}":
            return found
        name, place = decoder.raw_decode(text, place)
        place = _skip_space(text, place) + 1  # the colon
        start = _skip_space(text, place)
        _, place = decoder.raw_decode(text, start)
        if name == key:
            found = text[start:place]
        place = _skip_space(text, place)
        place += text[place] == ","


def _skip_space(text: str, place: int) -> int:
    while text[place] in " \t\n\r":
        place += 1
    return place
