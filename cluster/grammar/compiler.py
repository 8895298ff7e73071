"""Grammars of requests, compiled in a helper process before the requests are sent."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from cluster.grammar.helper import Helper, HelperError, HelperLostError
from scheduler.errors import RequestError

COMPILE_TIMEOUT_S = 5.0
MAX_SOURCE_BYTES = 64 * 1024
_CACHE_BYTES = 64 * 2**20


class GrammarCompiler:
    """Compiles structural tags, and keeps the ones used last. Any thread may call."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, bytes] = OrderedDict()

    def compile(self, structural_tag: str) -> bytes:
        """The compiled grammar. Raises `RequestError` for one that is not possible, too large, or
        takes longer than `COMPILE_TIMEOUT_S`.
        """
        if len(structural_tag.encode()) > MAX_SOURCE_BYTES:
            raise _refused(f"it is larger than {MAX_SOURCE_BYTES} bytes")
        with self._lock:
            found = self._compiled.pop(structural_tag, None)
            try:
                compiled: bytes = found or self._helper.call(
                    COMPILE_TIMEOUT_S, "compile", structural_tag
                )
            except HelperError as error:
                raise _refused(f"it cannot be compiled: {error}") from None
            except HelperLostError as error:
                raise _refused(f"it cannot be compiled: {error}; simplify it") from None
            self._compiled[structural_tag] = compiled
            while sum(map(len, self._compiled.values())) > _CACHE_BYTES:
                self._compiled.popitem(last=False)
            return compiled

    def close(self) -> None:
        """End the helper."""
        self._helper.close()


def _refused(why: str) -> RequestError:
    message = f"structured_outputs: the grammar is not possible: {why}"
    return RequestError(message, "structured_outputs")
