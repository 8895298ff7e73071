"""A group of ranks that stands by: spares that hold the memory of the present ranks, have met each
other and are ready to run a step. They take over with one call per rank.

Spares become such a group as soon as they are warm. Where there is none yet, none is wanted
(`ResolvedConfig.has_standby`), or spares cannot share memory, spares take the places of ranks one
by one; a group that does not come in time or has lost a process is ended with its spares. Nothing
that goes wrong here may harm the ranks that serve: it is logged, and tried again later, on a GPU
three times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.error_kinds import ErrorKind, kind_of, reason_of
from cluster.ranks.group import GroupReport, RankGroup, RankHandle, RankMaker
from cluster.ranks.processes import processes_on_this_node, watch_local_processes
from cluster.recovery.spares import SPARES_DELAY_S, Spares

# How long a group that is about to stand by is waited for when it has to take over, and how long
# its ranks may take to answer.
START_LIMIT_S = 10.0
ANSWER_LIMIT_S = 1.0
# On a GPU, after so many groups that could not start: each takes time of the ranks that serve.
MAX_FAILED_GPU_STARTS = 3
# How long after a group was lost or could not stand by, or spares could not be made, the next ones
# are made: longer each time.
FIRST_DELAY_S, MAX_DELAY_S = 10.0, 320.0

NO_SHARED_MEMORY_WARNING = (
    "no group stands by: spares cannot share weights and KV cache here (the logs of the ranks say"
    " why) and would hold them a second time. They load weights when ranks are lost; spares='off'"
    " saves their memory"
)

logger = logging.getLogger("eagleray.driver")


class Standby:
    """Spares and the group that they form, made in the background. One thread."""

    def __init__(
        self, rank_maker: RankMaker, make_group: Callable[..., RankGroup] = RankGroup
    ) -> None:
        self._rank_maker = rank_maker
        self._make_group = make_group
        self._spares = Spares(rank_maker)
        self._wants_groups = rank_maker.config.has_standby
        self._forms_groups = self._wants_groups  # unless the present ranks cannot share memory
        self._is_on_gpu = rank_maker.config.device == "cuda"
        self._num_failed_starts = 0  # since a group could take over
        self._group: RankGroup | None = None  # that stands by, or is about to
        self._start_future: Future[None] | None = None  # of the group
        self._has_lost_process = False
        self._delay_s = FIRST_DELAY_S  # until the next ones are made, if these fail
        self._executor = ThreadPoolExecutor(1, "stand-by")

    def note_serving(self) -> None:
        """The engine begins to serve, with its first group."""
        self._spares.delay(SPARES_DELAY_S)

    def prepare(
        self, present_group: RankGroup, first_report: GroupReport, makes_spares: bool
    ) -> None:
        """Make spares for the present group if they are due and `makes_spares`, and a group of them
        once warm; end one that cannot take over. `first_report`: of this driver's first epoch; the
        group that stands by gets as many KV blocks and must have the same checkpoint.
        """
        try:
            if self._group is None:
                memories = [handle.memory for handle in present_group.ranks]
                if self._forms_groups and not all(m and m.weights and m.cache for m in memories):
                    self._forms_groups = False
                    logger.warning(NO_SHARED_MEMORY_WARNING)
                # Without a group, memory that spares hold would only stay when its rank ends.
                held_memories = memories if self._forms_groups else [None] * len(memories)
                self._spares.prepare(held_memories, makes_spares)
                if self._spares.are_warm:
                    if self._forms_groups:
                        self._stand_by(first_report)
                    else:
                        self._delay_s = FIRST_DELAY_S
            elif not self._is_starting and not self._await_start(0.0):
                self._drop_group()
        except Exception as error:
            self._log(error)
            self._drop_group()

    def ready_spares(self) -> list[RankHandle]:
        """The processes of the group that stands by; where none is formed, warm spares. Spares that
        do not form a group yet are left out, though `take` gives them. Any thread.
        """
        group, start_future = self._group, self._start_future
        if group is None or start_future is None:
            return [] if self._forms_groups else self._spares.warm_spares()
        has_started = start_future.done() and start_future.exception() is None
        return list(group.ranks) if has_started else []

    def take(self) -> tuple[RankGroup | None, list[RankHandle | None]]:
        """The group that stands by, or the spares by rank, as far as there are any. The next ones
        are made as soon as the engine serves again: a rank that failed once may fail again.
        """
        group = self._group
        if group is not None and (
            not self._await_start(START_LIMIT_S) or not group.all_ranks_answer(ANSWER_LIMIT_S)
        ):
            self._drop_group()
            group = None
        self._group = self._start_future = None
        self._forms_groups = self._wants_groups
        self._num_failed_starts = 0
        return group, self._spares.take()

    def close(self) -> None:
        """End all of these processes."""
        if self._group is not None:
            self._group.close()
        self._spares.close()

    def _stand_by(self, first_report: GroupReport) -> None:
        spares = self._spares.hand_over()
        self._has_lost_process = False
        group = self._make_group(self._rank_maker, ranks=spares)
        self._start_future = self._executor.submit(group.stand_by, first_report)
        self._group = group
        processes = processes_on_this_node([spare.process for spare in spares])
        watch_local_processes(processes, lambda _: self._note_end(group))

    def _note_end(self, group: RankGroup) -> None:
        """A process of a group has ended, which may have taken over since."""
        if group is self._group:
            self._has_lost_process = True

    @property
    def _is_starting(self) -> bool:
        """Whether the group is still getting ready, and has lost no process."""
        assert self._start_future is not None
        return not self._has_lost_process and not self._start_future.done()

    def _await_start(self, limit_s: float) -> bool:
        """Wait until the group can take over, for at most `limit_s`. False if it cannot by then,
        which is logged, or has lost a process. If it can, later delays begin with the shortest.
        """
        assert self._start_future is not None
        if self._has_lost_process:
            return False
        try:
            self._start_future.result(limit_s)
        except Exception as error:
            self._log(error)
            self._num_failed_starts += 1
            if self._is_on_gpu and self._num_failed_starts == MAX_FAILED_GPU_STARTS:
                self._forms_groups = False
                logger.warning("no group stands by from now on: spares hold no memory")
            return False
        self._delay_s = FIRST_DELAY_S
        self._num_failed_starts = 0
        return True

    def _drop_group(self) -> None:
        """End the group, or the spares; the next ones are made later."""
        group, self._group, self._start_future = self._group, None, None
        self._spares.delay(self._delay_s)
        self._delay_s = min(2 * self._delay_s, MAX_DELAY_S)
        try:
            self._spares.close()
            if group is not None:
                group.close()
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        is_bug = kind_of(error) is ErrorKind.BUG and not isinstance(error, TimeoutError)
        reason = reason_of(error).split("\n")[0]
        logger.warning("no group stands by: %s", reason, exc_info=error if is_bug else None)
