"""The program of a helper process: it compiles grammars, or follows outputs through them.

`python -m cluster.grammar.process TOKENIZER VOCAB_SIZE EOS_ID...` answers calls that come on its
standard input, one after the other (`pipes.py`): (name, arguments). The answer is (True, result) or
(False, message). xgrammar, which loads torch and transformers, is imported here alone, so whatever
hangs or crashes in it ends only this process. It ends when its input is closed.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
from typing import Any

import torch
import xgrammar
from tokenizers import Tokenizer

from cluster.grammar.pipes import read_message, write_message

NICENESS = 5
MAX_COMPILED_BYTES = 16 * 2**20


class Program:
    """The calls that this process answers."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._vocab_size = vocab_size
        self._info = xgrammar.TokenizerInfo(
            encoded_vocabulary(tokenizer, vocab_size),
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size,
            stop_token_ids=eos_token_ids,
        )
        # However many cores there are, they belong to the ranks.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._compiled: dict[bytes, xgrammar.CompiledGrammar] = {}
        self._matchers: dict[str, xgrammar.GrammarMatcher] = {}
        self._mask_1W = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._equal: dict[bytes, bytes] = {}

    def ready(self) -> None:
        """Returns once everything is imported."""

    def compile(self, structural_tag: str) -> bytes:
        """The compiled form of a structural tag. Raises `ValueError` for one that is too large, and
        xgrammar's errors.
        """
        compiled = self._compiler.compile_structural_tag(structural_tag).serialize_json().encode()
        if len(compiled) > MAX_COMPILED_BYTES:
            raise ValueError(
                f"it takes {len(compiled)} bytes when compiled; at most {MAX_COMPILED_BYTES} are"
                " possible"
            )
        return compiled

    def masks(
        self, wanted: list[tuple[str, bytes, list[int]]], ended: list[str]
    ) -> list[bytes | str | None]:
        """For each (request id, compiled grammar, output tokens since the last call), which tokens
        may come next: a mask, None for any, or an error message. The grammar is given only in the
        first call. Rows with equal masks get the same object.
        """
        for request_id in ended:
            self._matchers.pop(request_id, None)
        self._equal = {}
        return [self._mask_or_reason(*each) for each in wanted]

    def _mask_or_reason(
        self, request_id: str, grammar: bytes, token_ids: list[int]
    ) -> bytes | str | None:
        try:
            return self._mask(request_id, grammar, token_ids)
        except Exception as error:  # it concerns one request; the others continue
            return f"its grammar failed: {error}"

    def _mask(self, request_id: str, grammar: bytes, token_ids: list[int]) -> bytes | str | None:
        matcher = self._matchers.get(request_id)
        if matcher is None:
            matcher = xgrammar.GrammarMatcher(self._read(grammar))
            self._matchers[request_id] = matcher
        for token_id in token_ids:
            if not matcher.accept_token(token_id):
                return f"its grammar does not allow token {token_id}, which it has already"
        if not matcher.fill_next_token_bitmask(self._mask_1W):
            return None
        mask = self._mask_1W.numpy().tobytes()
        return self._equal.setdefault(mask, mask)

    def _read(self, grammar: bytes) -> xgrammar.CompiledGrammar:
        """Requests of the same grammar share one."""
        found = self._compiled.get(grammar)
        if found is None:
            found = xgrammar.CompiledGrammar.deserialize_json(grammar.decode(), self._info)
            while len(self._compiled) >= 64:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = found
        return found


def encoded_vocabulary(path: str, vocab_size: int) -> list[str]:
    """The tokens as the tokenizer's file spells them; special tokens, which no output may contain,
    and unused ids are empty.
    """
    tokenizer = Tokenizer.from_file(path)
    tokens = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = token
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special and token_id < vocab_size:
            tokens[token_id] = ""
    return tokens


def main() -> None:
    """Answer until the input is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("vocab_size", type=int)
    parser.add_argument("eos_token_ids", type=int, nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    calls: queue.Queue[Any] = queue.Queue()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get into the answers
    threading.Thread(target=_take_calls, args=(calls,), daemon=True).start()
    program = Program(args.tokenizer, args.vocab_size, args.eos_token_ids)
    os.nice(NICENESS)
    while True:
        name, arguments = calls.get()
        try:
            answer = (True, getattr(program, name)(*arguments))
        except Exception as error:
            answer = (False, str(error))
        write_message(answers, answer)


def _take_calls(calls: queue.Queue[Any]) -> None:
    """Runs on a thread of its own, so that the end of the input ends this process whatever it is
    doing.
    """
    while True:
        try:
            calls.put(read_message(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


if __name__ == "__main__":
    main()
