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
from weakref import WeakSet

from cluster.grammar.helper import (
    Child,
    Helper,
    HelperError,
    HelperLostError,
    HelperStarvedError,
    HelperTimeoutError,
)
from scheduler.errors import EaglerayError, RequestError, RequestFailedError
from scheduler.sequence import Sequence

logger = logging.getLogger("eagleray.grammar")

# Seconds of a processor's time: for one mask, for all masks of a sequence, and what each token adds
# to that; a grammar whose masks take longer than the others of these is not quick.
MASK_LIMIT_S = 5.0
ALL_MASKS_LIMIT_S, ALL_MASKS_PER_TOKEN_S = 10.0, 0.05
QUICK_MASK_S, QUICK_MASK_PER_TOKEN_S = 0.01, 0.0002
QUICK_BATCH_S = 0.02  # for a mask of each sequence, less than a step waits for; one child makes all
LOAD_LIMIT_S = 20.0
CHILD_MEMORY_BYTES = 2**30  # beyond the memory of the helper
MAX_CHILD_LOSSES = 2  # at so many, while it computed for a sequence, that one fails

Answer = bytes | EaglerayError | None  # a mask; why there is none; None if any token may follow


@dataclass(slots=True, eq=False, weakref_slot=True)
class FollowedSequence:
    """A sequence, and its mask after `num_tokens_answered` output tokens; -1 if there is none."""

    number: int  # by which the child knows it
    sequence: Sequence
    follower: Follower
    num_tokens_asked: int = -1
    num_tokens_answered: int = -1
    mask_answer: Answer = None
    num_tokens_sent: int = 0  # output tokens that the child knows; the thread's own
    spent_cpu_s: float = 0.0
    num_child_losses: int = 0
    has_ended: bool = False


class Follower:
    """The outputs of one grammar. `lock`, which all share, guards what is not the thread's own."""

    def __init__(
        self,
        helper: Helper,
        structural_tag: bytes,
        lock: threading.Lock,
        on_answers: Callable[[list[FollowedSequence]], None],
    ) -> None:
        """A thread that holds the lock calls `on_answers` with those that have answers or ended."""
        self.structural_tag = structural_tag
        self.num_followed_seqs = 0
        self.has_quick_masks = False  # loaded, and every mask came quickly
        self.is_quick = False  # and so would those of a step
        self._helper = helper
        self._lock = lock
        self._on_answers = on_answers
        # Notified when the thread has something to do.
        self._work_condition = threading.Condition(lock)
        self._queue: deque[FollowedSequence] = deque()
        self._ended_numbers: list[int] = []  # that the child was not told of
        self._is_closed = False
        # The thread's own.
        self._child: Child | None = None
        self._child_sequences: WeakSet[FollowedSequence] = WeakSet()  # the child may have tokens of
        self._was_slow = False
        self._batch_cpu_s = 0.0
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)

    def ask(self, followed_seq: FollowedSequence) -> None:
        """Ask for the mask after all known tokens. The caller holds the lock."""
        followed_seq.num_tokens_asked = followed_seq.sequence.num_output_tokens
        try:
            if not self._thread.is_alive():
                self._thread.start()
        except RuntimeError as error:  # there is no room for another thread
            followed_seq.mask_answer = _no_mask_error(followed_seq, str(error))
            followed_seq.num_tokens_answered = followed_seq.num_tokens_asked
            return
        self._queue.append(followed_seq)
        self._work_condition.notify()

    def forget(self, followed_seq: FollowedSequence) -> None:
        """The sequence has ended. The caller holds the lock."""
        followed_seq.has_ended = True
        self._ended_numbers.append(followed_seq.number)
        self.num_followed_seqs -= 1

    def close(self) -> None:
        """End the thread and the child, without waiting for them. The caller holds the lock."""
        self._is_closed = True
        self._work_condition.notify()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            self._batch_cpu_s = 0.0
            try:
                self._serve(batch)
            except Exception as error:  # a bug; the other grammars go on
                logger.exception("the masks of a grammar failed")
                self._drop_child()
                unanswered_seqs = [f for f in batch if f.num_tokens_answered != f.num_tokens_asked]
                self._fail(unanswered_seqs, f"{type(error).__name__}: {error}")
            with self._lock:
                full_batch_cpu_s = self._batch_cpu_s / len(batch) * self.num_followed_seqs
                self.has_quick_masks = self._child is not None and not self._was_slow
                self.is_quick = self.has_quick_masks and full_batch_cpu_s <= QUICK_BATCH_S
                self._on_answers(batch)
            del batch  # so that nothing keeps sequences that end until there is another one
        self._drop_child()

    def _next_batch(self) -> list[FollowedSequence]:
        """Everything asked for; empty when this is to end."""
        with self._lock:
            while not self._is_closed:
                self._work_condition.wait_for(lambda: self._queue or self._is_closed)
                batch = [followed_seq for followed_seq in self._queue if not followed_seq.has_ended]
                self._queue.clear()
                if batch:
                    return batch
        return []

    def _serve(self, batch: list[FollowedSequence]) -> None:
        """Answer for each sequence. One that loses its child is asked for again with another one;
        one whose time is up fails, and so does one that loses its child again. All fail where the
        grammar cannot be loaded in time.
        """
        while batch:
            num_answered_seqs = 0
            try:
                for mask_or_reason, cpu_s in self._masks(batch):
                    self._take_answer(batch[num_answered_seqs], mask_or_reason, cpu_s)
                    num_answered_seqs += 1
            except HelperTimeoutError:
                self._drop_child()
                self._was_slow = True
                self._answer(
                    batch[num_answered_seqs], _too_slow_error(f"one took {MASK_LIMIT_S:g} s")
                )
                num_answered_seqs += 1
            except HelperLostError as error:
                self._drop_child()
                interrupted_seq = batch[num_answered_seqs]
                interrupted_seq.num_child_losses += 1
                if interrupted_seq.num_child_losses >= MAX_CHILD_LOSSES:
                    self._fail(
                        [interrupted_seq], f"{interrupted_seq.num_child_losses} times, {error}"
                    )
                    num_answered_seqs += 1
            except HelperError as error:
                self._drop_child()  # it is not known how far it got
                self._fail(batch[num_answered_seqs:], str(error))
                return
            with self._lock:
                batch = [f for f in batch[num_answered_seqs:] if not f.has_ended]

    def _masks(self, batch: list[FollowedSequence]) -> Iterator[tuple[bytes | str | None, float]]:
        """The child's answers, in order: a mask (empty for no token), None for any token, or why
        there is none; and the seconds of a processor that it took.
        """
        child = self._loaded_child()
        new_tokens = []
        for followed_seq in batch:
            seq = followed_seq.sequence
            start = seq.num_prompt_tokens + followed_seq.num_tokens_sent
            end = seq.num_prompt_tokens + followed_seq.num_tokens_asked
            new_tokens.append((followed_seq.number, seq.token_ids[start:end].tolist()))
        with self._lock:
            ended_numbers, self._ended_numbers = self._ended_numbers, []
        self._child_sequences.update(batch)
        masks: list[bytes | str | None] = []
        answers = child.answers(
            MASK_LIMIT_S, len(batch), "masks", new_tokens, ended_numbers, yields_cores=True
        )
        for followed_seq, (answer, cpu_s) in zip(batch, answers, strict=True):
            num_new_tokens = followed_seq.num_tokens_asked - followed_seq.num_tokens_sent
            if cpu_s > QUICK_MASK_S + QUICK_MASK_PER_TOKEN_S * num_new_tokens:
                self._was_slow = True
            followed_seq.num_tokens_sent = followed_seq.num_tokens_asked
            masks.append(masks[answer] if isinstance(answer, int) else answer)
            yield masks[-1], cpu_s

    def _loaded_child(self) -> Child:
        """The child; if there is none, a new one, which knows the grammar but no tokens."""
        if self._child is None:
            self._child = self._helper.fork(CHILD_MEMORY_BYTES)
            try:
                self._child.call(LOAD_LIMIT_S, "load", self.structural_tag)
            except HelperTimeoutError:
                raise HelperError(f"it takes longer than {LOAD_LIMIT_S:g} s to load") from None
            except HelperStarvedError as error:
                raise HelperError(f"it cannot be loaded: {error}") from None
        return self._child

    def _drop_child(self) -> None:
        """Kill the child, whose successor will need all tokens of all sequences."""
        child, self._child = self._child, None
        for followed_seq in self._child_sequences:
            followed_seq.num_tokens_sent = 0
        self._child_sequences.clear()
        if child is not None:
            child.close()

    def _take_answer(
        self, followed_seq: FollowedSequence, mask_or_reason: bytes | str | None, cpu_s: float
    ) -> None:
        self._batch_cpu_s += cpu_s
        followed_seq.spent_cpu_s += cpu_s
        limit_s = ALL_MASKS_LIMIT_S + ALL_MASKS_PER_TOKEN_S * followed_seq.num_tokens_asked
        if followed_seq.spent_cpu_s > limit_s:
            cost_text = f"{followed_seq.num_tokens_asked} took {followed_seq.spent_cpu_s:.0f} s"
            self._answer(followed_seq, _too_slow_error(cost_text))
        elif isinstance(mask_or_reason, str):
            self._fail([followed_seq], mask_or_reason)
        elif mask_or_reason == b"":
            self._answer(followed_seq, _dead_end_error(followed_seq.num_tokens_asked))
        else:
            self._answer(followed_seq, mask_or_reason)

    def _fail(self, followed_seqs: list[FollowedSequence], reason: str) -> None:
        for followed_seq in followed_seqs:
            self._answer(followed_seq, _no_mask_error(followed_seq, reason))

    def _answer(self, followed_seq: FollowedSequence, answer: Answer) -> None:
        with self._lock:
            followed_seq.mask_answer = answer
            followed_seq.num_tokens_answered = followed_seq.num_tokens_asked


def _no_mask_error(followed_seq: FollowedSequence, reason: str) -> RequestFailedError:
    return RequestFailedError(f"no mask for request {followed_seq.sequence.request_id}: {reason}")


def _dead_end_error(num_tokens: int) -> RequestError:
    return RequestError(
        f"structured_outputs: no token fits the grammar here; output tokens so far: {num_tokens}."
        " Change what no text fits, such as a class without characters",
        "structured_outputs",
    )


def _too_slow_error(cost_text: str) -> RequestError:
    return RequestError(
        "structured_outputs: the grammar is too slow: the masks of its tokens may take"
        f" {MASK_LIMIT_S:g} s each, and {ALL_MASKS_LIMIT_S:g} s and {ALL_MASKS_PER_TOKEN_S:g} s per"
        f" token in all, but {cost_text}; simplify it, above all nested repetitions",
        "structured_outputs",
    )
