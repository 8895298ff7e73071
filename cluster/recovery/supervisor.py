"""Keeps an engine supplied with a group of ranks: it watches the group, and when a rank is lost, it
ends the other ranks and assembles the next group.

The supervisor's thread runs the state machine of `states.py` and owns the groups, the watch and the
spares. The engine thread runs steps on the group it was given and reports a step that failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cluster.error_kinds import ErrorKind, kind_of, reason_of
from cluster.ranks.group import GroupReport, RankGroup, RankHandle, RankMaker, end_ranks
from cluster.ranks.processes import ProcessId
from cluster.recovery.endings import GroupDeathWatch
from cluster.recovery.standby import Standby
from cluster.recovery.states import Convictions, Recovery, RecoveryState
from cluster.recovery.watch import Watch
from cluster.timeouts import HEARTBEAT_S, Timeouts
from scheduler.errors import EaglerayError, EngineDeadError

# After the start, while there is work: processes that start take the cores of those that compute,
# and a program that computes for less needs no spares.
BUSY_SPARES_DELAY_S = 30.0
ASSEMBLY_END_TIMEOUT_S = 15.0  # a start fails soon after its processes have been killed

logger = logging.getLogger("eagleray.driver")


class Supervisor:
    """`start` assembles the first group on the caller's thread; `watch` starts its own thread."""

    make_group: type[RankGroup] = RankGroup
    make_watch: type[Watch] = Watch
    make_standby: type[Standby] = Standby

    def __init__(
        self,
        rank_maker: RankMaker,
        *,
        busy_since_s: Callable[[], float | None],
        has_work: Callable[[], bool],
        on_group_ready: Callable[[RankGroup, bool], None],
        on_lost: Callable[[int, str], None],
        on_dead: Callable[[EaglerayError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` gets the epoch that has ended and the reason, `on_group_ready` the next group
        and whether its KV cache is that of the last one, `on_dead` the reason why there will be
        none. All run on the supervisor's thread. `busy_since_s`: since when the engine waits for a
        result, None without work; `has_work`: whether it has any.
        """
        self._clock = clock
        self._rank_maker = rank_maker
        self._engine_config = rank_maker.config.engine
        self.recovery = Recovery(clock, Timeouts.from_options(self._engine_config).give_up_after_s)
        self._busy_since_s = busy_since_s
        self._has_work = has_work
        self._on_group_ready = on_group_ready
        self._on_lost = on_lost
        self._on_dead = on_dead
        self._group: RankGroup | None = None  # that serves, is being assembled, or failed
        self._group_watch: Watch | None = None  # of it, once its processes are known
        self._first_report: GroupReport | None = None  # of this driver's first epoch
        self._standby = self.make_standby(rank_maker, self.make_group)
        self._busy_spares_due_s = 0.0  # from when on spares are made beside work
        self._death_watch: GroupDeathWatch | None = None  # of the ranks that serve
        self._distrust_reason = ""  # why the lost ranks' memory cannot be trusted
        # In the group that is assembled; `Scheduler.start_epoch` may drop it all the same.
        self._cache_survives = False
        self._failed_step: tuple[int, str] | None = None  # epoch and reason; by the engine thread
        self._loss_reason = ""  # why the present epoch was lost
        self._is_serving = False  # whether the engine thread has the present group
        self._epoch = 0  # of the group that serves, else the next; a failed start keeps it
        self._last_applied_epoch = 0  # of the last result applied; 0 also before any
        self.convictions = Convictions()
        self._assembly_executor = ThreadPoolExecutor(1, "assemble")
        self._assembly: Future[Any] | None = None
        self._assembly_began_s = 0.0
        self._wake_event = threading.Event()
        self._is_stopping = False
        self._is_closed = False  # ranks and spares have ended for good
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(
        self, ranks: Seq[RankHandle] = (), num_kv_blocks: int | None = None
    ) -> tuple[RankGroup, GroupReport]:
        """The first group, of `ranks` if they have been created. `num_kv_blocks`: how many the
        engine began with, if this driver replaces another; else None. Raises what kept it from
        starting, and then leaves nothing running.
        """
        self._group = self.make_group(self._rank_maker, epoch=0, ranks=ranks)
        try:
            self._first_report = self._group.start(num_kv_blocks=num_kv_blocks)
        except BaseException:
            self._group.close()
            raise
        self._is_serving = True
        self._death_watch = GroupDeathWatch(self._group)
        return self._group, self._first_report

    def watch(self) -> None:
        """Begin to watch the first group."""
        assert self._group is not None
        self._group_watch = self._make_watch(self._group)
        self._standby.note_serving()
        self._busy_spares_due_s = self._clock() + BUSY_SPARES_DELAY_S
        self._thread.start()

    def end(self) -> None:
        """End the thread and the ranks without waiting for the thread. Any thread."""
        self._is_stopping = True
        self._wake_event.set()
        if self._group is not None:
            self._group.close()

    def note_failed_step(self, epoch: int, reason: str) -> None:
        """A step of this epoch failed. Any thread."""
        self._failed_step = epoch, reason
        self._wake_event.set()

    def note_applied_result(self, epoch: int) -> None:
        """A result of this epoch was applied. The engine thread; cheap."""
        self.convictions.note_result()
        self._last_applied_epoch = epoch

    @property
    def is_ready(self) -> bool:
        """Whether the ranks answer and, if there is work, this epoch has a result. Any thread."""
        watch, group = self._group_watch, self._group
        if self.recovery.state is not RecoveryState.SERVING or watch is None or group is None:
            return False
        has_result = self._last_applied_epoch == group.epoch
        return watch.all_ranks_answer and (has_result or not self._has_work())

    def processes(self) -> dict[str, ProcessId]:
        """The processes of the present epoch and the spares, as far as known. Any thread."""
        ranks = self._group.ranks if self._group is not None else []
        processes = {f"rank {i}": handle.process for i, handle in enumerate(ranks)}
        processes |= {
            f"spare {i}": spare.process for i, spare in enumerate(self._standby.ready_spares())
        }
        return {name: process for name, process in processes.items() if process is not None}

    def stop(self) -> None:
        """End the thread, the ranks and the spares. Raises `EngineError` if a process survives."""
        self._is_stopping = True
        self._wake_event.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ASSEMBLY_END_TIMEOUT_S)
        if not self._is_closed:
            self._standby.close()
            if self._group is not None:
                self._group.close()
            self._is_closed = True

    # -- the thread --------------------------------------------------------------------------------

    def _make_watch(self, group: RankGroup) -> Watch:
        return self.make_watch(group, self._wake_event.set, self._engine_config.stuck_after_s)

    def _run(self) -> None:
        while not self._is_stopping and self.recovery.state is not RecoveryState.DEAD:
            wait_s = self.recovery.wait_s() or HEARTBEAT_S
            self._wake_event.wait(min(wait_s, HEARTBEAT_S))
            self._wake_event.clear()
            try:
                if not self._is_stopping:
                    self.check_group()
            except Exception as error:  # a bug in this class
                logger.exception("the supervisor failed")
                self._die(reason_of(error))
        try:
            self.stop()  # the owner of a dead engine may be long in doing so
        except Exception as error:
            logger.error("a process of the engine is left: %s", reason_of(error))

    def check_group(self) -> None:
        """Check the group once and act on the result. What may pass by itself, such as a node that
        does not answer, is tried again with a later check.
        """
        try:
            self._check_group()
        except Exception as error:
            if not kind_of(error).is_transient:
                raise
            reason = reason_of(error)
            logger.warning("the supervisor tries again: %s", reason.split("\n")[0])
            if self.recovery.note_fault(reason):
                self._loss_reason = reason
            elif self.recovery.give_up_if_too_late(reason):
                self._die(f"no result for too long; {self.recovery.report()}")

    def _check_group(self) -> None:
        recovery = self.recovery
        if recovery.state is RecoveryState.SERVING:
            assert self._group is not None and self._group_watch is not None
            has_new_conviction = self.convictions.has_new()  # each check notes how many there are
            if self._last_applied_epoch == self._group.epoch or has_new_conviction:
                recovery.note_progress()
            elif self._group_watch.all_ranks_answer and not self._has_work():
                recovery.note_idle()
            reason = self._take_step_failure() or self._group_watch.find_fault(self._busy_since_s())
            if reason is None:
                assert self._first_report is not None
                makes_spares = not self._has_work() or self._clock() >= self._busy_spares_due_s
                self._standby.prepare(self._group, self._first_report, makes_spares)
            else:
                self._end_epoch(reason)
        elif recovery.state is RecoveryState.FENCING:  # an earlier check could not finish that
            self._fence()
        elif recovery.state is RecoveryState.ASSEMBLING:
            self._check_assembly()
        elif recovery.state is RecoveryState.BACKOFF and recovery.retry():
            self._assemble()

    def _take_step_failure(self) -> str | None:
        """Why a step of the present epoch failed, if one did. Each failure is returned once."""
        failed_step, self._failed_step = self._failed_step, None
        assert self._group is not None
        if failed_step is None or failed_step[0] != self._group.epoch:
            return None
        return failed_step[1]

    def _end_epoch(self, reason: str) -> None:
        """End this epoch."""
        assert self._group is not None
        if self.recovery.note_fault(reason):
            event = "is lost" if self._is_serving else "has not begun"
            logger.warning("epoch %d %s: %s", self._group.epoch, event, reason)
            self._loss_reason = reason
            self._fence()

    def _fence(self) -> None:
        """End every process of this epoch; only then may the next begin. May be called again."""
        group = self._group
        began_s = time.monotonic()
        assert group is not None
        # If the engine thread waits for one of its steps, that fails now.
        group.close(at_once=True)
        if self._assembly is not None:
            self._assembly.exception(ASSEMBLY_END_TIMEOUT_S)
            self._assembly = None
        if self._is_serving:
            death_watch, self._death_watch = self._death_watch, None
            self._distrust_reason = "nobody has seen how its ranks ended"
            if death_watch is not None:
                step_reason = self._take_step_failure() or ""
                self._distrust_reason = death_watch.distrust_reason(self._loss_reason, step_reason)
            self._on_lost(group.epoch, self._loss_reason)
            self._epoch += 1
            self._is_serving = False
        self._group_watch = None
        self.recovery.note_fenced()
        logger.info("its processes ended in %.2f s", time.monotonic() - began_s)
        if self.recovery.state is RecoveryState.DEAD:
            self._die(f"no result for too long; {self.recovery.report()}")
        elif self.recovery.state is RecoveryState.ASSEMBLING:
            self._assemble()

    def _assemble(self) -> None:
        """Begin to assemble the next group."""
        self._assembly_began_s = self._busy_spares_due_s = self._clock()
        lost_group = self._group
        assert lost_group is not None
        standby_group, spares = self._standby.take()
        if self._is_stopping:
            if standby_group is not None:
                standby_group.close()
            end_ranks([spare for spare in spares if spare is not None])
            return
        self._cache_survives = (
            standby_group is not None
            and not self._distrust_reason
            and standby_group.has_cache_of(lost_group)
        )
        if standby_group is not None:
            self._group = standby_group
            self._assembly = self._assembly_executor.submit(
                standby_group.take_over, self._epoch, self._cache_survives
            )
        else:
            self._group = self.make_group(self._rank_maker, epoch=self._epoch, spares=spares)
            self._assembly = self._assembly_executor.submit(self._group.start, self._first_report)
        self._assembly.add_done_callback(lambda _: self._wake_event.set())

    def _check_assembly(self) -> None:
        group, assembly = self._group, self._assembly
        assert group is not None and assembly is not None
        if assembly.done():
            error = assembly.exception()
            if error is None:
                self._serve(group)
            elif kind_of(error) is ErrorKind.CALLER_FAULT:  # such as a checkpoint that has changed
                self._end_epoch(str(error))
                self._die(str(error))
            else:
                self._end_epoch(f"the next group could not be assembled: {reason_of(error)}")
            return
        if (
            self._group_watch is None
            and group.ranks
            and all(handle.process for handle in group.ranks)
        ):
            self._group_watch = self._make_watch(group)
        if self._group_watch is not None:
            reason = self._group_watch.find_fault(self._assembly_began_s)
            if reason is not None:
                self._end_epoch(reason)

    def _serve(self, group: RankGroup) -> None:
        self._assembly = None
        if self._group_watch is None:
            self._group_watch = self._make_watch(group)
        self._death_watch = GroupDeathWatch(group)
        self.recovery.note_assembled()
        seconds = self._clock() - self._assembly_began_s
        logger.warning("epoch %d serves, assembled in %.2f s", group.epoch, seconds)
        if not self._cache_survives:
            reason = self._distrust_reason or "no group stood by that has it"
            logger.warning("the KV cache is computed again: %s", reason)
        self._is_serving = True
        self._on_group_ready(group, self._cache_survives)

    def _die(self, reason: str) -> None:
        self.recovery.give_up()
        self._on_dead(EngineDeadError(reason))
