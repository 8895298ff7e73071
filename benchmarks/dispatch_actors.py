"""Actors that the dispatch benchmark runs in place of the engine's own: a driver that notes when results come, and
ranks that wait for a made-up device instead of computing."""

from __future__ import annotations

import os
import threading
import time
import zlib

import cluster.worker_group
from cluster.driver import Driver, EngineReport
from cluster.mailbox import News
from cluster.worker_group import RankActor
from configs.engine import ResolvedConfig
from scheduler.messages import StepPlan, StepResult, ints
from scheduler.scheduler import StepOutput
from workers.worker import Worker, WorkerReport

DEVICE_STEP_S = 0.003


class TimedDriver(Driver):
    """Notes the moment at which the result of each step has been applied."""

    _moments: list[float] | None = None

    def _news(self, output: StepOutput) -> dict[str, dict[str, News]]:
        self._moments = self._moments or []
        self._moments.append(time.perf_counter())
        return super()._news(output)

    async def take_moments(self) -> list[float]:
        """Seconds, since the last call."""
        moments, self._moments = self._moments, []
        return moments or []


class OneCoreRankActor(RankActor):
    """Computes on one core and leaves the others to driver and Ray."""

    def start(self, address: tuple[str, int], place: int, ranks_on_node: int) -> WorkerReport:
        return super().start(address, place, len(os.sched_getaffinity(0)))


class OneCoreDriver(TimedDriver):
    """A timed driver whose ranks take one core each."""

    async def start(self) -> EngineReport:
        cluster.worker_group.RankActor = OneCoreRankActor  # type: ignore[misc]  # in this actor's process alone
        return await super().start()


class SleepingWorker(Worker):
    """Loads as a rank does, then waits instead of computing, as a host does for a GPU.

    On the made-up device step k is done `DEVICE_STEP_S` after the later of its launch and the end of step k - 1.
    """

    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._launched = threading.Condition()
        self._done_s: dict[int, tuple[float, int]] = {}  # by step: when, and how many tokens it samples
        self._last_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        with self._launched:
            self._last_s = max(self._last_s, time.perf_counter()) + DEVICE_STEP_S
            self._done_s[plan.step_id] = self._last_s, sum(plan.samples)
            self._launched.notify_all()

    def result(self, step_id: int, epoch: int) -> StepResult:
        with self._launched:
            self._launched.wait_for(lambda: step_id in self._done_s)
            done_s, num_rows = self._done_s.pop(step_id)
        time.sleep(max(0.0, done_s - time.perf_counter()))
        tokens = ints([7]) * num_rows
        return StepResult(
            step_id=step_id, epoch=epoch, rank=self.rank, token_ids=tokens, digest=zlib.crc32(tokens.tobytes())
        )


class SleepingRankActor(RankActor):
    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._worker = SleepingWorker(config, rank)


class SleepingDriver(TimedDriver):
    """A timed driver whose ranks sleep."""

    async def start(self) -> EngineReport:
        cluster.worker_group.RankActor = SleepingRankActor  # type: ignore[misc]  # in this actor's process alone
        return await super().start()
