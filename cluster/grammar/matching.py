"""Which tokens constrained outputs may contain next. Nothing here waits longer than it is told to:
followers ask child processes for the masks, each on a thread of its own (`follower.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from pathlib import Path

from cluster.grammar.follower import FollowedSequence, Follower
from cluster.grammar.helper import Helper
from scheduler.engine import MASK_LATE, MaskAnswer
from scheduler.sequence import Sequence

MAX_IDLE_FOLLOWERS = 8  # followers that are kept for the next request with the same grammar


class GrammarMatching:
    """`Grammars` by a helper process, which is started by the follower of the first constrained
    request. The engine's thread calls it, but for `close`; followers' threads share the lock.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer_file, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._unanswered_seqs: set[FollowedSequence] = set()  # what `masks` waits for
        self._all_answered_condition = threading.Condition(self._lock)
        self._followers: dict[bytes, Follower] = {}  # by structural tag
        self._idle_followers: OrderedDict[bytes, Follower] = OrderedDict()  # the longest idle first
        self._followed_by_request: dict[str, FollowedSequence] = {}  # by request id
        self._sequence_numbers = itertools.count()

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        """See `Grammars`."""
        with self._lock:
            followed_seqs = [self._request_mask(seq) for seq in sequences]
            if limit_s > 0:
                self._unanswered_seqs = {f for f in followed_seqs if not _is_answered(f)}
                self._all_answered_condition.wait_for(lambda: not self._unanswered_seqs, limit_s)
                for followed_seq in self._unanswered_seqs:
                    follower = followed_seq.follower
                    follower.has_quick_masks = follower.is_quick = False  # until it has caught up
                self._unanswered_seqs.clear()
            return [f.mask_answer if _is_answered(f) else MASK_LATE for f in followed_seqs]

    def is_quick(self, seq: Sequence) -> bool:
        """See `Grammars`."""
        followed_seq = self._followed_by_request.get(seq.request_id)
        return followed_seq is not None and followed_seq.follower.is_quick

    def forget(self, request_id: str) -> None:
        """See `Grammars`."""
        followed_seq = self._followed_by_request.pop(request_id, None)
        if followed_seq is None:
            return
        follower, structural_tag = followed_seq.follower, followed_seq.follower.structural_tag
        with self._lock:
            follower.forget(followed_seq)
            if follower.num_followed_seqs == 0:
                self._idle_followers[structural_tag] = self._followers.pop(structural_tag)
                if not follower.has_quick_masks:
                    self._idle_followers.pop(structural_tag).close()
                elif len(self._idle_followers) > MAX_IDLE_FOLLOWERS:
                    self._idle_followers.popitem(last=False)[1].close()

    def close(self) -> None:
        """End the helper and all followers."""
        with self._lock:
            for follower in (*self._followers.values(), *self._idle_followers.values()):
                follower.close()
        self._helper.close()

    def _request_mask(self, seq: Sequence) -> FollowedSequence:
        """The caller holds the lock."""
        followed_seq = self._followed_by_request.get(seq.request_id)
        if followed_seq is None:
            follower = self._follower(seq.structural_tag)
            follower.num_followed_seqs += 1
            followed_seq = FollowedSequence(next(self._sequence_numbers), seq, follower)
            self._followed_by_request[seq.request_id] = followed_seq
        if followed_seq.num_tokens_asked != seq.num_output_tokens:
            followed_seq.follower.ask(followed_seq)
        return followed_seq

    def _follower(self, structural_tag: bytes) -> Follower:
        """The follower of a grammar, a new one if there is none."""
        follower = self._followers.get(structural_tag) or self._idle_followers.pop(
            structural_tag, None
        )
        if follower is None:
            follower = Follower(self._helper, structural_tag, self._lock, self._note_answers)
        self._followers[structural_tag] = follower
        return follower

    def _note_answers(self, answered_seqs: list[FollowedSequence]) -> None:
        """Note answers. The caller holds the lock."""
        if self._unanswered_seqs:
            self._unanswered_seqs.difference_update(answered_seqs)
            if not self._unanswered_seqs:
                self._all_answered_condition.notify()


def _is_answered(followed_seq: FollowedSequence) -> bool:
    return followed_seq.num_tokens_answered == followed_seq.sequence.num_output_tokens
