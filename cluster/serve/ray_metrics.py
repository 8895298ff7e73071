"""The API's counters in Ray's own metrics, beside those of Ray and of Ray Serve.

Ray's registry does not read our counters, so each sample is a gauge that is set periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ray.util.metrics import Gauge

from cluster.api.metrics import Family
from scheduler.errors import EaglerayError

REPORT_PERIOD_S = 5.0


class RayMetrics:
    """Reports the metrics of one replica."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._gauges: dict[str, Gauge] = {}

    def report(self, families: list[Family]) -> None:
        """Set every gauge. For a histogram, its sum and count are reported."""
        for family in families:
            for name, labels, value in family.samples:
                if name.endswith("_bucket"):
                    continue
                tags = dict(labels) | {"replica": self._replica_id}
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, description=family.help, tag_keys=tuple(tags))
                self._gauges[name].set(value, tags=tags)


async def report_periodically(
    replica_id: str, gather_families: Callable[[], Awaitable[list[Family]]]
) -> NoReturn:
    """Report a replica's metrics to Ray, forever."""
    metrics = RayMetrics(replica_id)
    while True:
        await asyncio.sleep(REPORT_PERIOD_S)
        with contextlib.suppress(EaglerayError):  # the engine does not answer at the moment
            metrics.report(await gather_families())
