"""The API's counters in Ray's own metrics, beside those of Ray and of Ray Serve.

Ray's registry does not read counters by itself, so each sample is a gauge that is set from time to
time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ray.util.metrics import Gauge

from cluster.api.metrics import Family
from scheduler.errors import EaglerayError

PERIOD_S = 5.0


class RayMetrics:
    """Reports one replica's numbers."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._gauges: dict[str, Gauge] = {}

    def report(self, families: list[Family]) -> None:
        """Set every gauge. For a histogram, its sum and count are reported."""
        for family in families:
            for name, labels, value in family.samples:
                if name.endswith("_bucket"):
                    continue
                keys = (*(key for key, _ in labels), "replica")
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, description=family.help, tag_keys=keys)
                self._gauges[name].set(value, tags=dict(labels) | {"replica": self._replica})


async def report_from_time_to_time(
    replica: str, families: Callable[[], Awaitable[list[Family]]]
) -> NoReturn:
    """Report a replica's numbers to Ray's metrics, forever."""
    to_ray = RayMetrics(replica)
    while True:
        await asyncio.sleep(PERIOD_S)
        with contextlib.suppress(EaglerayError):  # the engine does not answer at the moment
            to_ray.report(await families())
