"""What happens after a rank is lost, as a state machine without processes, threads or a clock of
its own.

    SERVING ---fault---> FENCING ---all dead---> ASSEMBLING ---ready---> SERVING
                            ^                      |   ^
                            |--------fault---------|   |
                            '--all dead-> BACKOFF -----'  when due
    any ---no result for `give_up_after_s`, or an error that trying again does not fix---> DEAD

An *epoch* is a set of processes. The next one begins when it is certain that every process of the
last one is dead. The first attempt follows at once, later ones after growing delays. An applied
result ends the count of attempts; so does a group that answers for a while and has no work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from cluster.timeouts import GIVE_UP_AFTER_S

DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0)
REST_S = 10.0


class RecoveryState(Enum):
    SERVING = "serving"
    FENCING = "fencing"
    ASSEMBLING = "assembling"
    BACKOFF = "backoff"
    DEAD = "dead"


@dataclass(slots=True)
class Recovery:
    """The state of one engine's group of ranks. One thread."""

    clock: Callable[[], float]
    give_up_after_s: float = GIVE_UP_AFTER_S
    state: RecoveryState = RecoveryState.SERVING
    num_recoveries: int = 0
    attempts: list[str] = field(default_factory=list)  # since the last result; how each ended
    _first_fault_s: float = 0.0
    _due_s: float = 0.0
    _served_s: float = 0.0  # since when the present group serves

    def fault(self, why: str) -> bool:
        """A rank was lost, or a new group could not be assembled. Returns False if that was known
        already.
        """
        if self.state not in (RecoveryState.SERVING, RecoveryState.ASSEMBLING):
            return False
        now_s = self.clock()
        if not self.attempts:
            self._first_fault_s = now_s
        self.attempts.append(f"after {now_s - self._first_fault_s:.1f} s: {why}")
        self.state = RecoveryState.FENCING
        return True

    def fenced(self) -> None:
        """Every process of the last epoch is dead."""
        assert self.state is RecoveryState.FENCING, self.state
        now_s = self.clock()
        if now_s - self._first_fault_s > self.give_up_after_s:
            self.state = RecoveryState.DEAD
            return
        delay_s = DELAYS_S[min(len(self.attempts), len(DELAYS_S)) - 1]
        self._due_s = now_s + delay_s
        self.state = RecoveryState.BACKOFF if delay_s else RecoveryState.ASSEMBLING

    def is_too_late(self, why: str) -> bool:
        """Whether to stop trying, because what has to come next, such as the end of the last
        epoch, has failed for too long; the last time because of `why`.
        """
        now_s = self.clock()
        if now_s - self._first_fault_s <= self.give_up_after_s:
            return False
        self.attempts.append(f"after {now_s - self._first_fault_s:.1f} s: {why}")
        self.state = RecoveryState.DEAD
        return True

    def wait_s(self) -> float:
        """Seconds until the next attempt is due."""
        return max(0.0, self._due_s - self.clock()) if self.state is RecoveryState.BACKOFF else 0.0

    def retry(self) -> bool:
        """Begin the next attempt if it is due. Returns whether it began."""
        if self.state is RecoveryState.BACKOFF and self.clock() >= self._due_s:
            self.state = RecoveryState.ASSEMBLING
            return True
        return False

    def assembled(self) -> None:
        """A new group is ready."""
        assert self.state is RecoveryState.ASSEMBLING, self.state
        self.num_recoveries += 1
        self._served_s = self.clock()
        self.state = RecoveryState.SERVING

    def progress(self) -> None:
        """A result of the present epoch was applied."""
        if self.state is RecoveryState.SERVING:
            self.attempts.clear()

    def rest(self) -> None:
        """The group answers and has no work, so no result can come. After a while that counts as
        one.
        """
        if self.state is RecoveryState.SERVING and self.clock() - self._served_s >= REST_S:
            self.attempts.clear()

    def give_up(self) -> None:
        """Stop trying: another attempt would change nothing."""
        self.state = RecoveryState.DEAD

    def waits_for(self) -> str:
        """Why the last start failed, in one line, while another one follows. Any thread."""
        failed = self.attempts[1:]  # the first entry is the loss
        if self.state is RecoveryState.SERVING or not failed:
            return ""
        return f"start {len(failed)} failed {failed[-1]}".split("\n")[0]

    def report(self) -> str:
        """Why recovery ended, attempt by attempt."""
        return "; ".join(self.attempts)
