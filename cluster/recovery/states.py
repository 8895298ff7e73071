"""What happens after a rank is lost: a state machine without processes, threads or its own clock.

    SERVING ---fault---> FENCING ---all dead---> ASSEMBLING ---ready---> SERVING
                            ^                      |   ^
                            |--------fault---------|   |
                            '--all dead-> BACKOFF -----'  when due
    any ---no result for `give_up_after_s`, or an error that trying again does not fix---> DEAD

An *epoch* is a set of processes. The next one begins only when every process of the last one is
certainly dead. The first attempt follows at once, later ones after growing delays. An applied
result resets the attempts; so does the end of the requests that killed the ranks, and a group that
answers for a while and has no work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from cluster.timeouts import GIVE_UP_AFTER_S

MAX_CONVICTIONS_IN_A_ROW = 8  # without a result
BACKOFF_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
MIN_SERVING_S = 10.0  # after which a serving group without work counts like a result


class RecoveryState(Enum):
    SERVING = "serving"
    FENCING = "fencing"
    ASSEMBLING = "assembling"
    BACKOFF = "backoff"
    DEAD = "dead"


@dataclass(slots=True)
class Recovery:
    """State of one engine's group of ranks, or of its driver while that is replaced. One thread."""

    clock: Callable[[], float]
    give_up_after_s: float = GIVE_UP_AFTER_S
    state: RecoveryState = RecoveryState.SERVING
    num_recoveries: int = 0
    # Since the last result: the loss, then starts that failed, or whose group was lost without one.
    failures: list[str] = field(default_factory=list)
    _first_fault_s: float = 0.0
    _next_attempt_at_s: float = 0.0
    _serving_since_s: float = 0.0  # stays 0 with the first group

    def note_fault(self, reason: str) -> bool:
        """A rank was lost, or a group not assembled. False while one is handled, or when dead."""
        if self.state not in (RecoveryState.SERVING, RecoveryState.ASSEMBLING):
            return False
        now_s = self.clock()
        if not self.failures:
            self._first_fault_s = now_s
        self.failures.append(f"after {now_s - self._first_fault_s:.1f} s: {reason}")
        self.state = RecoveryState.FENCING
        return True

    def note_fenced(self) -> None:
        """Every process of the last epoch is dead."""
        assert self.state is RecoveryState.FENCING, self.state
        now_s = self.clock()
        if now_s - self._first_fault_s > self.give_up_after_s:
            self.state = RecoveryState.DEAD
            return
        delay_s = BACKOFF_DELAYS_S[min(len(self.failures), len(BACKOFF_DELAYS_S)) - 1]
        self._next_attempt_at_s = now_s + delay_s
        self.state = RecoveryState.BACKOFF if delay_s else RecoveryState.ASSEMBLING

    def give_up_if_too_late(self, reason: str) -> bool:
        """Whether to stop trying, because the next transition, such as the end of the last epoch,
        has failed for too long; the last time because of `reason`.
        """
        now_s = self.clock()
        if now_s - self._first_fault_s <= self.give_up_after_s:
            return False
        self.failures.append(f"after {now_s - self._first_fault_s:.1f} s: {reason}")
        self.state = RecoveryState.DEAD
        return True

    def wait_s(self) -> float:
        """Seconds until the next attempt is due."""
        if self.state is not RecoveryState.BACKOFF:
            return 0.0
        return max(0.0, self._next_attempt_at_s - self.clock())

    def retry(self) -> bool:
        """Begin the next attempt if it is due. Returns whether it began."""
        if self.state is RecoveryState.BACKOFF and self.clock() >= self._next_attempt_at_s:
            self.state = RecoveryState.ASSEMBLING
            return True
        return False

    def note_assembled(self) -> None:
        """A new group is ready."""
        assert self.state is RecoveryState.ASSEMBLING, self.state
        self.num_recoveries += 1
        self._serving_since_s = self.clock()
        self.state = RecoveryState.SERVING

    def note_progress(self) -> None:
        """A result of the present epoch was applied, or the cause of the losses has ended."""
        if self.state is RecoveryState.SERVING:
            self.failures.clear()

    def note_idle(self) -> None:
        """The group answers and has no work. After a while, that counts like a result."""
        serving_s = self.clock() - self._serving_since_s
        if self.state is RecoveryState.SERVING and serving_s >= MIN_SERVING_S:
            self.failures.clear()

    def give_up(self) -> None:
        """Stop trying: another attempt would change nothing."""
        self.state = RecoveryState.DEAD

    def last_failed_start(self) -> str:
        """Why the last start failed, in one line; empty once the group serves. Any thread."""
        failed_starts = self.failures[1:]  # the first entry is the loss
        if self.state is RecoveryState.SERVING or not failed_starts:
            return ""
        return f"start {len(failed_starts)} failed {failed_starts[-1]}".split("\n")[0]

    def report(self) -> str:
        """Why recovery ended: every failure in order."""
        return "; ".join(self.failures)


class Convictions:
    """The times since the last result that requests failed for killing the ranks. The engine thread
    notes them, the supervisor's asks.
    """

    def __init__(self) -> None:
        self._num_noted = 0
        self._num_known = 0  # when it was last asked

    def note(self) -> None:
        """Requests have failed, to which the last losses were due."""
        self._num_noted += 1

    def note_result(self) -> None:
        """A result was applied. Cheap."""
        self._num_noted = 0

    def has_new(self) -> bool:
        """Whether there are others since the last call, so that the last losses were due to
        requests. After many in a row without any result they are due to the machine.
        """
        num_known, self._num_known = self._num_known, self._num_noted
        return num_known < self._num_known <= MAX_CONVICTIONS_IN_A_ROW
