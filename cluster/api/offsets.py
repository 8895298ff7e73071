"""Where in the text of a completion its tokens begin: `text_offset` of its log probabilities."""

from __future__ import annotations

import codecs
from typing import Protocol

from cluster.client.detokenizing import Decoder

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Decoder, Protocol):
    """What offsets need from a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be part of a character."""


class Offsets:
    """Offsets of the tokens of one output, in characters. They depend on the tokens only, so they
    are the same however the tokens arrive, also where the text of some is held back.
    """

    def __init__(
        self, vocabulary: Vocabulary, start: int = 0, *, shows_special_tokens: bool = False
    ) -> None:
        """`start`: the offset of the first token. `shows_special_tokens`: special tokens are a part
        of the text, by their names.
        """
        self._vocabulary = vocabulary
        self._decoder = _UTF8(errors="replace")
        self._num_chars = start  # that are complete
        self._shows_special_tokens = shows_special_tokens

    def next(self, token_id: int) -> int:
        """The offset of the next token: of the character that its first byte belongs to. Special
        tokens that are no part of the text have the offset of what follows.
        """
        if not self._shows_special_tokens and not self._vocabulary.decode([token_id]):
            return self._num_chars
        data = self._vocabulary.token_bytes(token_id)
        self._num_chars += len(self._decoder.decode(data[:1]))
        is_unfinished = bool(self._decoder.getstate()[0])
        offset = self._num_chars if is_unfinished else self._num_chars - 1
        self._num_chars += len(self._decoder.decode(data[1:]))
        return offset
