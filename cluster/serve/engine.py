"""An engine without an API: a deployment whose driver the API processes share, or, with several
engines, lease per request.

A lease is a stream of one item: it yields the driver at once and stays open until the request ends,
so that Ray Serve sees an ordinary running request. Its holder cancels it. A holder that is killed
cannot, so the engine checks from time to time that each holder is alive. Tokens do not pass through
here: the holder polls the driver.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError

from cluster.api.app import SWITCH_INTERVAL_S
from cluster.api.metrics import engine_families
from cluster.client.setup import make_engine_setup
from cluster.engine.start import EngineProcesses
from cluster.ranks.processes import end_with_parent
from cluster.serve.health import DriverHealth
from cluster.serve.ray_metrics import report_periodically
from cluster.serve.router import LeaseRequest
from cluster.timeouts import ENGINE_STATS_TIMEOUT_S, Timeouts
from configs.serve import ServeConfig
from scheduler.errors import EaglerayError, EngineDeadError, OverloadedError
from scheduler.limits import SchedulerLimits
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams
from scheduler.records import StepRecord

DEPLOYMENT_NAME = "engine"
QUICK_DRIVER_LOOKUP_TIMEOUT_S = 0.1  # another engine may be available at once
DRIVER_LOOKUP_TIMEOUT_S = 10.0
HOLDER_CHECK_PERIOD_S = 5.0
LAST_NEWS_DELAY_S = 0.5  # more than the last token takes from the driver to the API


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The engine for a request. replica_id: Ray Serve's; driver: None while it is replaced."""

    replica_id: str
    driver: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine, of which `launch.py status` shows most. replica_id: Ray Serve's; model: its
    name in the API; hosts: the address of each rank's node; state: of the group of ranks
    (`RecoveryState`); num_admitted: sequences admitted since its driver's start.
    """

    replica_id: str
    model: str
    device: str
    hosts: tuple[str, ...]
    state: str
    num_running: int
    num_waiting: int
    num_admitted: int


async def status_of(engine: EngineProcesses, model_name: str, stats: EngineStats) -> EngineStatus:
    """What an engine is, where it runs, and what it does."""
    places = await asyncio.to_thread(engine.places)
    return EngineStatus(
        replica_id=serve.get_replica_context().replica_id.unique_id,
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
        self._has_started = False  # Serve may end it before
        end_with_parent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._model_name = config.model_name
        self._drain_limit_s = config.drain_timeout_s
        sampling = SamplingParams.from_dict(config.sampling)
        setup = await asyncio.to_thread(make_engine_setup, config.engine, sampling)
        placement_group = ray.util.get_current_placement_group()
        self._engine = await asyncio.to_thread(EngineProcesses, setup, placement_group)
        timeouts = Timeouts.from_options(config.engine)
        self._health = DriverHealth(
            self._engine.frontend.driver_handle, timeouts.replacement_timeout_s
        )
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        # Calls that run on a thread: one of each at a time, however many wait for its result.
        self._driver_lookup: asyncio.Future[Any] | None = None
        self._stats_call: asyncio.Future[EngineStats] | None = None
        self._holder_deaths: dict[Any, asyncio.Future[None]] = {}  # by actor with leases
        self._metrics_task = asyncio.create_task(
            report_periodically(self._replica_id, self._metric_families)
        )
        self._has_started = True

    async def limits(self) -> SchedulerLimits:
        """The limits that requests must respect."""
        return self._engine.report.limits

    async def lease(self, lease_request: LeaseRequest) -> AsyncGenerator[Lease, None]:
        """Yields the engine, and ends when it is canceled or its holder is dead, or at once without
        a driver. A caller that got this engine although it wanted to avoid it has no other choice,
        so it waits longer for the driver.
        """
        is_last_resort = self._replica_id in lease_request.avoided_replica_ids
        limit_s = DRIVER_LOOKUP_TIMEOUT_S if is_last_resort else QUICK_DRIVER_LOOKUP_TIMEOUT_S
        driver = await self._live_driver(limit_s)
        yield Lease(replica_id=self._replica_id, driver=driver)
        if driver is not None:
            await self._death_of(lease_request.holder)

    async def driver(self) -> Any | None:
        """The driver, for the API processes that share it. None while it is being replaced."""
        return await self._live_driver(DRIVER_LOOKUP_TIMEOUT_S)

    async def recovery_waits_for(self) -> str:
        """What the replacement of the driver waits for, in one line."""
        return self._engine.recovery_waits_for()

    async def _live_driver(self, limit_s: float) -> Any | None:
        lookup = self._driver_lookup
        if lookup is None or lookup.done():
            live_actor = self._engine.frontend.driver_handle.live_actor
            lookup = self._driver_lookup = asyncio.ensure_future(asyncio.to_thread(live_actor))
        await asyncio.wait({lookup}, timeout=limit_s)
        # A dead engine has no driver either; until Serve has replaced it, others are asked.
        has_driver = lookup.done() and lookup.exception() is None
        return lookup.result() if has_driver else None

    def _death_of(self, holder: Any | None) -> asyncio.Future[Any]:
        """Done when the actor that holds leases is dead; never for a program that is no actor."""
        if holder is None:
            return asyncio.get_running_loop().create_future()
        if holder not in self._holder_deaths:
            death = asyncio.ensure_future(_wait_until_dead(holder))
            death.add_done_callback(lambda _: self._holder_deaths.pop(holder))
            self._holder_deaths[holder] = death
        return asyncio.shield(self._holder_deaths[holder])

    async def stats(self) -> EngineStats:
        """The engine's counters. Raises `OverloadedError` if it does not answer in time."""
        call = self._stats_call
        if call is None or call.done():
            stats = self._engine.frontend.stats
            call = self._stats_call = asyncio.ensure_future(asyncio.to_thread(stats))
        await asyncio.wait({call}, timeout=ENGINE_STATS_TIMEOUT_S)
        if not call.done():
            raise OverloadedError(f"the engine did not answer within {ENGINE_STATS_TIMEOUT_S:g} s")
        return call.result()

    async def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`."""
        return await asyncio.to_thread(self._engine.frontend.records, seconds)

    async def status(self) -> EngineStatus:
        """What runs here, and where."""
        return await status_of(self._engine, self._model_name, await self.stats())

    async def check_health(self) -> None:
        """Raises when the engine is dead for good, so that Serve replaces this replica."""
        self._health.check()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the replica. Waits for the requests of processes that
        share the engine, which Serve does not know of.
        """
        if not self._has_started:
            return
        deadline_s = time.monotonic() + self._drain_limit_s
        while await self._may_be_busy() and time.monotonic() < deadline_s:
            await asyncio.sleep(LAST_NEWS_DELAY_S)
        if time.monotonic() + LAST_NEWS_DELAY_S < deadline_s:
            # The last request may have ended just before the look.
            await asyncio.sleep(LAST_NEWS_DELAY_S)

    async def _may_be_busy(self) -> bool:
        try:
            stats = await self.stats()
        except EngineDeadError:
            return False
        except EaglerayError:  # it does not answer at the moment, or its driver is being replaced
            return True
        return stats.num_running + stats.num_waiting > 0

    async def _metric_families(self) -> Any:
        return engine_families(await self.stats())


async def _wait_until_dead(actor: Any) -> None:
    """Returns when an actor is dead. One that does not answer counts as alive."""
    while True:
        await asyncio.sleep(HOLDER_CHECK_PERIOD_S)
        try:
            await actor.__ray_ready__.remote()
        except ActorDiedError:
            return
        except RayError:  # the call did not reach it
            continue
