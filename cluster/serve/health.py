"""Whether the engine of a replica is alive or will be again.

A driver that dies or hangs is replaced by its owner, in the replica's own process, which keeps
every request meanwhile. So Ray Serve, whose remedy ends all streams, must not consider a replica
unhealthy because its driver does not answer.
"""

from __future__ import annotations

import logging
import threading
import time

from cluster.client.driver_handle import DriverHandle
from cluster.timeouts import DRIVER_CHECK_PERIOD_S
from scheduler.errors import EaglerayError, EngineDeadError

logger = logging.getLogger("eagleray")


class DriverHealth:
    """Calls the driver periodically on its own thread, so that a driver that hangs is replaced even
    if no request waits for it.
    """

    def __init__(
        self,
        driver_handle: DriverHandle,
        replacement_timeout_s: float,
        period_s: float = DRIVER_CHECK_PERIOD_S,
    ) -> None:
        """`replacement_timeout_s`: the longest that the replacement of a driver may take."""
        self._driver_handle = driver_handle
        self._replacement_timeout_s = replacement_timeout_s
        self._period_s = period_s
        self._call_began_s: float | None = None  # of a call that has no answer yet
        self._death: EngineDeadError | None = None
        self._close_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagleray-health", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises `EngineDeadError` if the engine has stopped for good, or if its driver was not
        replaced in time. Does not wait.
        """
        death, call_began_s = self._death or self._driver_handle.death_error, self._call_began_s
        if death is not None:
            raise death
        if (
            call_began_s is not None
            and time.monotonic() - call_began_s > self._replacement_timeout_s
        ):
            raise EngineDeadError(
                f"the driver was not replaced within {self._replacement_timeout_s:g} s"
            )

    def close(self) -> None:
        """Stop calling the driver."""
        self._close_event.set()

    def _run(self) -> None:
        while not (self._death or self._driver_handle.death_error) and not self._close_event.wait(
            self._period_s
        ):
            self._call_began_s = time.monotonic()
            try:
                self._driver_handle.check()
            except EngineDeadError as error:
                self._death = error
            except EaglerayError as error:  # the next call may succeed
                logger.warning("the driver could not be asked: %s", str(error).split("\n")[0])
            except Exception:  # a bug must not make a working replica unhealthy
                logger.exception("the driver could not be asked")
            self._call_began_s = None
