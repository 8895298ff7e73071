"""Text of one output while its tokens arrive.

A `TextStream` turns tokens into text that never has to be taken back: the bytes of an unfinished
character, and text that may be the beginning of a stop string, are held back until more tokens
decide what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

from cluster.client.detokenizing import Decoder, make_detokenizer
from cluster.grammar.markers import END_THINK, LINE_ENDS, THINK, AnswerState


class TextStream:
    """Text of one output. What `push` and `finish` return, together, is the text.

    The text of the first `min_tokens` tokens is not searched for stop strings, nor is reasoning:
    `state` says whether the output begins with it. stop_string: the stop string that ended the
    text.
    num_tokens_to_stop: how many tokens of that `push` it took; None if `finish` found it.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Seq[str] = (),
        min_tokens: int = 0,
        state: AnswerState = AnswerState.CONTENT,
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer)
        self._stop_matchers = tuple(_Matcher(text) for text in stop)
        self._min_tokens = min_tokens if stop else 0
        self._reasoning = _ReasoningTracker(state if stop else AnswerState.CONTENT)
        self._num_tokens = 0
        self._withheld_text = ""  # it may belong to a stop string, or to a marker of reasoning
        self.stop_string: str | None = None
        self.num_tokens_to_stop: int | None = None

    def push(self, token_ids: Seq[int]) -> str:
        """Take the next tokens. Returns what is certain now, up to a stop string."""
        if not self._stop_matchers:
            return self._detokenizer.push(token_ids)
        certain_texts = []
        for i in range(len(token_ids)):
            self._num_tokens += 1
            text = self._detokenizer.push(token_ids[i : i + 1])
            certain_texts.append(self._search(text))
            if self.stop_string is not None:
                self.num_tokens_to_stop = i + 1
                break
        return "".join(certain_texts)

    def finish(self) -> str:
        """No more tokens follow: what was held back becomes text."""
        if self.stop_string is not None:
            return ""
        text = self._detokenizer.finish()
        if not self._stop_matchers:
            return text
        certain_text, withheld_text = self._search(text, is_last=True), self._withheld_text
        self._withheld_text = ""
        return certain_text if self.stop_string is not None else certain_text + withheld_text

    def _search(self, text: str, *, is_last: bool = False) -> str:
        """Add decoded text. Returns what is certain now, up to a stop string that it completes."""
        text, num_new_answer_chars = (
            self._withheld_text + text,
            self._reasoning.feed(text, is_last=is_last),
        )
        if self._num_tokens <= self._min_tokens:
            self._withheld_text = ""
            return text
        search_start = max(len(text) - num_new_answer_chars, 0)
        new_text = text[search_start:]
        ends = ((matcher.feed(new_text), matcher.stop) for matcher in self._stop_matchers)
        matches = [(search_start + end - len(stop), stop) for end, stop in ends if end is not None]
        if matches:
            num_certain_chars, self.stop_string = min(matches)
        else:
            matched_length = max(matcher.matched_length for matcher in self._stop_matchers)
            num_certain_chars = max(
                len(text) - max(matched_length, self._reasoning.num_undecided_chars), 0
            )
        self._withheld_text = text[num_certain_chars:]
        return text[:num_certain_chars]


class _ReasoningTracker:
    """Tells the answer from the reasoning before it, as `cluster.api.parser` does, which takes line
    ends after the reasoning for a part of the marker. The text comes in parts.
    """

    def __init__(self, state: AnswerState) -> None:
        self.num_undecided_chars = 0  # characters at the end that may be the answer
        self._state = state
        self._undecided_prefix = ""  # the text, less leading space, until it decides
        self._end_think_matcher = _Matcher(END_THINK)
        self._skips_line_ends = False

    def feed(self, text: str, *, is_last: bool) -> int:
        """Take the next part. Returns how many characters at the end of all the answer gained."""
        if self._state is AnswerState.UNDECIDED:
            self._undecided_prefix = (self._undecided_prefix + text).lstrip()
            self.num_undecided_chars += len(text)
            if self._undecided_prefix.startswith(THINK):
                self._state, text = AnswerState.REASONING, self._undecided_prefix[len(THINK) :]
                self.num_undecided_chars = 0
            elif is_last or not THINK.startswith(self._undecided_prefix):
                self._state, num_new_answer_chars = AnswerState.CONTENT, self.num_undecided_chars
                self.num_undecided_chars = 0
                return num_new_answer_chars
        if self._state is AnswerState.UNDECIDED:
            return 0
        if self._state is AnswerState.REASONING:
            end_offset = self._end_think_matcher.feed(text)
            if end_offset is None:
                return 0
            text = text[end_offset:]
            self._state, self._skips_line_ends = AnswerState.CONTENT, True
        if self._skips_line_ends:
            text = text.lstrip(LINE_ENDS)
            self._skips_line_ends = not text
        return len(text)


class _Matcher:
    """Looks for one stop string in a text that comes in parts, in a time that depends on the length
    of the text only (Knuth, Morris and Pratt 1977).

    `matched_length` is the length of the longest end of the text with which the stop string begins.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_length = 0
        self._prefix_function = _prefix_function(stop)

    def feed(self, text: str) -> int | None:
        """Take the next part. Returns up to where in it the stop string goes, or None while that is
        not complete. Not to be called again afterwards.
        """
        stop, borders, matched_length = self.stop, self._prefix_function, self.matched_length
        first_character, stop_length, offset = stop[0], len(stop), 0
        while offset < len(text):
            if matched_length == 0:  # on to where the stop string may begin
                offset = text.find(first_character, offset)
                if offset < 0:
                    break
            while matched_length and text[offset] != stop[matched_length]:
                matched_length = borders[matched_length - 1]
            matched_length += text[offset] == stop[matched_length]
            offset += 1
            if matched_length == stop_length:
                return offset
        self.matched_length = matched_length
        return None


@functools.lru_cache(maxsize=256)
def _prefix_function(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper end that begins it too."""
    borders = [0]
    for character in stop[1:]:
        matched_length = borders[-1]
        while matched_length and character != stop[matched_length]:
            matched_length = borders[matched_length - 1]
        borders.append(matched_length + (character == stop[matched_length]))
    return tuple(borders)
