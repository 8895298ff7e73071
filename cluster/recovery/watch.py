"""Whether the ranks of one epoch are alive and make progress.

Each rank has a call that never returns, which fails when the rank dies; for ranks on this node, the
kernel reports the death sooner. A heartbeat asks each rank for its progress. *Stuck* is not slow:
ranks are stuck if work is outstanding and no counter of any rank has moved for `stuck_after_s`, or
if a rank has not answered for that long. How long a step or a load takes does not matter.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.ranks.group import RankGroup
from cluster.ranks.processes import (
    describe_process,
    is_local_process_stopped,
    processes_on_this_node,
    watch_local_processes,
)
from cluster.ray_errors import was_lost
from cluster.timeouts import HEARTBEAT_S, RANK_ANSWER_TIMEOUT_S
from scheduler.errors import EaglerayError
from workers.progress import Progress

# A rank on this node that has no work and is not stopped gets a heartbeat only this often, because
# each costs a millisecond.
IDLE_HEARTBEAT_S = 2.0
# If this process itself did not run for this long, the silence of the ranks proves nothing.
MIN_STALL_S = 2.0

logger = logging.getLogger("eagleray.driver")


@dataclass(slots=True)
class _RankHealth:
    """The signs of life of one rank."""

    last_answer_s: float
    last_progress_s: float
    unanswered_since_s: float | None = None  # the first heartbeat without an answer
    has_heartbeat_call: bool = False  # a call that has not ended
    has_end_call: bool = False  # a call that ends with the rank
    progress: Progress | None = None  # of its last answer


class Watch:
    """Watches the ranks of a group whose processes are known. One thread, which `wake` wakes."""

    def __init__(
        self, group: RankGroup, wake: Callable[[], None], stuck_after_s: float, clock: Any = None
    ) -> None:
        self.group = group
        self._wake = wake
        self._stuck_after_s = stuck_after_s
        self._clock = clock or time.monotonic
        self._last_check_s = now_s = self._clock()
        self._health_by_rank = [
            _RankHealth(last_answer_s=now_s, last_progress_s=now_s) for _ in group.ranks
        ]
        self._deaths: list[tuple[int, str]] = []  # rank and reason
        self._local_processes = processes_on_this_node([handle.process for handle in group.ranks])
        watch_local_processes(self._local_processes, self._note_exit)
        self._watch_for_ends()

    @property
    def all_ranks_answer(self) -> bool:
        """Whether no rank has died, or owes an answer to a heartbeat for long."""
        overdue_before_s = self._clock() - RANK_ANSWER_TIMEOUT_S
        waits_since_s = [health.unanswered_since_s for health in self._health_by_rank]
        return not self._deaths and all(s is None or s > overdue_before_s for s in waits_since_s)

    def find_fault(self, busy_since_s: float | None) -> str | None:
        """What is wrong, if anything; sends the next heartbeats. `busy_since_s`: when work,
        or the group's start, began or the last result came, whichever is later; None without work.
        """
        if self._deaths:
            rank, reason = self._deaths[0]
            return f"rank {rank} died: {reason}"
        self._watch_for_ends()
        now_s = self._clock()
        own_stall_s = now_s - self._last_check_s - HEARTBEAT_S
        self._last_check_s = now_s
        for rank, health in enumerate(self._health_by_rank):
            if own_stall_s > MIN_STALL_S:
                health.last_progress_s += own_stall_s
                if health.unanswered_since_s is not None:
                    health.unanswered_since_s += own_stall_s
            needs_heartbeat = busy_since_s is not None or self._may_be_stuck_idle(rank)
            if needs_heartbeat and not health.has_heartbeat_call:
                health.has_heartbeat_call = True
                health.unanswered_since_s = health.unanswered_since_s or now_s
                call = self.group.ranks[rank].actor.progress.remote().future()
                call.add_done_callback(functools.partial(self._handle_answer, rank))
        for rank, health in enumerate(self._health_by_rank):
            silent_since_s = health.unanswered_since_s
            if silent_since_s is not None and now_s - silent_since_s > self._stuck_after_s:
                return self._report(rank, "has not answered")
        if busy_since_s is not None:
            last_progress_s = max(
                busy_since_s, *(health.last_progress_s for health in self._health_by_rank)
            )
            if now_s - last_progress_s > self._stuck_after_s:
                return self._report(self._slowest_rank(), "has not moved")
        return None

    def _watch_for_ends(self) -> None:
        """Have a call wait for the end of each rank."""
        for rank, health in enumerate(self._health_by_rank):
            if not health.has_end_call:
                health.has_end_call = True
                call = self.group.ranks[rank].actor.wait_for_end.remote().future()
                call.add_done_callback(functools.partial(self._handle_end, rank))

    def _may_be_stuck_idle(self, rank: int) -> bool:
        """Whether a rank may be stuck although it has no work."""
        process = self._local_processes.get(rank)
        silence_s = self._clock() - self._health_by_rank[rank].last_answer_s
        return process is None or silence_s >= IDLE_HEARTBEAT_S or is_local_process_stopped(process)

    def _slowest_rank(self) -> int:
        """The rank that the others wait for: the one that has begun the fewest all-reduces."""
        progresses = [health.progress for health in self._health_by_rank]
        counts = [progress.num_all_reduces if progress else -1 for progress in progresses]
        return counts.index(min(counts))

    def _report(self, stuck_rank: int, symptom: str) -> str:
        lines = []
        for rank, health in enumerate(self._health_by_rank):
            activity = health.progress.describe() if health.progress else "not known"
            process = self.group.ranks[rank].process
            try:
                state = "not known" if process is None else describe_process(process)
            except EaglerayError as error:
                state = str(error)
            lines.append(f"rank {rank} at {activity}: {state}")
        progress = self._health_by_rank[stuck_rank].progress
        return (
            f"rank {stuck_rank} {symptom} for {self._stuck_after_s:g} s"
            f" (at {progress.describe() if progress else 'its start'})\n" + "\n".join(lines)
        )

    # -- other threads -----------------------------------------------------------------------------

    def _note_exit(self, rank: int) -> None:
        self._deaths.append((rank, "its process is ending"))
        self._wake()

    def _handle_end(self, rank: int, ended_call: Any) -> None:
        if was_lost(ended_call):
            self._health_by_rank[rank].has_end_call = False  # the next check makes the call again
            self._wake()
            return
        reason = str(ended_call.exception() or "it has ended")
        if self._deaths:  # Ray may say more than the kernel, such as that there was no memory
            logger.info("Ray says of rank %d: %s", rank, reason)
        self._deaths.append((rank, reason.split("\n")[0]))
        self._wake()

    def _handle_answer(self, rank: int, ended_call: Any) -> None:
        health = self._health_by_rank[rank]
        health.has_heartbeat_call = False
        if ended_call.exception() is not None:
            return  # the rank has died, or the call was lost and is made again
        progress = ended_call.result()
        now_s = self._clock()
        health.last_answer_s, health.unanswered_since_s = now_s, None
        if progress != health.progress:
            health.progress, health.last_progress_s = progress, now_s
