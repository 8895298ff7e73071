"""Grammars of requests, compiled once by children of a helper process before the requests are sent:
what cannot be compiled, or takes too much, is refused here. The engine compiles them again.

Each grammar has a child of its own. One grammar after the other is compiled, for a second at most;
one that takes longer waits in another queue, of those that do, so that only they wait for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.grammar.formats import MAX_STRUCTURAL_TAG_BYTES
from cluster.grammar.helper import (
    Child,
    Helper,
    HelperError,
    HelperLostError,
    HelperStarvedError,
    HelperTimeoutError,
)
from scheduler.errors import EaglerayError, OverloadedError, RequestError, RequestFailedError

# Seconds of a processor's time, in the first queue and in the other one.
QUICK_COMPILE_S, COMPILE_TIMEOUT_S = 1.0, 5.0
MAX_SLOW_COMPILES = 4  # grammars in the other queue
CHILD_MEMORY_BYTES = 2**30  # beyond the memory of the helper
REFUSAL_TTL_S = 60.0  # how long a refusal is remembered, in which a busy machine may have a part
_MAX_CACHED_VERDICTS = 1024  # of each kind: grammars that are possible, are not, or are slow


class NewGrammarError(Exception):
    """A grammar must be compiled first."""


class GrammarCompiler:
    """Compiles structural tags, and remembers which are possible. Any thread may call."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer_file, vocab_size, eos_token_ids)
        # To compile.
        self._quick_compile_lock, self._slow_compile_lock = threading.Lock(), threading.Lock()
        self._num_slow_compiles = 0
        self._lock = threading.Lock()  # guards `_num_slow_compiles` and the fields below
        self._possible_digests: OrderedDict[bytes, None] = OrderedDict()
        self._slow_digests: OrderedDict[bytes, None] = OrderedDict()  # not for the first queue
        self._refusals: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def check(self, structural_tag: str, *, compiles: bool = True) -> bytes:
        """The structural tag as it is sent. Raises `RequestError` for one that is not possible, is
        too large, or takes more time or memory than it may, `OverloadedError` if too many slow ones
        are being compiled or the machine is too busy, and `RequestFailedError` if none can be
        compiled here; without `compiles`, which waits for nothing, `NewGrammarError` for one that
        must be compiled first, also if it is known to be slow.
        """
        encoded_tag = structural_tag.encode()
        if len(encoded_tag) > MAX_STRUCTURAL_TAG_BYTES:
            raise _refusal(f"it is larger than {MAX_STRUCTURAL_TAG_BYTES} bytes")
        if self._is_known_possible(encoded_tag):
            return encoded_tag
        if not compiles:
            raise NewGrammarError
        if not self._is_known_slow(encoded_tag):
            with self._quick_compile_lock:
                if self._is_known_possible(encoded_tag) or (
                    not self._is_known_slow(encoded_tag)
                    and self._compile_in_time(structural_tag, QUICK_COMPILE_S)
                ):
                    return encoded_tag
        self._enter_slow_queue(encoded_tag)
        try:
            with self._slow_compile_lock:
                if self._is_known_possible(encoded_tag) or self._compile_in_time(
                    structural_tag, COMPILE_TIMEOUT_S
                ):
                    return encoded_tag
                # With the lock, so that those who wait for it with the same grammar learn of it.
                reason = f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s; simplify it"
                raise self._remember_refusal(encoded_tag, reason)
        finally:
            with self._lock:
                self._num_slow_compiles -= 1

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _is_known_possible(self, encoded_tag: bytes) -> bool:
        """Whether it was compiled before. Raises the `RequestError` of a remembered refusal."""
        digest = _digest(encoded_tag)
        with self._lock:
            if digest in self._possible_digests:
                self._possible_digests.move_to_end(digest)
                return True
            refused_at_s, reason = self._refusals.get(digest, (-REFUSAL_TTL_S, ""))
        if time.monotonic() - refused_at_s < REFUSAL_TTL_S:
            raise _refusal(reason)
        return False

    def _is_known_slow(self, encoded_tag: bytes) -> bool:
        return _digest(encoded_tag) in self._slow_digests

    def _compile_in_time(self, structural_tag: str, limit_s: float) -> bool:
        """Compile it; whether that was done in time. Raises `RequestError`, `OverloadedError`, and
        `RequestFailedError`.
        """
        encoded_tag = structural_tag.encode()
        for is_last_attempt in (False, True):
            child = self._child()
            try:
                child.call(limit_s, "check", structural_tag)
                break
            except HelperTimeoutError:
                self._remember(self._slow_digests, encoded_tag, None)
                return False
            except HelperStarvedError as error:
                if limit_s == QUICK_COMPILE_S:
                    return False  # in the other queue it has longer
                raise OverloadedError(
                    f"structured_outputs: the grammar cannot be compiled now: {error}; try again"
                    " later"
                ) from None
            except HelperLostError:  # the first one may have been chosen to free memory
                if is_last_attempt:
                    reason = "the process that compiles it has ended twice; simplify it"
                    raise self._remember_refusal(encoded_tag, reason) from None
            except HelperError as error:
                reason = f"it cannot be compiled: {error}"
                raise self._remember_refusal(encoded_tag, reason) from None
            finally:
                child.close()
        self._remember(self._possible_digests, encoded_tag, None)
        return True

    def _child(self) -> Child:
        """A new child. Raises `RequestFailedError`."""
        try:
            return self._helper.fork(CHILD_MEMORY_BYTES)
        except HelperError as error:  # not the grammar's fault
            raise RequestFailedError(
                f"structured_outputs: no grammar can be compiled here: {error}"
            ) from None

    def _enter_slow_queue(self, encoded_tag: bytes) -> None:
        with self._lock:
            if self._num_slow_compiles >= MAX_SLOW_COMPILES:
                if self._is_known_slow(encoded_tag):
                    own_text = "so would this one"
                else:
                    own_text = "the machine is too busy to see whether this one would"
                raise OverloadedError(
                    f"structured_outputs: {self._num_slow_compiles} other grammars that take longer"
                    f" than {QUICK_COMPILE_S:g} s are being compiled, and {own_text}; try again"
                    " later, or simplify it"
                )
            self._num_slow_compiles += 1

    def _remember_refusal(self, encoded_tag: bytes, reason: str) -> EaglerayError:
        self._remember(self._refusals, encoded_tag, (time.monotonic(), reason))
        return _refusal(reason)

    def _remember(
        self, verdicts: OrderedDict[bytes, Any], encoded_tag: bytes, verdict: Any
    ) -> None:
        with self._lock:
            verdicts[_digest(encoded_tag)] = verdict
            while len(verdicts) > _MAX_CACHED_VERDICTS:
                verdicts.popitem(last=False)


def _digest(encoded_tag: bytes) -> bytes:
    return hashlib.sha256(encoded_tag).digest()


def _refusal(reason: str) -> RequestError:
    message = f"structured_outputs: the grammar is not possible: {reason}"
    return RequestError(message, "structured_outputs")
