"""Actors that the dispatch benchmark runs in place of the engine's own: a driver that notes when
results come, and ranks that wait for a simulated device instead of computing.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import zlib
from typing import Any

from cluster.engine.driver import Driver
from cluster.engine.report import StartReport
from cluster.ranks.actor import RankActor
from cluster.resources.placement import Place
from configs.engine import ResolvedConfig
from scheduler.messages import StepPlan, StepResult, int32_array
from workers.report import WorkerReport
from workers.worker import Worker

# Of the default model's tokenizer: each is some letters.
_TEXT_TOKENS = range(300, 500)


class TimedDriver(Driver):
    """Notes the moment at which the result of each step has been applied."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._moments: list[float] = []

    async def start(self) -> StartReport:
        report = await super().start()
        assert self._step_loop is not None
        engine = self._step_loop.engine
        step = engine.step

        def timed_step() -> Any:
            output = step()
            if output is not None:
                self._moments.append(time.perf_counter())
            return output

        engine.step = timed_step  # type: ignore[method-assign]
        return report

    async def take_moments(self) -> list[float]:
        """The moments since the last call, in seconds."""
        moments, self._moments = self._moments, []
        return moments


class OneCoreRankActor(RankActor):
    """Computes on one core and leaves the others to driver and Ray."""

    def start(
        self,
        rendezvous_address: tuple[str, int],
        place: Place,
        epoch: int,
        gpus: list[str],
        num_kv_blocks: int | None = None,
        *,
        is_standby: bool = False,
    ) -> WorkerReport:
        place = dataclasses.replace(place, ranks_on_node=len(os.sched_getaffinity(0)))
        return super().start(
            rendezvous_address, place, epoch, gpus, num_kv_blocks, is_standby=is_standby
        )


class OneCoreDriver(TimedDriver):
    """A timed driver whose ranks take one core each."""

    rank_actor_class = OneCoreRankActor


class SleepingWorker(Worker):
    """Loads like a rank, then waits instead of computing, like the host of a GPU.

    Launching a step keeps a core busy for `launch_s`. On the simulated device, step k is done
    `step_s` after the later of its launch and the end of step k - 1.
    """

    def __init__(self, config: ResolvedConfig, rank: int, step_s: float, launch_s: float) -> None:
        super().__init__(config, rank)
        self._step_s = step_s
        self._launch_s = launch_s
        self._launched = threading.Condition()
        self._done_s: dict[
            int, tuple[float, int]
        ] = {}  # per step: when it is done, and how many tokens it samples
        self._last_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        until_s = time.perf_counter() + self._launch_s
        while time.perf_counter() < until_s:
            pass
        with self._launched:
            self._last_s = max(self._last_s, time.perf_counter()) + self._step_s
            self._done_s[plan.step_id] = self._last_s, sum(plan.sampling_flags)
            self._launched.notify_all()

    def result(self, step_id: int, epoch: int) -> StepResult:
        with self._launched:
            self._launched.wait_for(lambda: step_id in self._done_s)
            done_s, num_rows = self._done_s.pop(step_id)
        time.sleep(max(0.0, done_s - time.perf_counter()))
        tokens = int32_array(
            _TEXT_TOKENS[(step_id + row) % len(_TEXT_TOKENS)] for row in range(num_rows)
        )
        return StepResult(
            step_id=step_id,
            epoch=epoch,
            rank=self.rank,
            token_ids=tokens,
            digest=zlib.crc32(tokens.tobytes()),
        )


def sleeping_driver(step_s: float, launch_s: float) -> type[TimedDriver]:
    """A timed driver whose ranks sleep."""

    class SleepingRankActor(RankActor):
        def __init__(self, config: ResolvedConfig, rank: int, *more: Any) -> None:
            super().__init__(config, rank, *more)
            self._worker = SleepingWorker(config, rank, step_s, launch_s)

    class SleepingDriver(TimedDriver):
        rank_actor_class = SleepingRankActor

    return SleepingDriver
