"""The one engine of an application, as each of several API processes sees it.

Each process has a frontend of its own, which sends and polls as if it owned the engine. A driver is
replaced by the engine's replica, and that by Ray Serve; a process only asks the deployment for the
driver that there is now, and sends its requests there with the tokens they have. No leases: with
one engine there is nothing to choose.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.client.frontend import Frontend
from cluster.ray_errors import NoAnswerError
from cluster.timeouts import CALL_TIMEOUT_S, DRIVER_CHECK_PERIOD_S, ENGINE_STATS_TIMEOUT_S, Timeouts
from scheduler.errors import EaglerayError, EngineDeadError

RETRY_PAUSE_S = 0.2

logger = logging.getLogger("eagleray")


class SharedEngine:
    """Follows the engine of a deployment. frontend: this process's, to the present driver."""

    def __init__(self, engine: DeploymentHandle[Any], timeouts: Timeouts) -> None:
        """Blocks until the engine is there. Raises `EngineDeadError` if it does not come."""
        self._engine = engine
        self._replacement_timeout_s = timeouts.replacement_timeout_s
        self.frontend = Frontend(
            self._wait_for_driver(timeouts.first_engine_wait_s),
            replace=self._next_driver,
            answer_limit_s=timeouts.stuck_after_s,
            recovery_waits_for=lambda: (
                self._ask("recovery_waits_for", ENGINE_STATS_TIMEOUT_S) or ""
            ),
        )
        self.frontend.driver_handle.watch_end()
        threading.Thread(target=self._watch, name="eagleray-engine", daemon=True).start()

    def _next_driver(self, driver: Any, error: EaglerayError, _has_been_healthy: bool) -> Any:
        """The driver in place of one that is lost. Raises `EngineDeadError`."""
        logger.warning("another driver is waited for: %s", str(error).split("\n")[0])
        # The engine's replica asks its driver, too. If that answers there, it is tried again.
        lost_driver_id = None if isinstance(error, NoAnswerError) else driver._ray_actor_id
        return self._wait_for_driver(self._replacement_timeout_s, lost_driver_id)

    def _wait_for_driver(self, limit_s: float, lost_driver_id: Any = None) -> Any:
        deadline_s = time.monotonic() + limit_s
        while True:
            driver = self._ask("driver", CALL_TIMEOUT_S)
            if driver is not None and driver._ray_actor_id != lost_driver_id:
                return driver
            if time.monotonic() > deadline_s:
                raise EngineDeadError(f"there was no engine for {limit_s:g} s")
            time.sleep(RETRY_PAUSE_S)

    def _ask(self, method: str, limit_s: float) -> Any:
        """The answer of the engine's replica, None without one."""
        call = self._engine.options(method_name=method).remote()
        try:
            return call.result(timeout_s=limit_s)
        except (TimeoutError, RayError, RayServeException, EaglerayError) as error:
            call.cancel()
            logger.debug("the engine's replica does not answer: %s", error)
            return None

    def _watch(self) -> None:
        """Find the next engine also when this one has stopped for good and there are no requests,
        whose sending would find it.
        """
        while True:
            time.sleep(DRIVER_CHECK_PERIOD_S)
            driver_handle = self.frontend.driver_handle
            if (death := driver_handle.death_error) is not None:
                with contextlib.suppress(EaglerayError):  # the next attempt may succeed
                    driver_handle.replace_driver(driver_handle.actor, death)
