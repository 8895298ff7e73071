"""Grammars of requests, compiled by children of a helper process before the requests are sent.

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

from cluster.grammar.helper import Helper, HelperError, HelperLateError, HelperLostError
from scheduler.errors import EaglerayError, OverloadedError, RequestError

# Seconds of a processor's time, in the first line and in the other one.
QUICK_COMPILE_S, COMPILE_TIMEOUT_S = 1.0, 5.0
MAX_SLOW = 4  # grammars in the other line
MEMORY_BYTES = 2**30
MAX_SOURCE_BYTES = 64 * 1024
REFUSED_FOR_S = 60.0  # how long a refusal is remembered, in which a busy machine may have a part
_CACHE_BYTES = 64 * 2**20
_MAX_REFUSALS = 1024


class GrammarCompiler:
    """Compiles structural tags, and keeps the ones used last. Any thread may call."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer, vocab_size, eos_token_ids)
        self._quick, self._slow = threading.Lock(), threading.Lock()  # held by who compiles
        self._num_slow = 0
        self._known = threading.Lock()  # guards `_num_slow` and the fields below
        self._compiled: OrderedDict[str, bytes] = OrderedDict()
        self._refusals: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def compile(self, structural_tag: str) -> bytes:
        """The compiled grammar. Raises `RequestError` for one that is not possible, is too large,
        or takes more time or memory than it may, and `OverloadedError` if too many slow ones are
        being compiled.
        """
        if len(structural_tag.encode()) > MAX_SOURCE_BYTES:
            raise _refused(f"it is larger than {MAX_SOURCE_BYTES} bytes")
        if (compiled := self._look_up(structural_tag)) is not None:
            return compiled
        with self._quick:
            compiled = self._look_up(structural_tag) or self._compile(
                structural_tag, QUICK_COMPILE_S
            )
        if compiled is not None:
            return compiled
        self._join_slow()
        try:
            with self._slow:
                compiled = self._look_up(structural_tag) or self._compile(
                    structural_tag, COMPILE_TIMEOUT_S
                )
        finally:
            with self._known:
                self._num_slow -= 1
        if compiled is None:
            why = f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s; simplify it"
            raise self._remember(structural_tag, why)
        return compiled

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _look_up(self, structural_tag: str) -> bytes | None:
        """What was compiled before. Raises the `RequestError` of a refusal that is remembered."""
        with self._known:
            compiled = self._compiled.get(structural_tag)
            if compiled is not None:
                self._compiled.move_to_end(structural_tag)
                return compiled
            refused_s, why = self._refusals.get(_digest(structural_tag), (-REFUSED_FOR_S, ""))
        if time.monotonic() - refused_s < REFUSED_FOR_S:
            raise _refused(why)
        return None

    def _compile(self, structural_tag: str, limit_s: float) -> bytes | None:
        """The compiled grammar, None if that takes longer. Raises `RequestError`."""
        try:
            child = self._helper.fork(MEMORY_BYTES)
        except HelperError as error:  # not the grammar's fault
            raise _refused(f"it cannot be compiled: {error}") from None
        try:
            compiled: bytes = child.call(limit_s, "compile", structural_tag)
        except HelperLateError:
            return None
        except (HelperError, HelperLostError) as error:
            raise self._remember(structural_tag, f"it cannot be compiled: {error}") from None
        finally:
            child.close()
        with self._known:
            self._compiled[structural_tag] = compiled
            while sum(map(len, self._compiled.values())) > _CACHE_BYTES:
                self._compiled.popitem(last=False)
        return compiled

    def _join_slow(self) -> None:
        with self._known:
            if self._num_slow >= MAX_SLOW:
                raise OverloadedError(
                    f"structured_outputs: {self._num_slow} other grammars that take longer than"
                    f" {QUICK_COMPILE_S:g} s are being compiled, and so would this one; try again"
                    " later, or simplify it"
                )
            self._num_slow += 1

    def _remember(self, structural_tag: str, why: str) -> EaglerayError:
        with self._known:
            self._refusals[_digest(structural_tag)] = time.monotonic(), why
            while len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
        return _refused(why)


def _digest(structural_tag: str) -> bytes:
    return hashlib.sha256(structural_tag.encode()).digest()


def _refused(why: str) -> RequestError:
    message = f"structured_outputs: the grammar is not possible: {why}"
    return RequestError(message, "structured_outputs")
