"""Token ids to text while they arrive. What a decoder returns never has to be taken back: it keeps
the bytes of an unfinished character until more tokens, or the end, decide what they are.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# An unfinished character has at most three bytes, each of which may become a replacement.
_MAX_UNFINISHED_CHARS = 3
# How many last tokens are kept to be decoded with new ones; they must hold a whole character.
NUM_CONTEXT_TOKENS = 10


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


def make_detokenizer(tokenizer: Decoder) -> Detokenizer:
    """One for the tokens of one output."""
    text_bytes = tokenizer.text_bytes
    return _ContextDetokenizer(tokenizer) if text_bytes is None else _BytesDetokenizer(text_bytes)


class _BytesDetokenizer:
    """For tokens that stand for bytes, as those of Qwen3."""

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Seq[int]) -> str:
        return self._utf8_decoder.decode(b"".join(map(self._text_bytes, token_ids)))

    def finish(self) -> str:
        return self._utf8_decoder.decode(b"", True)


class _ContextDetokenizer:
    """For tokens whose text depends on those before them: the last ones are decoded again."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._recent_token_ids: list[int] = []
        self._num_returned_chars = (
            0  # characters of the text of `_recent_token_ids` that were returned
        )

    def push(self, token_ids: Seq[int]) -> str:
        self._recent_token_ids += token_ids
        text = self._tokenizer.decode(self._recent_token_ids)
        num_certain_chars = max(
            len(text.rstrip(_REPLACEMENT_CHARACTER)), len(text) - _MAX_UNFINISHED_CHARS
        )
        num_dropped_chars = 0  # characters that `_recent_token_ids` no longer yields
        if len(self._recent_token_ids) > 2 * NUM_CONTEXT_TOKENS:
            del self._recent_token_ids[:-NUM_CONTEXT_TOKENS]
            num_dropped_chars = len(text) - len(self._tokenizer.decode(self._recent_token_ids))
        num_certain_chars = max(num_certain_chars, num_dropped_chars, self._num_returned_chars)
        new_text = text[self._num_returned_chars : num_certain_chars]
        self._num_returned_chars = num_certain_chars - num_dropped_chars
        return new_text

    def finish(self) -> str:
        return self._tokenizer.decode(self._recent_token_ids)[self._num_returned_chars :]
