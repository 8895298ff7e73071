"""Which tokens constrained outputs may contain next. Nothing here waits longer than it is told to:
followers ask child processes for the masks, each on a thread of its own (`follower.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from pathlib import Path

from cluster.grammar.follower import Followed, Follower
from cluster.grammar.helper import Helper, HelperError
from scheduler.engine import LATE, MaskAnswer
from scheduler.sequence import Sequence

MAX_IDLE = 8  # followers that are kept for the next request with the same grammar


class GrammarMatching:
    """`Grammars` by a helper process, which is started with the first constrained request. One
    thread, except for `start`.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._unanswered: set[Followed] = set()  # what `masks` waits for
        self._all_answered = threading.Condition(self._lock)
        self._followers: dict[bytes, Follower] = {}  # by grammar
        self._idle: OrderedDict[bytes, Follower] = OrderedDict()  # the longest idle first
        self._followed: dict[str, Followed] = {}  # by request id
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start the helper if it does not run. Takes seconds, so it must not be called on the
        thread that runs steps. If it fails, the requests that need the helper fail later.
        """
        with contextlib.suppress(HelperError):
            self._helper.start()

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        """See `Grammars`."""
        with self._lock:
            all_followed = [self._ask(seq) for seq in sequences]
            if limit_s > 0:
                self._unanswered = {f for f in all_followed if not _is_answered(f)}
                self._all_answered.wait_for(lambda: not self._unanswered, limit_s)
                for followed in self._unanswered:
                    followed.follower.is_quick = False  # until it has caught up
                self._unanswered.clear()
            return [f.answer if _is_answered(f) else LATE for f in all_followed]

    def is_quick(self, seq: Sequence) -> bool:
        """See `Grammars`."""
        followed = self._followed.get(seq.request_id)
        return followed is not None and followed.follower.is_quick

    def forget(self, request_id: str) -> None:
        """See `Grammars`."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        follower, grammar = followed.follower, followed.follower.grammar
        with self._lock:
            follower.forget(followed)
            if follower.num_followed == 0:
                self._idle[grammar] = self._followers.pop(grammar)
                if not follower.is_quick:
                    self._idle.pop(grammar).close()
                elif len(self._idle) > MAX_IDLE:
                    self._idle.popitem(last=False)[1].close()

    def close(self) -> None:
        """End the helper and all followers."""
        with self._lock:
            for follower in (*self._followers.values(), *self._idle.values()):
                follower.close()
        self._helper.close()

    def _ask(self, seq: Sequence) -> Followed:
        """The caller holds the lock."""
        followed = self._followed.get(seq.request_id)
        if followed is None:
            follower = self._follower(seq.grammar)
            follower.num_followed += 1
            followed = Followed(next(self._numbers), seq, follower)
            self._followed[seq.request_id] = followed
        if followed.num_asked != seq.num_output_tokens:
            followed.follower.ask(followed)
        return followed

    def _follower(self, grammar: bytes) -> Follower:
        """The follower of a grammar, a new one if there is none."""
        follower = self._followers.get(grammar) or self._idle.pop(grammar, None)
        if follower is None:
            follower = Follower(self._helper, grammar, self._lock, self._take)
        self._followers[grammar] = follower
        return follower

    def _take(self, answered: list[Followed]) -> None:
        """Note answers. The caller holds the lock."""
        if self._unanswered:
            self._unanswered.difference_update(answered)
            if not self._unanswered:
                self._all_answered.notify()


def _is_answered(followed: Followed) -> bool:
    return followed.num_answered == followed.sequence.num_output_tokens
