"""The counters of the API and of engines in Ray's metrics, beside those of Ray and of Ray Serve.

Ray's registry does not read our counters, so each sample is a gauge that is set periodically.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ray.util.metrics import Gauge

from cluster.api.metrics import MetricFamily
from scheduler.errors import EaglerayError

REPORT_PERIOD_S = 5.0


async def report_periodically(
    replica_id: str, gather_families: Callable[[], Awaitable[list[MetricFamily]]]
) -> NoReturn:
    """Report a replica's metrics to Ray, forever. For a histogram, its sum and count."""
    gauges: dict[str, Gauge] = {}
    while True:
        await asyncio.sleep(REPORT_PERIOD_S)
        with contextlib.suppress(EaglerayError):  # the engine does not answer at the moment
            for family in await gather_families():
                for name, labels, value in family.samples:
                    tags = dict(labels) | {"replica": replica_id}
                    if not name.endswith("_bucket"):
                        if name not in gauges:
                            gauges[name] = Gauge(name, family.help, tag_keys=tuple(tags))
                        gauges[name].set(value, tags=tags)
