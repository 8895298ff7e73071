"""Whether the engine of a replica lives or will live again.

A driver that dies or hangs is replaced by its owner, in the replica's own process, and meanwhile
the replica keeps every request. So Ray Serve, whose remedy ends all streams, must not take a
replica for unhealthy because its driver does not answer.
"""

from __future__ import annotations

import logging
import threading
import time

from cluster.client.frontend import Frontend
from cluster.timeouts import DRIVER_CHECK_PERIOD_S
from scheduler.errors import EaglerayError, EngineDeadError

logger = logging.getLogger("eagleray")


class EngineHealth:
    """Asks the driver from time to time, on a thread of its own, so that one that hangs is replaced
    even if no request waits for it.
    """

    def __init__(
        self, frontend: Frontend, replaced_s: float, period_s: float = DRIVER_CHECK_PERIOD_S
    ) -> None:
        """`replaced_s`: the longest that the replacement of a driver may take."""
        self._driver = frontend.driver
        self._replaced_s = replaced_s
        self._period_s = period_s
        self._asked_at_s: float | None = None  # of a question that has no answer yet
        self._death: EngineDeadError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagleray-health", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Answers at once. Raises `EngineDeadError` if the engine has stopped for good, or if its
        driver was not replaced in time.
        """
        death, asked_at_s = self._death or self._driver.death, self._asked_at_s
        if death is not None:
            raise death
        if asked_at_s is not None and time.monotonic() - asked_at_s > self._replaced_s:
            raise EngineDeadError(f"the driver was not replaced within {self._replaced_s:g} s")

    def close(self) -> None:
        """Ask no more."""
        self._ending.set()

    def _run(self) -> None:
        while not (self._death or self._driver.death) and not self._ending.wait(self._period_s):
            self._asked_at_s = time.monotonic()
            try:
                self._driver.check()
            except EngineDeadError as error:
                self._death = error
            except EaglerayError as error:  # it is asked again
                logger.warning("the driver could not be asked: %s", str(error).split("\n")[0])
            except Exception:  # a bug must not make a replica unhealthy that works
                logger.exception("the driver could not be asked")
            self._asked_at_s = None
