"""Starting an engine and stopping it: Ray, placement group, driver, ranks, frontend, in this
order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.client.frontend import Frontend
from cluster.client.setup import EngineSetup
from cluster.engine.driver import Driver
from cluster.engine.report import EngineReport
from cluster.ray_errors import CALL_TIMEOUT_S, call
from cluster.resources.placement import actor_environment, pick_device, place
from cluster.resources.session import SESSION
from configs.engine import ResolvedConfig
from scheduler.errors import EaglerayError
from workers.configuration import has_cuda, resolve_config

SHUTDOWN_TIMEOUT_S = 2.0

logger = logging.getLogger("eagleray")


class EngineProcesses:
    """The processes of one engine, and this program's frontend to it.

    `close` ends them; so does the end of the program.
    """

    def __init__(self, setup: EngineSetup, placement: PlacementGroup | None = None) -> None:
        """Start everything. Raises what kept it from starting, and leaves nothing behind.

        `placement`: a group of the caller's, with one bundle per rank; it is used and left.
        """
        stack = contextlib.ExitStack()
        self.close = weakref.finalize(self, _close_in, os.getpid(), stack)  # also at exit
        try:
            self.driver, self.frontend, self.report = _start(setup, placement, stack)
        except BaseException:
            self.close()
            raise


def _start(
    setup: EngineSetup, placement: PlacementGroup | None, stack: contextlib.ExitStack
) -> tuple[Any, Frontend, EngineReport]:
    """(driver, frontend, report); what has to be undone goes onto the stack."""
    began = time.perf_counter()
    size = setup.config.tensor_parallel_size
    lease = SESSION.connect(setup.config.ray_address, size)
    stack.callback(SESSION.release, lease)
    device = pick_device(setup.config.device, size)
    connected = time.perf_counter()
    if placement is None:
        placement = place(size, device)
        stack.callback(_while_held, lease, remove_placement_group, placement)
    driver = start_driver(_resolve(setup, device, placement), placement)
    frontend = Frontend(driver, lambda: SESSION.holds(lease))
    # No thread of ours may be inside Ray when Ray stops.
    stack.callback(frontend.join, SHUTDOWN_TIMEOUT_S)
    stack.callback(_while_held, lease, _stop_driver, driver)
    stack.callback(frontend.close)
    limit_s = setup.config.start_timeout_s + CALL_TIMEOUT_S
    report: EngineReport = call(driver.start.remote(), "start the engine", limit_s)
    for line in report.lines:
        logger.info(line)
    total = time.perf_counter() - began
    seconds = {"ray": connected - began, **report.seconds, "all": total}
    logger.info("start: %s", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    return driver, frontend, dataclasses.replace(report, seconds=seconds)


def start_driver(config: ResolvedConfig, placement: PlacementGroup) -> Any:
    """A handle on a new driver actor, in the first bundle of the placement group."""
    return (
        ray.remote(Driver)
        .options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement, placement_group_bundle_index=0
            ),
        )
        .remote(config, placement)
    )


def _resolve(setup: EngineSetup, device: str, placement: PlacementGroup) -> ResolvedConfig:
    """`resolve_config`, run where it matters what is installed: here, or on the node that has the
    GPUs.
    """
    arguments = (setup.config, setup.model, setup.model_dir, device)
    if device == "cpu" or has_cuda():
        return resolve_config(*arguments)
    there = ray.remote(resolve_config).options(
        num_cpus=1,
        num_gpus=1,
        max_retries=0,
        runtime_env=actor_environment(),
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement, placement_group_bundle_index=0
        ),
    )
    what = "see what is installed where the ranks run"
    resolved: ResolvedConfig = call(there.remote(*arguments), what, setup.config.start_timeout_s)
    return resolved


def _while_held(lease: str, stop: Callable[[Any], None], what: Any) -> None:
    """Stop something of ours, unless Ray was shut down and took it along: a call would start a new
    Ray.
    """
    if SESSION.holds(lease):
        stop(what)


def _close_in(pid: int, stack: contextlib.ExitStack) -> None:
    """Close, but not in a fork of the process that owns the engine."""
    if os.getpid() == pid:
        stack.close()


def _stop_driver(driver: Any) -> None:
    with contextlib.suppress(
        EaglerayError
    ):  # it may already be dead; whatever is left is killed next
        call(driver.shutdown.remote(), "stop the driver", SHUTDOWN_TIMEOUT_S)
    ray.kill(driver)
