"""One of several engines: a deployment without an API, whose driver is leased per request.

A lease is a stream of one item: it yields the driver at once and stays open until the request ends,
so that Ray Serve sees an ordinary request that runs. Its holder cancels it; nobody does so for a
holder that is killed, so the engine asks from time to time whether that lives. Tokens do not pass
through here: the owner of the lease polls the driver.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError

from cluster.api.app import SWITCH_INTERVAL_S
from cluster.api.metrics import engine_families
from cluster.client.setup import prepare
from cluster.engine.start import EngineProcesses
from cluster.ranks.processes import end_with_parent
from cluster.serve.health import EngineHealth
from cluster.serve.ray_metrics import report_from_time_to_time
from cluster.serve.router import Wanted
from cluster.timeouts import ENGINE_STATS_TIMEOUT_S, Timeouts
from configs.serve import ServeConfig
from scheduler.errors import OverloadedError
from scheduler.limits import SchedulerLimits
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams
from scheduler.records import StepRecord

NAME = "engine"
DRIVER_TIMEOUT_S = 0.1  # another engine may be available at once
LAST_DRIVER_TIMEOUT_S = 10.0
HOLDER_CHECK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The engine to which a request should be sent. replica: its name in Ray Serve; driver: None
    while it is being replaced.
    """

    replica: str
    driver: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine as `launch.py status` shows it. replica: its name in Ray Serve; hosts: the address
    of each rank's node; num_admitted: requests since its start.
    """

    replica: str
    model: str
    device: str
    hosts: tuple[str, ...]
    state: str
    num_running: int
    num_waiting: int
    num_admitted: int


async def describe(engine: EngineProcesses, model_name: str, stats: EngineStats) -> EngineReport:
    """The report of an engine: what it is, where it runs, and what it does."""
    places = await asyncio.to_thread(engine.places)
    return EngineReport(
        replica=serve.get_replica_context().replica_id.unique_id,
        model=model_name,
        device=engine.report.device,
        hosts=tuple(place.host for place in places),
        state=stats.state,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_admitted=stats.num_admitted,
    )


class EngineReplica:
    """Run by Ray Serve, in the bundle of rank 0."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        end_with_parent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._model_name = config.model_name
        sampling = SamplingParams.from_dict(config.sampling)
        setup = await asyncio.to_thread(prepare, config.engine, sampling)
        group = ray.util.get_current_placement_group()
        self._engine = await asyncio.to_thread(EngineProcesses, setup, group)
        timeouts = Timeouts.of(config.engine)
        self._health = EngineHealth(self._engine.frontend, timeouts.replaced_s)
        self._replica = serve.get_replica_context().replica_id.unique_id
        # One call at a time, whoever waits for its result.
        self._finding: asyncio.Future[Any] | None = None
        self._asking: asyncio.Future[EngineStats] | None = None
        self._holders: dict[Any, asyncio.Future[None]] = {}  # a watch of each actor with leases
        self._reporting = asyncio.create_task(
            report_from_time_to_time(self._replica, self._families)
        )

    async def limits(self) -> SchedulerLimits:
        """The limits that requests must respect."""
        return self._engine.report.limits

    async def lease(self, wanted: Wanted) -> AsyncGenerator[Lease, None]:
        """Yields the engine, and ends when it is canceled, or at once without a driver. A caller
        that wanted to avoid this engine but got it anyway has no other choice, so it waits for this
        driver.
        """
        if self._finding is None or self._finding.done():
            finding = asyncio.to_thread(self._engine.frontend.driver.live)
            self._finding = asyncio.ensure_future(finding)
        is_last = self._replica in wanted.avoid
        limit_s = LAST_DRIVER_TIMEOUT_S if is_last else DRIVER_TIMEOUT_S
        await asyncio.wait({self._finding}, timeout=limit_s)
        # A dead engine has no driver either; until Serve has replaced it, others are asked.
        is_there = self._finding.done() and self._finding.exception() is None
        driver = self._finding.result() if is_there else None
        yield Lease(replica=self._replica, driver=driver)
        if driver is not None:
            await self._loss_of(wanted.holder)

    def _loss_of(self, holder: Any | None) -> asyncio.Future[Any]:
        """Done when the actor that holds leases is dead; never for a program that is no actor."""
        if holder is None:
            return asyncio.get_running_loop().create_future()
        if holder not in self._holders:
            watch = asyncio.ensure_future(_until_dead(holder))
            watch.add_done_callback(lambda _: self._holders.pop(holder))
            self._holders[holder] = watch
        return asyncio.shield(self._holders[holder])

    async def stats(self) -> EngineStats:
        """The engine's counters. Raises `OverloadedError` if it does not answer in time."""
        if self._asking is None or self._asking.done():
            asking = asyncio.to_thread(self._engine.frontend.stats)
            self._asking = asyncio.ensure_future(asking)
        await asyncio.wait({self._asking}, timeout=ENGINE_STATS_TIMEOUT_S)
        if not self._asking.done():
            raise OverloadedError(f"the engine did not answer within {ENGINE_STATS_TIMEOUT_S:g} s")
        return self._asking.result()

    async def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`."""
        return await asyncio.to_thread(self._engine.frontend.records, seconds)

    async def describe(self) -> EngineReport:
        """What runs here, and where."""
        return await describe(self._engine, self._model_name, await self.stats())

    async def check_health(self) -> None:
        """Raises when the engine is dead for good, so that Serve replaces this replica."""
        self._health.check()

    async def _families(self) -> Any:
        return engine_families(await self.stats())


async def _until_dead(actor: Any) -> None:
    """Returns when an actor is dead; one that does not answer lives."""
    while True:
        await asyncio.sleep(HOLDER_CHECK_S)
        try:
            await actor.__ray_ready__.remote()
        except ActorDiedError:
            return
        except RayError:  # it could not be asked
            continue
