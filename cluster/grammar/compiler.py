"""Grammars of requests, compiled once by children of a helper process before the requests are sent:
what cannot be compiled, or takes too much, is refused here. The engine compiles them again.

Each grammar has a child of its own. One grammar after the other is compiled, for a second at most;
one that takes longer waits in another line, of those that do, so that only they wait for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from cluster.grammar.formats import MAX_SOURCE_BYTES
from cluster.grammar.helper import Helper, HelperError, HelperLateError, HelperLostError
from scheduler.errors import EaglerayError, OverloadedError, RequestError

# Seconds of a processor's time, in the first line and in the other one.
QUICK_COMPILE_S, COMPILE_TIMEOUT_S = 1.0, 5.0
MAX_SLOW = 4  # grammars in the other line
MEMORY_BYTES = 2**30
REFUSED_FOR_S = 60.0  # how long a refusal is remembered, in which a busy machine may have a part
_MAX_REMEMBERED = 1024  # grammars that are possible, and that are not


class GrammarCompiler:
    """Compiles structural tags, and remembers which are possible. Any thread may call."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer, vocab_size, eos_token_ids)
        self._quick_turn, self._slow_turn = threading.Lock(), threading.Lock()  # to compile
        self._num_slow = 0
        self._lock = threading.Lock()  # guards `_num_slow` and the fields below
        self._possible: OrderedDict[bytes, None] = OrderedDict()
        self._refusals: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def check(self, structural_tag: str) -> bytes:
        """The grammar as it is sent. Raises `RequestError` for one that is not possible, is too
        large, or takes more time or memory than it may, and `OverloadedError` if too many slow ones
        are being compiled.
        """
        source = structural_tag.encode()
        if len(source) > MAX_SOURCE_BYTES:
            raise _refused(f"it is larger than {MAX_SOURCE_BYTES} bytes")
        if self._is_possible(source):
            return source
        with self._quick_turn:
            if self._is_possible(source) or self._compiles(structural_tag, QUICK_COMPILE_S):
                return source
        self._join_slow()
        try:
            with self._slow_turn:
                if self._is_possible(source) or self._compiles(structural_tag, COMPILE_TIMEOUT_S):
                    return source
        finally:
            with self._lock:
                self._num_slow -= 1
        why = f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s; simplify it"
        raise self._remember(source, why)

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _is_possible(self, source: bytes) -> bool:
        """Whether it has been compiled before. Raises the `RequestError` of a refusal that is
        remembered.
        """
        digest = _digest(source)
        with self._lock:
            if digest in self._possible:
                self._possible.move_to_end(digest)
                return True
            refused_s, why = self._refusals.get(digest, (-REFUSED_FOR_S, ""))
        if time.monotonic() - refused_s < REFUSED_FOR_S:
            raise _refused(why)
        return False

    def _compiles(self, structural_tag: str, limit_s: float) -> bool:
        """Whether it can be compiled in time. Raises `RequestError`."""
        try:
            child = self._helper.fork(MEMORY_BYTES)
        except HelperError as error:  # not the grammar's fault
            raise _refused(f"it cannot be compiled: {error}") from None
        source = structural_tag.encode()
        try:
            child.call(limit_s, "check", structural_tag)
        except HelperLateError:
            return False
        except (HelperError, HelperLostError) as error:
            raise self._remember(source, f"it cannot be compiled: {error}") from None
        finally:
            child.close()
        with self._lock:
            self._possible[_digest(source)] = None
            while len(self._possible) > _MAX_REMEMBERED:
                self._possible.popitem(last=False)
        return True

    def _join_slow(self) -> None:
        with self._lock:
            if self._num_slow >= MAX_SLOW:
                raise OverloadedError(
                    f"structured_outputs: {self._num_slow} other grammars that take longer than"
                    f" {QUICK_COMPILE_S:g} s are being compiled, and so would this one; try again"
                    " later, or simplify it"
                )
            self._num_slow += 1

    def _remember(self, source: bytes, why: str) -> EaglerayError:
        with self._lock:
            self._refusals[_digest(source)] = time.monotonic(), why
            while len(self._refusals) > _MAX_REMEMBERED:
                self._refusals.popitem(last=False)
        return _refused(why)


def _digest(source: bytes) -> bytes:
    return hashlib.sha256(source).digest()


def _refused(why: str) -> RequestError:
    message = f"structured_outputs: the grammar is not possible: {why}"
    return RequestError(message, "structured_outputs")
