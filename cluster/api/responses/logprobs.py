"""Log probabilities of the tokens of a response's messages: without those of reasoning, calls, and
the markers and line ends between them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any

from cluster.api.parser import AnswerParser, AnswerParts
from cluster.api.replies import token_entry
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.markers import AnswerState
from scheduler.messages import TokenLogprobs

_STATES_WITH_END_MARKER = (AnswerState.REASONING, AnswerState.CALL)
_UTF8 = codecs.getincrementaldecoder("utf-8")


class MessageLogprobs:
    """Finds the tokens of each message of one answer.

    A parser of its own gets the text of the tokens by characters, so that what it reports is always
    the beginning of what it has held back, once the markers are taken off.

    messages: for each message, its tokens so far in OpenAI's form.
    """

    def __init__(self, tokenizer: Tokenizer, state: AnswerState, *, looks_for_calls: bool) -> None:
        """`state`: the part that begins the answer. Without `looks_for_calls`, calls are text."""
        self.messages: list[list[dict[str, Any]]] = []
        self._tokenizer = tokenizer
        self._parser = AnswerParser(state, looks_for_calls=looks_for_calls)
        self._decoder = _UTF8(errors="replace")
        # Characters that are not reported yet, each with the indices of its tokens, where special
        # tokens do not count.
        self._pending_characters: list[tuple[str, list[int]]] = []
        self._partial_token_indices: list[int] = []  # of tokens whose character is not complete
        self._entries: dict[int, dict[str, Any]] = {}  # by index, of tokens that may be needed
        self._num_text_tokens = 0
        self._is_message_open = False

    def push(self, token_ids: Seq[int], logprobs: Seq[TokenLogprobs | None] | None) -> None:
        """Add tokens of the output."""
        for token_id, entry in zip(token_ids, logprobs or (), strict=False):
            if not self._tokenizer.decode([token_id]):
                continue  # a special token is no part of the text
            index, self._num_text_tokens = self._num_text_tokens, self._num_text_tokens + 1
            if entry is not None:
                self._entries[index] = token_entry(self._tokenizer, token_id, entry)
            self._partial_token_indices.append(index)
            for character in self._decoder.decode(self._tokenizer.token_bytes(token_id)):
                self._push_character(character)
                self._partial_token_indices = [index]
            if not self._decoder.getstate()[0]:
                self._partial_token_indices = []

    def finish(self, *, is_cut_off: bool) -> None:
        """Report what is left at the end of the answer; `is_cut_off`: by a limit or stop string."""
        self._add_parts(self._parser.finish(is_cut_off=is_cut_off))

    def _push_character(self, character: str) -> None:
        self._pending_characters.append((character, self._partial_token_indices))
        earlier_state = self._parser.state
        self._add_parts(self._parser.push(character))
        new_state = self._parser.state
        # The text of a call that turns out to be none will be reported as it is.
        if new_state is AnswerState.REASONING or (
            new_state is AnswerState.CONTENT and earlier_state in _STATES_WITH_END_MARKER
        ):
            self._pending_characters.clear()
            last_index = self._num_text_tokens - 1  # more characters of it may follow
            self._entries = (
                {last_index: self._entries[last_index]} if last_index in self._entries else {}
            )

    def _add_parts(self, parts: AnswerParts) -> None:
        text = parts.content
        if parts.reasoning or parts.calls:
            self._is_message_open = False
        if not text:
            return
        while self._pending_characters and self._pending_characters[0][0] != text[0]:
            del self._pending_characters[0]  # line ends behind a marker
        if not self._is_message_open:
            self.messages.append([])
            self._is_message_open = True
        indices = [
            index
            for _, token_indices in self._pending_characters[: len(text)]
            for index in token_indices
        ]
        del self._pending_characters[: len(text)]
        for index, _ in groupby(indices):
            if (entry := self._entries.pop(index, None)) is not None:
                self.messages[-1].append(entry)
