"""Whether the ranks of one epoch are alive and make progress.

The death of a rank fails a call that never returns, and is made again if it is lost; for ranks on
this node, the kernel reports the death sooner. A heartbeat asks each rank for its progress. *Stuck*
is not slow: it means that work is outstanding and for `stuck_after_s` no counter of any rank has
moved, or that a rank has not answered at all for that long. How long a step or a load takes does
not matter.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.ranks.group import RankGroup
from cluster.ranks.processes import describe, is_stopped_here, on_this_node, watch_here
from cluster.ray_errors import was_lost
from cluster.timeouts import ANSWER_S, HEARTBEAT_S
from scheduler.errors import EaglerayError
from workers.progress import Progress

# A rank on this node that is not stopped and has nothing to do is asked only this often, because a
# question costs a millisecond.
ASK_IDLE_AFTER_S = 2.0
# If this process itself did not run for this long, the silence of others proves nothing.
STALL_S = 2.0

logger = logging.getLogger("eagleray.driver")


@dataclass(slots=True)
class _Pulse:
    """What is known about one rank."""

    heard_s: float
    moved_s: float
    asked_s: float | None = None  # since when a question is unanswered
    is_asked: bool = False  # and that call has not ended
    is_followed: bool = False  # a call waits for its end
    progress: Progress | None = None


class Watch:
    """Watches the ranks of a group, once their processes are known. `look` is called by one thread,
    which `wake` wakes.
    """

    def __init__(
        self, group: RankGroup, wake: Callable[[], None], stuck_after_s: float, clock: Any = None
    ) -> None:
        self.group = group
        self._wake = wake
        self._stuck_after_s = stuck_after_s
        self._clock = clock or time.monotonic
        self._looked_s = now_s = self._clock()
        self._pulses = [_Pulse(heard_s=now_s, moved_s=now_s) for _ in group.ranks]
        self._dead: list[tuple[int, str]] = []
        self._here = on_this_node([handle.process for handle in group.ranks])
        watch_here(self._here, self._is_gone)
        self._follow()

    @property
    def answers(self) -> bool:
        """Whether every rank has answered recently."""
        now_s = self._clock()
        return not self._dead and all(
            pulse.asked_s is None or now_s - pulse.asked_s < ANSWER_S for pulse in self._pulses
        )

    def look(self, busy_since_s: float | None) -> str | None:
        """What is wrong, if anything is; sends the next heartbeats. `busy_since_s`: when work began
        or the last result came, whichever is later; None without work.
        """
        if self._dead:
            rank, why = self._dead[0]
            return f"rank {rank} died: {why}"
        self._follow()
        now_s = self._clock()
        stalled_s = now_s - self._looked_s - HEARTBEAT_S
        self._looked_s = now_s
        for rank, pulse in enumerate(self._pulses):
            if stalled_s > STALL_S:
                pulse.moved_s += stalled_s
                if pulse.asked_s is not None:
                    pulse.asked_s += stalled_s
            if not pulse.is_asked and (busy_since_s is not None or self._is_doubtful(rank)):
                pulse.is_asked, pulse.asked_s = True, pulse.asked_s or now_s
                asked = self.group.ranks[rank].actor.progress.remote().future()
                asked.add_done_callback(functools.partial(self._answered, rank))
        silent = [
            rank
            for rank, pulse in enumerate(self._pulses)
            if pulse.asked_s is not None and now_s - pulse.asked_s > self._stuck_after_s
        ]
        if silent:
            return self._report(silent[0], "has not answered")
        if busy_since_s is not None:
            moved_s = max(busy_since_s, *(pulse.moved_s for pulse in self._pulses))
            if now_s - moved_s > self._stuck_after_s:
                return self._report(self._furthest_behind(), "has not moved")
        return None

    def _follow(self) -> None:
        """Have a call wait for the end of each rank."""
        for rank, pulse in enumerate(self._pulses):
            if not pulse.is_followed:
                pulse.is_followed = True
                ended = self.group.ranks[rank].actor.wait_for_end.remote().future()
                ended.add_done_callback(functools.partial(self._ended, rank))

    def _is_doubtful(self, rank: int) -> bool:
        """Whether a rank may be stuck although it has no work."""
        process, silent_s = self._here.get(rank), self._clock() - self._pulses[rank].heard_s
        return process is None or silent_s >= ASK_IDLE_AFTER_S or is_stopped_here(process)

    def _furthest_behind(self) -> int:
        """The rank that the others wait for: the one with the fewest collectives."""
        counts = [p.progress.num_collectives if p.progress else -1 for p in self._pulses]
        return counts.index(min(counts))

    def _report(self, rank: int, what: str) -> str:
        lines = []
        for number, (pulse, handle) in enumerate(zip(self._pulses, self.group.ranks, strict=True)):
            where = pulse.progress.describe() if pulse.progress else "not known"
            try:
                state = describe(handle.process) if handle.process is not None else "not known"
            except EaglerayError as error:
                state = str(error)
            lines.append(f"rank {number} at {where}: {state}")
        at = self._pulses[rank].progress
        return (
            f"rank {rank} {what} for {self._stuck_after_s:g} s"
            f" (at {at.describe() if at else 'its start'})\n" + "\n".join(lines)
        )

    # -- other threads -----------------------------------------------------------------------------

    def _is_gone(self, rank: int) -> None:
        self._dead.append((rank, "its process has ended"))
        self._wake()

    def _ended(self, rank: int, ended: Any) -> None:
        if was_lost(ended):
            self._pulses[rank].is_followed = False  # the next look makes the call again
            self._wake()
            return
        why = str(ended.exception() or "it has ended")
        if self._dead:  # known already; Ray may say more, such as that there was too little memory
            logger.info("Ray says of rank %d: %s", rank, why)
        self._dead.append((rank, why.split("\n")[0]))
        self._wake()

    def _answered(self, rank: int, answered: Any) -> None:
        pulse = self._pulses[rank]
        pulse.is_asked = False
        if answered.exception() is not None:
            return  # it has died, or the call was lost and is made again
        progress = answered.result()
        now_s = self._clock()
        pulse.heard_s, pulse.asked_s = now_s, None
        if progress != pulse.progress:
            pulse.progress, pulse.moved_s = progress, now_s
