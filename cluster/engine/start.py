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
from cluster.engine.report import EngineReport
from cluster.error_kinds import kind_of, reason_of
from cluster.ranks.group import RankMaker
from cluster.ranks.processes import end_marked
from cluster.ray_errors import call
from cluster.recovery.states import Recovery, State
from cluster.resources.placement import Place, Placement, actor_environment
from cluster.resources.room import pick_device
from cluster.resources.session import SESSION
from cluster.timeouts import SHUTDOWN_TIMEOUT_S, Timeouts
from configs.engine import ResolvedConfig
from scheduler.errors import ConfigError, EaglerayError, EngineDeadError, EngineError
from workers.configuration import has_cuda, resolve_config
from workers.models.local import check_again

MAX_IDLE_DEATHS = 5
END_PAUSE_S = 0.5

logger = logging.getLogger("eagleray")


class EngineProcesses:
    """The processes of one engine, and this program's frontend to it.

    `close` ends them; so does the end of the program.
    """

    def __init__(self, setup: EngineSetup, group: PlacementGroup | None = None) -> None:
        """Start everything. Raises what kept it from starting, and leaves nothing behind.

        `group`: a placement group of the caller's, with one bundle per rank; it is used and never
        removed.
        """
        stack = contextlib.ExitStack()
        self.close = weakref.finalize(self, _close_in, os.getpid(), stack)  # even at exit
        try:
            self._owner, self.frontend, self.report = _start(setup, group, stack)
        except BaseException:
            self.close()
            raise

    @property
    def driver(self) -> Any:
        """The driver actor. After its death, this is its successor."""
        return self._owner.driver

    def places(self) -> list[Place]:
        """Where the ranks are. Raises `WorkerError` while a node is missing."""
        return self._owner.placement.places()


def _start(
    setup: EngineSetup, group: PlacementGroup | None, stack: contextlib.ExitStack
) -> tuple[DriverOwner, Frontend, EngineReport]:
    """(owner, frontend, report); everything that has to be undone is pushed onto the stack."""
    began = time.perf_counter()
    size = setup.config.tensor_parallel_size
    lease = SESSION.connect(setup.config.ray_address, size)
    stack.callback(SESSION.release, lease)
    device = pick_device(setup.config.device, size)
    connected = time.perf_counter()
    engine_id = uuid.uuid4().hex
    placement = Placement(
        size, device, f"eagleray-{engine_id}", group, setup.config.wait_for_nodes_s
    )
    stack.callback(_while_held, lease, Placement.remove, placement)
    placement.reserve()
    owner = DriverOwner(_resolve(setup, device, placement), placement, engine_id)
    frontend = Frontend(
        owner.driver,
        lambda: SESSION.holds(lease),
        owner.replace,
        Timeouts.of(setup.config).stuck_s,
        waits_for=owner.waits_for,
    )
    # No thread of ours may be inside Ray when Ray stops.
    stack.callback(frontend.join, SHUTDOWN_TIMEOUT_S)
    stack.callback(_while_held, lease, DriverOwner.stop, owner)
    stack.callback(frontend.close)
    report = owner.start()
    frontend.driver.follow()
    for line in report.lines:
        logger.info(line)
    total = time.perf_counter() - began
    seconds = {"ray": connected - began, "processes": 0.0, **report.seconds}
    # Each phase has the time of the slowest rank; while one rank is slow, the others wait.
    seconds |= {"processes": max(0.0, total - sum(seconds.values())), "all": total}
    logger.info("start: %s", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    return owner, frontend, dataclasses.replace(report, seconds=seconds)


class DriverOwner:
    """Keeps one driver running, on the node of rank 0. When it dies, every process of its engine is
    ended, then the next driver is started, on another node if that one was lost.
    """

    def __init__(self, config: ResolvedConfig, placement: Placement, engine_id: str) -> None:
        self._config = config
        self._timeouts = Timeouts.of(config.engine)
        self.placement = placement
        self._engine_id = engine_id
        self._report: EngineReport | None = None
        self._num_idle_deaths = 0
        self._recovery: Recovery | None = None  # while the driver is replaced
        self._is_stopped = False
        self.driver = start_driver(config, placement, self._engine_id)

    def start(self) -> EngineReport:
        """Start the engine. Raises what kept it from starting."""
        limit_s = self._timeouts.start_s
        report: EngineReport = call(self.driver.start.remote(), "start the engine", limit_s)
        if self._report is None:
            self._report = report
        elif report.checkpoint != self._report.checkpoint:
            raise ConfigError(
                "the files of the checkpoint have changed since the engine started, so requests"
                " cannot go on; start a new engine"
            )
        return report

    def replace(self, driver: Any, error: EaglerayError, has_served: bool) -> Any:
        """Start a new driver in place of one that is dead or stuck. Raises `EngineDeadError` when
        none could be started, naming each attempt, or when one after another died without any news.
        """
        logger.warning("the driver is replaced: %s", str(error).split("\n")[0])
        if self._report is None:
            raise error  # it has never served
        self._num_idle_deaths = 0 if has_served else self._num_idle_deaths + 1
        if self._num_idle_deaths > MAX_IDLE_DEATHS:
            raise EngineDeadError(
                f"{self._num_idle_deaths} drivers died one after another before they had any news;"
                f" the last one: {error}"
            )
        limit_s = self._timeouts.give_up_s
        recovery = self._recovery = Recovery(time.monotonic, limit_s)
        recovery.fault(str(error))
        while True:
            self._end_for_certain(recovery)
            recovery.fenced()
            while not self._is_stopped and recovery.state is State.BACKOFF and not recovery.retry():
                time.sleep(min(0.1, recovery.wait_s()))
            if recovery.state is State.DEAD or self._is_stopped:
                raise EngineDeadError(f"no driver could be started: {recovery.report()}")
            try:
                check_again(self._config)
                self.placement.restore(limit_s, lambda: not self._is_stopped)
                num_blocks = self._report.limits.num_blocks
                self.driver = start_driver(
                    self._config, self.placement, self._engine_id, num_blocks
                )
                self.start()
            except Exception as failure:
                kind = kind_of(failure)
                if not (kind.may_pass or isinstance(failure, EngineError)):
                    raise EngineDeadError(reason_of(failure)) from failure
                recovery.fault(reason_of(failure))
                logger.warning("the driver is not replaced yet: %s", recovery.waits_for())
            else:
                self._recovery = None
                return self.driver

    def waits_for(self) -> str:
        """What the replacement of a driver waits for, in one line. Any thread."""
        recovery = self._recovery
        return self.placement.waits_for or (recovery.waits_for() if recovery is not None else "")

    def stop(self) -> None:
        """End the driver, and whatever is left of its ranks."""
        self._is_stopped = True
        with contextlib.suppress(EaglerayError):  # it may be dead; whatever is left is ended next
            call(self.driver.shutdown.remote(), "stop the driver", SHUTDOWN_TIMEOUT_S)
        self._end_processes()

    def _end_for_certain(self, recovery: Recovery) -> None:
        """End the driver and its ranks. Tries again if, for example, a node does not answer. Raises
        `EngineDeadError` when it has done so for too long.
        """
        while True:
            try:
                self._end_processes()
                self.placement.take_over()
                return
            except Exception as failure:
                why = reason_of(failure)
                if not kind_of(failure).may_pass:
                    raise EngineDeadError(f"the last driver could not be ended: {why}") from failure
                if self._is_stopped or recovery.is_too_late(why):
                    report = recovery.report()
                    raise EngineDeadError(f"no driver could be started: {report}") from failure
                logger.warning("the driver is not replaced yet: %s", why.split("\n")[0])
                time.sleep(END_PAUSE_S)

    def _end_processes(self) -> None:
        ray.kill(self.driver)
        end_marked(self._engine_id, self.placement.node_ids())


def start_driver(
    config: ResolvedConfig,
    placement: Placement,
    engine_id: str,
    num_kv_blocks: int | None = None,
) -> Any:
    """A handle on a new driver actor, on the node of rank 0. The driver takes no bundle, so it
    outlives the placement group when that has to be replaced. The processes of its first ranks,
    which take longest to start, start at the same time. `num_kv_blocks`: how many blocks the engine
    began with, if this driver replaces another.
    """
    places = placement.places()
    maker = RankMaker(config, placement, engine_id, Driver.rank_actor)
    ranks = [maker.create(place).actor for place in places]
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
        .remote(config, placement, engine_id, ranks, num_kv_blocks)
    )


def _resolve(setup: EngineSetup, device: str, placement: Placement) -> ResolvedConfig:
    """`resolve_config`, run on the machine whose installed packages count: this one, or the node
    that has the GPUs.
    """
    arguments = (setup.config, setup.model, setup.model_dir, device)
    if device == "cpu" or has_cuda():
        return resolve_config(*arguments)
    there = ray.remote(resolve_config).options(
        num_cpus=1,
        num_gpus=1,
        max_retries=0,
        runtime_env=actor_environment(),
        scheduling_strategy=placement.in_bundle(0),
    )
    what = "see what is installed where the ranks run"
    resolved: ResolvedConfig = call(there.remote(*arguments), what, setup.config.start_timeout_s)
    return resolved


def _while_held(lease: str, stop: Callable[[Any], None], what: Any) -> None:
    """Stop something of ours, unless Ray was shut down, which has ended it too: a call would start
    a new Ray.
    """
    if SESSION.holds(lease):
        stop(what)


def _close_in(pid: int, stack: contextlib.ExitStack) -> None:
    """Close, but not in a fork of the process that owns the engine."""
    if os.getpid() == pid:
        stack.close()
