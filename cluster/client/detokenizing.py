"""Token ids to text while they arrive. What a decoder returns never has to be taken back: it keeps
the bytes of an unfinished character until more tokens, or the end, decide what they are.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
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
    """What is needed of a tokenizer."""

    @property
    def text_bytes(self) -> Callable[[int], bytes] | None:
        """The bytes that a token adds to the text, None if that depends on those before it."""

    def decode(self, token_ids: Seq[int]) -> str:
        """The text of these tokens."""


class Detokenizer(Protocol):
    """Decodes the tokens of one output."""

    def push(self, token_ids: Seq[int]) -> str:
        """The text that is certain with the next tokens, after what was returned before."""

    def finish(self) -> str:
        """The rest of the text: no more tokens follow."""


def detokenizer(tokenizer: Decoder) -> Detokenizer:
    """One for the tokens of one output."""
    text_bytes = tokenizer.text_bytes
    return _OfContext(tokenizer) if text_bytes is None else _OfBytes(text_bytes)


class _OfBytes:
    """For tokens that stand for bytes, as those of Qwen3."""

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Seq[int]) -> str:
        return self._utf8.decode(b"".join(map(self._text_bytes, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _OfContext:
    """For tokens whose text depends on those before them: the last ones are decoded again."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._recent: list[int] = []
        self._num_certain = 0  # characters of the text of `_recent` that were returned

    def push(self, token_ids: Seq[int]) -> str:
        self._recent += token_ids
        text = self._tokenizer.decode(self._recent)
        num_certain = max(len(text.rstrip(_UNFINISHED)), len(text) - _MAX_UNFINISHED)
        num_dropped = 0  # characters that `_recent` no longer yields
        if len(self._recent) > 2 * CONTEXT:
            del self._recent[:-CONTEXT]
            num_dropped = len(text) - len(self._tokenizer.decode(self._recent))
        num_certain = max(num_certain, num_dropped, self._num_certain)
        new, self._num_certain = text[self._num_certain : num_certain], num_certain - num_dropped
        return new

    def finish(self) -> str:
        return self._tokenizer.decode(self._recent)[self._num_certain :]
