"""Whether the ranks of one epoch live and move.

The death of a rank fails a call that never returns. A heartbeat asks each rank for its progress.
*Stuck* is not slow: it means that work is outstanding and for `stuck_after_s` no counter of any
rank has moved, or that a rank has not answered at all for that long. How long a step or a load
takes does not matter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.engine.processes import describe
from cluster.engine.worker_group import WorkerGroup
from scheduler.errors import EaglerayError
from workers.progress import Progress

# How often to look, and after which time to ask a rank again: every second look.
HEARTBEAT_S = 0.25
ASK_AFTER_S = 0.4
# Without an answer for so long, the engine does not call itself ready.
ANSWER_S = 0.4
# If this process itself was not running for so long, nobody else is to blame for silence.
STALL_S = 2.0


@dataclass(slots=True)
class _Pulse:
    """What is known of one rank."""

    heard_s: float
    moved_s: float
    asked_s: float | None = None  # when the question was sent that is not answered yet
    progress: Progress | None = None


class Watch:
    """Watches the ranks of a group, once their processes are known. `look` is called by one thread,
    which `wake` wakes.
    """

    def __init__(
        self, group: WorkerGroup, wake: Callable[[], None], stuck_after_s: float, clock: Any = None
    ) -> None:
        self.group = group
        self._wake = wake
        self._stuck_after_s = stuck_after_s
        self._clock = clock or time.monotonic
        self._looked_s = now_s = self._clock()
        self._pulses = [_Pulse(heard_s=now_s, moved_s=now_s) for _ in group.ranks]
        self._dead: list[tuple[int, BaseException]] = []
        for rank, handle in enumerate(group.ranks):
            ended = handle.actor.wait_for_end.remote().future()
            ended.add_done_callback(functools.partial(self._ended, rank))

    @property
    def answers(self) -> bool:
        """Whether every rank has answered lately."""
        now_s = self._clock()
        return not self._dead and all(
            pulse.asked_s is None or now_s - pulse.asked_s < ANSWER_S for pulse in self._pulses
        )

    def look(self, busy_since_s: float | None) -> str | None:
        """What is wrong, if anything is; sends the next heartbeats. `busy_since_s`: when work was
        begun or a result came, whichever is later; None without work.
        """
        if self._dead:
            rank, error = self._dead[0]
            return f"rank {rank} died: {error}".split("\n")[0]
        now_s = self._clock()
        stalled_s = now_s - self._looked_s - HEARTBEAT_S
        self._looked_s = now_s
        for rank, pulse in enumerate(self._pulses):
            if stalled_s > STALL_S:
                pulse.heard_s += stalled_s
                pulse.moved_s += stalled_s
            if pulse.asked_s is None and now_s - pulse.heard_s >= ASK_AFTER_S:
                pulse.asked_s = now_s
                asked = self.group.ranks[rank].actor.progress.remote().future()
                asked.add_done_callback(functools.partial(self._answered, rank))
        silent = [
            rank
            for rank, pulse in enumerate(self._pulses)
            if now_s - pulse.heard_s > self._stuck_after_s
        ]
        if silent:
            return self._report(silent[0], "has not answered")
        if busy_since_s is not None:
            moved_s = max(busy_since_s, *(pulse.moved_s for pulse in self._pulses))
            if now_s - moved_s > self._stuck_after_s:
                return self._report(self._furthest_behind(), "has not moved")
        return None

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

    # -- threads of Ray ----------------------------------------------------------------------------

    def _ended(self, rank: int, ended: Any) -> None:
        self._dead.append((rank, ended.exception() or RuntimeError("it has ended")))
        self._wake()

    def _answered(self, rank: int, answered: Any) -> None:
        if answered.exception() is not None:
            return  # it has died, or the call was lost; then the next question is due at once
        pulse, progress = self._pulses[rank], answered.result()
        now_s = self._clock()
        pulse.heard_s, pulse.asked_s = now_s, None
        if progress != pulse.progress:
            pulse.progress, pulse.moved_s = progress, now_s
