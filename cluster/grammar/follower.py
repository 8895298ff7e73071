"""Follows the outputs of one grammar: a thread that asks a child of the helper for their masks.

Each grammar has a child of its own, so a grammar that takes seconds for a mask, crashes or needs
too much memory stops only outputs of that grammar. A matcher is a function of the known tokens of
its sequence, so a new child gets all tokens again and goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.grammar.helper import Child, Helper, HelperError, HelperLateError, HelperLostError
from scheduler.errors import EaglerayError, RequestError, RequestFailedError
from scheduler.sequence import Sequence

logger = logging.getLogger("eagleray.grammar")

# Seconds of a processor's time: for one mask, for all masks of a sequence, and what each token adds
# to that; a grammar whose masks take longer than the last of these is not quick.
MASK_LIMIT_S = 5.0
MASKS_LIMIT_S, MASKS_LIMIT_PER_TOKEN_S = 10.0, 0.05
QUICK_S, QUICK_PER_TOKEN_S = 0.01, 0.0002
LOAD_LIMIT_S = 20.0
MEMORY_BYTES = 2**30
MAX_LOSSES = 2  # of the child while it computed for a sequence

Answer = bytes | EaglerayError | None


@dataclass(slots=True, eq=False)
class Followed:
    """A sequence, and its mask after `num_answered` output tokens; -1 if there is none."""

    number: int
    sequence: Sequence
    follower: Follower
    num_asked: int = -1
    num_answered: int = -1
    answer: Answer = None
    num_sent: int = 0  # output tokens that the child knows; the thread's own
    spent_s: float = 0.0
    num_losses: int = 0
    has_ended: bool = False


class Follower:
    """The outputs of one grammar. `lock` guards every field that is not the thread's own."""

    def __init__(
        self,
        helper: Helper,
        grammar: bytes,
        lock: threading.Lock,
        on_answers: Callable[[list[Followed]], None],
    ) -> None:
        """`on_answers` is called with sequences that have been answered, by a thread that holds the
        lock.
        """
        self.grammar = grammar
        self.num_followed = 0
        self.is_quick = False  # loaded, and every mask came quickly
        self._helper = helper
        self._lock = lock
        self._on_answers = on_answers
        self._has_work = threading.Condition(lock)  # notified when the thread has something to do
        self._queue: deque[Followed] = deque()
        self._ended_numbers: list[int] = []
        self._is_closed = False
        # The thread's own.
        self._child: Child | None = None
        self._in_child: set[Followed] = set()  # whose tokens the child may have
        self._was_slow = False
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)

    def ask(self, followed: Followed) -> None:
        """Ask for the mask after all known tokens. The caller holds the lock."""
        followed.num_asked = followed.sequence.num_output_tokens
        try:
            if not self._thread.is_alive():
                self._thread.start()
        except RuntimeError as error:  # there is no room for another thread
            followed.answer = _failed(followed, str(error))
            followed.num_answered = followed.num_asked
            return
        self._queue.append(followed)
        self._has_work.notify()

    def forget(self, followed: Followed) -> None:
        """The sequence has ended. The caller holds the lock."""
        followed.has_ended = True
        self._ended_numbers.append(followed.number)
        self.num_followed -= 1

    def close(self) -> None:
        """End the thread and the child, without waiting for them. The caller holds the lock."""
        self._is_closed = True
        self._has_work.notify()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._serve(batch)
            except Exception as error:  # a bug; the other grammars go on
                logger.exception("the masks of a grammar failed")
                self._drop_child()
                unanswered = [f for f in batch if f.num_answered != f.num_asked]
                self._fail(unanswered, f"{type(error).__name__}: {error}")
            with self._lock:
                self.is_quick = self._child is not None and not self._was_slow
                self._on_answers(batch)
        self._drop_child()

    def _next_batch(self) -> list[Followed]:
        """Everything asked for; empty when this is to end."""
        with self._lock:
            while not self._is_closed:
                self._has_work.wait_for(lambda: self._queue or self._is_closed)
                batch = [followed for followed in self._queue if not followed.has_ended]
                self._queue.clear()
                if batch:
                    return batch
        return []

    def _serve(self, batch: list[Followed]) -> None:
        """Answer for each sequence. One that loses its child is asked for again with another one;
        one whose time is up fails, and so does one that loses its child again.
        """
        while batch:
            num_answered = 0
            try:
                for answer, seconds in self._masks(batch):
                    self._take(batch[num_answered], answer, seconds)
                    num_answered += 1
            except HelperLateError:
                self._drop_child()
                self._was_slow = True
                self._answer(batch[num_answered], _too_slow(f"one took {MASK_LIMIT_S:g} s"))
                num_answered += 1
            except HelperLostError as error:
                self._drop_child()
                culprit = batch[num_answered]
                culprit.num_losses += 1
                if culprit.num_losses >= MAX_LOSSES:
                    self._fail([culprit], f"{culprit.num_losses} times, {error}")
                    num_answered += 1
            except HelperError as error:
                self._drop_child()  # it is not known how far it got
                self._fail(batch[num_answered:], str(error))
                return
            batch = batch[num_answered:]

    def _masks(self, batch: list[Followed]) -> Iterator[tuple[bytes | str | None, float]]:
        """The child's answers, in order."""
        child = self._loaded_child()
        tokens = []
        for followed in batch:
            num_prompt_tokens = followed.sequence.num_prompt_tokens
            token_ids = followed.sequence.token_ids[
                num_prompt_tokens + followed.num_sent : num_prompt_tokens + followed.num_asked
            ]
            tokens.append((followed.number, token_ids))
        with self._lock:
            ended, self._ended_numbers = self._ended_numbers, []
        self._in_child.difference_update([f for f in self._in_child if f.has_ended])
        self._in_child.update(batch)
        masks: list[bytes | str | None] = []
        answers = child.answers(MASK_LIMIT_S, len(batch), "masks", tokens, ended, yields=True)
        for followed, (answer, seconds) in zip(batch, answers, strict=True):
            if seconds > QUICK_S + QUICK_PER_TOKEN_S * (followed.num_asked - followed.num_sent):
                self._was_slow = True
            followed.num_sent = followed.num_asked
            masks.append(masks[answer] if isinstance(answer, int) else answer)
            yield masks[-1], seconds

    def _loaded_child(self) -> Child:
        """The child; if there is none, a new one, which knows the grammar but no tokens."""
        if self._child is None:
            self._child = self._helper.fork(MEMORY_BYTES)
            try:
                self._child.call(LOAD_LIMIT_S, "load", self.grammar)
            except HelperLateError:
                raise HelperError(f"it takes longer than {LOAD_LIMIT_S:g} s to load") from None
        return self._child

    def _drop_child(self) -> None:
        """Kill the child, whose successor will need all tokens of all sequences."""
        child, self._child = self._child, None
        for followed in self._in_child:
            followed.num_sent = 0
        self._in_child.clear()
        if child is not None:
            child.close()

    def _take(self, followed: Followed, answer: bytes | str | None, seconds: float) -> None:
        followed.spent_s += seconds
        limit_s = MASKS_LIMIT_S + MASKS_LIMIT_PER_TOKEN_S * followed.num_asked
        if followed.spent_s > limit_s:
            self._answer(followed, _too_slow(f"{followed.num_asked} took {followed.spent_s:.0f} s"))
        elif isinstance(answer, str):
            self._fail([followed], answer)
        else:
            self._answer(followed, answer)

    def _fail(self, batch: list[Followed], why: str) -> None:
        for followed in batch:
            self._answer(followed, _failed(followed, why))

    def _answer(self, followed: Followed, answer: Answer) -> None:
        with self._lock:
            followed.answer, followed.num_answered = answer, followed.num_asked


def _failed(followed: Followed, why: str) -> RequestFailedError:
    return RequestFailedError(f"no mask for request {followed.sequence.request_id}: {why}")


def _too_slow(how: str) -> RequestError:
    return RequestError(
        "structured_outputs: the grammar is too slow: the masks of its tokens may take"
        f" {MASK_LIMIT_S:g} s each, and {MASKS_LIMIT_S:g} s and {MASKS_LIMIT_PER_TOKEN_S:g} s per"
        f" token in all, but {how}; simplify it, above all nested repetitions",
        "structured_outputs",
    )
