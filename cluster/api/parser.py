"""Reasoning and tool calls in the text of a Qwen3 answer, found while the text arrives.

The text is cut by four markers: `<think>`, `</think>`, `<tool_call>` and `</tool_call>` (the Hermes
form: a JSON object with `name` and `arguments` between the last two). Whole answers go through the
same parser in one push, and however the text is cut into pushes, the parts add up to the same. For
that, text that may be the beginning of a marker is held back, and so are line ends that may turn
out to be next to a marker, where they are part of the format and not of the text.

A call is reported when it is complete, with the arguments exactly as the model wrote them. A call
that is not JSON stays in the content unchanged: nothing is completed or dropped. So does one that
readers of JSON may refuse: with a number beyond floats, or nested very deep. A call that is open
when the answer is cut off because it is too long is reported with the arguments that it has by
then; if it has no name yet, it is dropped, so that no content ends in half of a call.

However long an answer or an open call gets, each character is looked at a constant number of times:
what has been scanned and is held back is kept in pieces, apart from the few characters whose
meaning depends on the next ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.grammar.markers import CALL, END_CALL, END_THINK, LINE_ENDS, THINK, AnswerState

MAX_DEPTH = 100  # of objects and arrays in a call, with the call's own object

_LEADING_LINE_ENDS = re.compile(r"[\n\r]*")
_LEADING_SPACE = re.compile(r"\s*")
_QUOTE_OR_END = re.compile(f'"|{END_CALL}')
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_REST_OF_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)  # up to its quote
_PARTIAL_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*+")\s*'
    r'(?:,\s*"arguments"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function; `arguments` is JSON, or the beginning of JSON unless `is_complete`."""

    name: str
    arguments: str
    is_complete: bool = True


@dataclass(slots=True)
class AnswerParts:
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Parses one answer.

    `_text[_offset:]` has not been scanned yet. `_withheld_pieces` are scanned but not reported:
    space before the first text, line ends that may be next to a marker, or the beginning of a call.
    """

    def __init__(self, state: AnswerState, *, looks_for_calls: bool) -> None:
        """Without `looks_for_calls`, calls are left in the content."""
        self._state = state
        self._looks_for_calls = looks_for_calls
        self._text, self._offset = "", 0
        self._withheld_pieces: list[str] = []
        self._last_marker_text = ""  # the last marker, with the line ends before it
        self._is_in_string = False  # whether what is held of a call ends in a JSON string
        self._skips_line_ends = True  # line ends after a marker belong to it

    @property
    def state(self) -> AnswerState:
        """The part of the answer that the next text belongs to."""
        return self._state

    def push(self, text: str) -> AnswerParts:
        """Parse the next text. Returns what it adds to the answer."""
        if (plain_parts := self._plain_parts(text)) is not None:
            return plain_parts
        pieces = list(self.pieces(text))
        return AnswerParts(
            reasoning="".join(piece.reasoning for piece in pieces),
            content="".join(piece.content for piece in pieces),
            calls=[call for piece in pieces for call in piece.calls],
        )

    def pieces(self, text: str) -> Iterator[AnswerParts]:
        """As `push`, in the order of the text: each piece is reasoning, content or a call."""
        if (plain_parts := self._plain_parts(text)) is not None:
            yield plain_parts
            return
        self._text, self._offset = self._text[self._offset :] + text, 0
        may_have_more = True
        while may_have_more:
            parts = AnswerParts()
            may_have_more = self._advance(parts)
            if parts:
                yield parts

    def _plain_parts(self, text: str) -> AnswerParts | None:
        """What a text adds that can be next to no marker, as most. None for any other."""
        has_unreported_text = self._withheld_pieces or self._offset < len(self._text)
        if not text or has_unreported_text or self._skips_line_ends:
            return None
        if self._state is AnswerState.CONTENT and not self._looks_for_calls:
            return AnswerParts(content=text)
        if "<" in text or text[-1] in LINE_ENDS:
            return None
        if self._state is AnswerState.CONTENT:
            return AnswerParts(content=text)
        return AnswerParts(reasoning=text) if self._state is AnswerState.REASONING else None

    def finish(self, *, is_cut_off: bool = False) -> AnswerParts:
        """What is left at the end of the answer, which a limit or a stop string may cut off: then a
        call is reported as far as it came. All else that is unfinished is content.
        """
        rest = self._take_withheld(len(self._text))
        if self._state is AnswerState.REASONING:
            return AnswerParts(reasoning=rest)
        if self._state is AnswerState.CALL and is_cut_off and (rest.lstrip() or "{")[0] == "{":
            call = _partial_call(rest)
            return AnswerParts(calls=[] if call is None else [call])
        return AnswerParts(
            content=self._last_marker_text + rest if self._state is AnswerState.CALL else rest
        )

    def _advance(self, parts: AnswerParts) -> bool:
        """Report what is certain. True if the state has changed: more may be certain now."""
        if self._state is AnswerState.UNDECIDED:
            return self._decide()
        if self._state is AnswerState.CALL:
            return self._take_call(parts)
        if self._skips_line_ends:
            self._offset = _end_of(_LEADING_LINE_ENDS, self._text, self._offset)
            self._skips_line_ends = self._offset == len(self._text)
        if self._state is AnswerState.REASONING:
            parts.reasoning, is_marker_passed = self._take_until_marker(
                END_THINK, AnswerState.CONTENT
            )
            return is_marker_passed
        if not self._looks_for_calls:
            parts.content = self._take_withheld(len(self._text))
            return False
        parts.content, is_marker_passed = self._take_until_marker(CALL, AnswerState.CALL)
        return is_marker_passed

    def _decide(self) -> bool:
        start = _end_of(_LEADING_SPACE, self._text, self._offset)
        beginning = self._text[start : start + len(THINK)]
        if beginning == THINK:
            self._withheld_pieces.clear()
            self._offset, self._state = start + len(THINK), AnswerState.REASONING
            return True
        if THINK.startswith(beginning):
            self._withhold(start)
            return False
        self._text, self._offset = self._take_withheld(len(self._text)), 0
        self._state, self._skips_line_ends = AnswerState.CONTENT, False
        return True

    def _take_until_marker(self, marker: str, next_state: AnswerState) -> tuple[str, bool]:
        """(text before a marker, without the line ends next to it, or the text that is certain if
        there is no marker yet; whether there is one).
        """
        marker_start = self._text.find(marker, self._offset)
        if marker_start < 0:
            end = len(self._text) - _partial_marker_length(self._text, marker, self._offset)
            certain_text = self._take_text(end)
            self._withhold(end)
            return certain_text, False
        certain_text = self._take_text(marker_start)
        self._last_marker_text = self._take_withheld(marker_start) + marker
        self._offset = marker_start + len(marker)
        self._state, self._skips_line_ends = next_state, True
        return certain_text, True

    def _take_text(self, end: int) -> str:
        """What is held and the text up to `end`, without the line ends before `end`."""
        size = len(self._text[self._offset : end].rstrip(LINE_ENDS))
        return self._take_withheld(self._offset + size) if size else ""

    def _take_withheld(self, end: int) -> str:
        """What is held and the text up to `end`."""
        self._withhold(end)
        text = "".join(self._withheld_pieces)
        self._withheld_pieces.clear()
        return text

    def _withhold(self, end: int) -> None:
        """Hold the text up to `end` back."""
        if end > self._offset:
            self._withheld_pieces.append(self._text[self._offset : end])
            self._offset = end

    def _take_call(self, parts: AnswerParts) -> bool:
        end, is_complete = self._scan_call()
        if not is_complete:
            self._withhold(end)
            return False
        call_text = self._take_withheld(end)
        self._offset += len(END_CALL)
        self._state, self._skips_line_ends = AnswerState.CONTENT, True
        call = _read_call(call_text)
        if call is not None:
            parts.calls.append(call)
        else:
            parts.content = self._last_marker_text + call_text + END_CALL
            self._skips_line_ends = False
        return True

    def _scan_call(self) -> tuple[int, bool]:
        """(the position of the end marker of a call, ignoring those inside JSON strings, or of what
        cannot be scanned yet; whether it is the end marker).
        """
        text, offset = self._text, self._offset
        while True:
            if self._is_in_string:
                offset = _end_of(_REST_OF_STRING, text, offset)
                if text[offset : offset + 1] != '"':
                    return offset, False  # the end, or a backslash before it
                offset += 1
                self._is_in_string = False
            match = _QUOTE_OR_END.search(text, offset)
            if match is None:
                return len(text) - _partial_marker_length(text, END_CALL, offset), False
            if match[0] == END_CALL:
                return match.start(), True
            offset = match.end()
            self._is_in_string = True


def _end_of(pattern: re.Pattern[str], text: str, offset: int) -> int:
    """Where the match of a pattern that matches anywhere ends."""
    match = pattern.match(text, offset)
    assert match is not None
    return match.end()


def _partial_marker_length(text: str, marker: str, start: int) -> int:
    """How many characters at the end of `text[start:]` are the beginning of a marker."""
    max_length = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(max_length, 0, -1) if text.endswith(marker[:n])), 0)


def _read_call(call_text: str) -> ToolCall | None:
    """The call in a JSON object, None if there is none."""
    if _is_too_deep(call_text):
        return None
    try:
        value = _DECODER.decode(call_text)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.keys() - {"name", "arguments"}:
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or _SURROGATE.search(name):
        return None
    return ToolCall(name=name, arguments=_raw_value("arguments", call_text) or "{}")


def _partial_call(call_text: str) -> ToolCall | None:
    """The call that a text begins, None if it has no name yet. Everything from the arguments on
    belongs to them, or is what may end them.
    """
    complete_call = _read_call(
        call_text[: len(call_text) - _partial_marker_length(call_text, END_CALL, 0)]
    )
    if complete_call is not None:
        return complete_call
    match = _PARTIAL_CALL.match(call_text)
    if match is None:
        return None
    try:
        name = _DECODER.decode(match["name"])
    except ValueError:
        return None
    if not name or _SURROGATE.search(name):
        return None
    arguments = match["arguments"] or ""
    try:
        _, end = _DECODER.raw_decode(arguments)
    except (ValueError, RecursionError):
        end = len(arguments)
    return ToolCall(name=name, arguments=arguments[:end], is_complete=False)


def _is_too_deep(text: str) -> bool:
    """Whether objects and arrays are nested deeper than `MAX_DEPTH`."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += (match[0] in "{[") - (match[0] in "}]")
        if depth > MAX_DEPTH:
            return True
    return False


def _parse_finite_float(number: str) -> float:
    """Raises `ValueError` for a number that is too large for a float."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is too large")
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_parse_finite_float, parse_constant=_refuse_constant)


def _raw_value(key: str, text: str) -> str | None:
    """The value of a key exactly as it is written in a JSON object, which must be valid."""
    source = None
    offset = text.index("{") + 1
    while True:
        offset = _skip_space(text, offset)
        if text[offset] == "}":
            return source
        name, offset = _DECODER.raw_decode(text, offset)
        offset = _skip_space(text, offset) + 1  # the colon
        start = _skip_space(text, offset)
        _, offset = _DECODER.raw_decode(text, start)
        if name == key:
            source = text[start:offset]
        offset = _skip_space(text, offset)
        offset += text[offset] == ","


def _skip_space(text: str, offset: int) -> int:
    while text[offset] in " \t\n\r":
        offset += 1
    return offset
