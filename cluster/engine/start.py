"""Starts an engine and stops it: Ray, placement group, driver, ranks, frontend, in this order."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.client.frontend import Frontend
from cluster.client.setup import EngineSetup
from cluster.engine.driver import Driver
from cluster.engine.report import StartReport
from cluster.error_kinds import kind_of, reason_of
from cluster.ranks.group import RankMaker
from cluster.ranks.processes import end_marked_processes
from cluster.ray_errors import result_of
from cluster.recovery.states import Recovery, RecoveryState
from cluster.resources.placement import Place, Placement, actor_environment
from cluster.resources.room import pick_device
from cluster.resources.session import SESSION
from cluster.timeouts import DRIVER_SHUTDOWN_TIMEOUT_S, Timeouts
from configs.engine import ResolvedConfig
from scheduler.errors import ConfigError, EaglerayError, EngineDeadError, EngineError
from workers.configuration import has_cuda, resolve_config
from workers.models.local import recheck_checkpoint

MAX_EARLY_DRIVER_DEATHS = 5
ENDING_RETRY_PAUSE_S = 0.5

logger = logging.getLogger("eagleray")


class EngineProcesses:
    """The processes of an engine, until `close` or the end of the program, and a frontend to it."""

    def __init__(self, setup: EngineSetup, placement_group: PlacementGroup | None = None) -> None:
        """Start everything. If that fails, raises the reason and leaves nothing behind.

        `placement_group`: the caller's, with one bundle per rank; it is never removed.
        """
        undo_stack = contextlib.ExitStack()
        # Also runs at exit.
        self.close = weakref.finalize(self, _close_unless_forked, os.getpid(), undo_stack)
        try:
            self._owner, self.frontend, self.report = _start(setup, placement_group, undo_stack)
        except BaseException:
            self.close()
            raise

    @property
    def driver(self) -> Any:
        """The driver actor. After its death, this is its successor."""
        return self._owner.driver

    def recovery_waits_for(self) -> str:
        """What the replacement of the driver waits for, in one line."""
        return self._owner.recovery_waits_for()

    def places(self) -> list[Place]:
        """Where the ranks are. Raises `WorkerError` while a node is missing."""
        return self._owner.placement.places()


def _start(
    setup: EngineSetup, placement_group: PlacementGroup | None, undo_stack: contextlib.ExitStack
) -> tuple[DriverOwner, Frontend, StartReport]:
    """(owner, frontend, report). What undoes the start is pushed onto `undo_stack`."""
    began_s = time.perf_counter()
    num_ranks = setup.config.tensor_parallel_size
    session_lease = SESSION.connect(setup.config.ray_address, num_ranks)
    undo_stack.callback(SESSION.release, session_lease)
    device = pick_device(setup.config.device, num_ranks)
    connected_s = time.perf_counter()
    engine_id = uuid.uuid4().hex
    placement = Placement(
        num_ranks, device, f"eagleray-{engine_id}", placement_group, setup.config.wait_for_nodes_s
    )
    undo_stack.callback(_undo_unless_ray_ended, session_lease, placement.remove)
    placement.reserve()
    owner = DriverOwner(_resolve_config(setup, device, placement), placement, engine_id)
    frontend = Frontend(
        owner.driver,
        lambda: SESSION.holds(session_lease),
        owner.replace,
        Timeouts.from_options(setup.config).stuck_after_s,
        recovery_waits_for=owner.recovery_waits_for,
    )
    # No thread of ours may be inside Ray when Ray stops.
    undo_stack.callback(frontend.join, DRIVER_SHUTDOWN_TIMEOUT_S)
    undo_stack.callback(_undo_unless_ray_ended, session_lease, owner.stop)
    undo_stack.callback(frontend.close)
    report = owner.start()
    frontend.driver_handle.watch_end()
    for line in report.log_lines:
        logger.info(line)
    total_s = time.perf_counter() - began_s
    seconds = {"ray": connected_s - began_s, "processes": 0.0, **report.seconds}
    # Each phase has the time of the slowest rank; while one rank is slow, the others wait.
    seconds |= {"processes": max(0.0, total_s - sum(seconds.values())), "all": total_s}
    phases = (f"{phase} {phase_s:.2f} s" for phase, phase_s in seconds.items())
    logger.info("start: %s", ", ".join(phases))
    return owner, frontend, dataclasses.replace(report, seconds=seconds)


class DriverOwner:
    """Keeps one driver running, on the node of rank 0. When the driver dies, every process of its
    engine is ended, then the next driver is started, on another node if that one was lost.
    """

    def __init__(self, config: ResolvedConfig, placement: Placement, engine_id: str) -> None:
        self._config = config
        self._timeouts = Timeouts.from_options(config.engine)
        self.placement = placement
        self._engine_id = engine_id
        self._first_report: StartReport | None = None  # of the first driver
        self._num_early_driver_deaths = 0  # in a row
        self._recovery: Recovery | None = None  # while the driver is replaced, or could not be
        self._is_stopped = False
        self.driver = start_driver(config, placement, self._engine_id)

    def start(self) -> StartReport:
        """Start the engine. Raises the error that kept it from starting."""
        limit_s = self._timeouts.driver_start_s
        report: StartReport = result_of(self.driver.start.remote(), "start the engine", limit_s)
        if self._first_report is None:
            self._first_report = report
        elif report.checkpoint_id != self._first_report.checkpoint_id:
            raise ConfigError(
                "the files of the checkpoint have changed since the engine started, so requests"
                " cannot go on; start a new engine"
            )
        return report

    def replace(self, driver: Any, error: EaglerayError, has_been_healthy: bool) -> Any:
        """Start a new driver in place of one that is dead or stuck. Raises `EngineDeadError` when
        none could be started, naming each attempt, or when too many in a row died early, before
        they had been healthy (see `DriverHandle`).
        """
        logger.warning("the driver is replaced: %s", str(error).split("\n")[0])
        if self._first_report is None:
            raise error  # it has never served
        self._num_early_driver_deaths = 0 if has_been_healthy else self._num_early_driver_deaths + 1
        if self._num_early_driver_deaths > MAX_EARLY_DRIVER_DEATHS:
            raise EngineDeadError(
                f"{self._num_early_driver_deaths} drivers died one after another before they had"
                f" any news; the last one: {error}"
            )
        limit_s = self._timeouts.give_up_after_s
        recovery = self._recovery = Recovery(time.monotonic, limit_s)
        recovery.note_fault(str(error))
        while True:
            self._fence_driver(recovery)
            recovery.note_fenced()
            while recovery.state is RecoveryState.BACKOFF and not self._is_stopped:
                if not recovery.retry():
                    time.sleep(min(0.1, recovery.wait_s()))
            if recovery.state is RecoveryState.DEAD or self._is_stopped:
                raise EngineDeadError(f"no driver could be started: {recovery.report()}")
            try:
                recheck_checkpoint(self._config)
                self.placement.restore(limit_s, lambda: not self._is_stopped)
                num_blocks = self._first_report.limits.num_blocks
                self.driver = start_driver(
                    self._config, self.placement, self._engine_id, num_blocks
                )
                self.start()
            except Exception as failure:
                kind = kind_of(failure)
                if not (kind.is_transient or isinstance(failure, EngineError)):
                    raise EngineDeadError(reason_of(failure)) from failure
                recovery.note_fault(reason_of(failure))
                logger.warning("the driver is not replaced yet: %s", recovery.last_failed_start())
            else:
                self._recovery = None
                return self.driver

    def recovery_waits_for(self) -> str:
        """What the replacement of a driver waits for, in one line. Any thread."""
        recovery = self._recovery
        failed_start = recovery.last_failed_start() if recovery is not None else ""
        return self.placement.missing_resources or failed_start

    def stop(self) -> None:
        """End the driver and its ranks."""
        self._is_stopped = True
        with contextlib.suppress(EaglerayError):  # it may be dead; its processes are ended next
            result_of(self.driver.shutdown.remote(), "stop the driver", DRIVER_SHUTDOWN_TIMEOUT_S)
        self._end_processes()

    def _fence_driver(self, recovery: Recovery) -> None:
        """End the driver and its ranks. Tries again if, for example, a node does not answer. Raises
        `EngineDeadError` when that takes too long.
        """
        while True:
            try:
                self._end_processes()
                self.placement.fence_stale_copies()
                return
            except Exception as failure:
                reason = reason_of(failure)
                if not kind_of(failure).is_transient:
                    raise EngineDeadError(
                        f"the last driver could not be ended: {reason}"
                    ) from failure
                if self._is_stopped or recovery.give_up_if_too_late(reason):
                    failures_text = recovery.report()
                    raise EngineDeadError(
                        f"no driver could be started: {failures_text}"
                    ) from failure
                logger.warning("the driver is not replaced yet: %s", reason.split("\n")[0])
                time.sleep(ENDING_RETRY_PAUSE_S)

    def _end_processes(self) -> None:
        ray.kill(self.driver)
        end_marked_processes(self._engine_id, self.placement.node_ids())


def start_driver(
    config: ResolvedConfig, placement: Placement, engine_id: str, num_kv_blocks: int | None = None
) -> Any:
    """A handle of a new driver actor, on the node of rank 0. The driver takes no bundle, so it
    outlives the placement group when that has to be replaced. The processes of its first ranks,
    which take longest to start, start at the same time. `num_kv_blocks`: how many blocks the engine
    had at first, if this driver replaces another.
    """
    places = placement.places()
    rank_maker = RankMaker(config, placement, engine_id, Driver.rank_actor_class)
    rank_actors = [rank_maker.create(place).actor for place in places]
    return (
        ray.remote(Driver)
        .options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(places[0].node_id, soft=False),
        )
        .remote(config, placement, engine_id, rank_actors, num_kv_blocks)
    )


def _resolve_config(setup: EngineSetup, device: str, placement: Placement) -> ResolvedConfig:
    """`resolve_config`, run on this machine, or on a node with GPUs if the ranks need them and this
    machine has none: what is installed there matters.
    """
    arguments = (setup.config, setup.model, setup.model_dir, device)
    if device == "cpu" or has_cuda():
        return resolve_config(*arguments)
    remote_resolve = ray.remote(resolve_config).options(
        num_cpus=1,
        num_gpus=1,
        max_retries=0,
        runtime_env=actor_environment(),
        scheduling_strategy=placement.bundle_strategy(0),
    )
    ref, action = remote_resolve.remote(*arguments), "see what is installed where the ranks run"
    resolved_config: ResolvedConfig = result_of(ref, action, setup.config.start_timeout_s)
    return resolved_config


def _undo_unless_ray_ended(session_lease: str, undo: Callable[[], None]) -> None:
    """Call `undo` unless Ray was shut down, and all has ended: the call would start a new Ray."""
    if SESSION.holds(session_lease):
        undo()


def _close_unless_forked(pid: int, undo_stack: contextlib.ExitStack) -> None:
    """Close, but not in a fork of the process that owns the engine."""
    if os.getpid() == pid:
        undo_stack.close()
