"""Text of one output while its tokens arrive.

A `TextStream` turns tokens into text that never has to be taken back: the bytes of an unfinished
character, and text that may be the beginning of a stop string, are held back until more tokens
decide what they are.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# An unfinished character has at most three bytes, each of which may decode to one replacement
# character.
_MAX_UNFINISHED = 3
# Tokens that are decoded together with new ones. The context must hold at least one whole
# character.
CONTEXT = 10


class Decoder(Protocol):
    """What a stream needs from a tokenizer."""

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of these tokens."""


class _StopString:
    """Finds a stop string in a text that comes in parts. As in the search of Knuth, Morris and
    Pratt, the work for a part does not depend on the length of the string.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0  # characters at the end of the text that are its beginning
        # By a number of matched characters: how many at their end are a shorter beginning. As long
        # as the longest match so far.
        self._shorter = [0, 0]

    def push(self, text: str) -> int | None:
        """How many characters of the next text complete the string, None if they do not."""
        for i, char in enumerate(text):
            self.num_matched = self._longer(self.num_matched, char)
            if self.num_matched == len(self.string):
                return i + 1
            if self.num_matched == len(self._shorter):
                self._shorter.append(self._longer(self._shorter[-1], char))
        return None

    def _longer(self, num_matched: int, char: str) -> int:
        """How many characters match with one more."""
        while num_matched and self.string[num_matched] != char:
            num_matched = self._shorter[num_matched]
        return num_matched + (self.string[num_matched] == char)


class TextStream:
    """Text of one output. `text` is the text so far, without what is held back.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokenizer: Decoder, stop: Seq[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = [_StopString(string) for string in stop]
        self._min_tokens = min_tokens if stop else 0
        self._num_tokens = 0
        self._recent: list[int] = []
        self._num_known = 0  # characters of the text of `_recent` that are part of `_decoded`
        self._decoded = ""
        self.text = ""
        self.stopped_by: str | None = None  # the stop string

    def push(self, token_ids: Seq[int]) -> int | None:
        """Take the next tokens. Returns how many it took to complete a stop string, or None if none
        is complete.
        """
        if not self._stop:
            self._push(token_ids)
            return None
        for i in range(len(token_ids)):
            if self._push(token_ids[i : i + 1]):
                return i + 1
        return None

    def finish(self) -> None:
        """No more tokens follow: what was held back becomes text."""
        if self.stopped_by is not None:
            return
        if not self._extend(self._tokenizer.decode(self._recent)[self._num_known :]):
            self.text = self._decoded

    def _push(self, token_ids: Seq[int]) -> bool:
        """Decode tokens together; True if they complete a stop string."""
        self._num_tokens += len(token_ids)
        self._recent += token_ids
        text = self._tokenizer.decode(self._recent)
        certain = max(len(text.rstrip(_UNFINISHED)), len(text) - _MAX_UNFINISHED)
        dropped = 0  # characters that `_recent` no longer yields
        if len(self._recent) > 2 * CONTEXT:
            del self._recent[:-CONTEXT]
            dropped = len(text) - len(self._tokenizer.decode(self._recent))
        certain = max(certain, dropped, self._num_known)
        new, self._num_known = text[self._num_known : certain], certain - dropped
        return self._extend(new)

    def _extend(self, text: str) -> bool:
        """Add decoded text; True if it completes a stop string."""
        start = len(self._decoded)
        self._decoded += text
        if self._num_tokens <= self._min_tokens:
            self.text = self._decoded
            return False
        matches = [
            (start + end - len(stop.string), stop.string)
            for stop in self._stop
            if (end := stop.push(text)) is not None
        ]
        if matches:
            place, self.stopped_by = min(matches)
            self.text = self._decoded[:place]
            return True
        num_held = max((stop.num_matched for stop in self._stop), default=0)
        self.text = self._decoded[: len(self._decoded) - num_held]
        return False
