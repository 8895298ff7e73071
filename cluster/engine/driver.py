"""The driver actor: it owns the scheduler, and with it every token of one engine.

An actor shell around three parts. The *event loop* serves the frontends: it checks requests, passes
them on as commands, and answers polls (`frontends.py`). The *engine thread* runs the step loop
(`loop.py`). The *supervisor* (`recovery/supervisor.py`) replaces ranks that fail, and the requests
continue. A fault of the engine itself ends it: every request ends with an error that says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import pickle
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from cluster.engine.frontends import Frontends
from cluster.engine.loop import Finish, NewsByFrontend, RanksLost, RanksReplaced, StepLoop, Submit
from cluster.engine.report import StartReport
from cluster.error_kinds import reason_of
from cluster.grammar.matching import GrammarMatching
from cluster.limits import limits_of
from cluster.ranks.actor import RankActor
from cluster.ranks.group import RankHandle, RankMaker
from cluster.ranks.processes import ProcessId, mark
from cluster.recovery.supervisor import Supervisor
from cluster.resources.placement import Placement
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.errors import EngineDeadError, EngineLostError
from scheduler.limits import SchedulerLimits
from scheduler.messages import EngineStats, Request
from scheduler.records import StepRecord
from scheduler.scheduler import Scheduler

SILENCE_CHECK_S = 1.0
STOP_TIMEOUT_S = 2.0
SWITCH_INTERVAL_S = 0.0005  # the two threads alternate often, and neither computes for long

logger = logging.getLogger("eagleray.driver")


class Driver:
    """Run as a Ray actor; every method but `start` answers without waiting for a step."""

    rank_actor: type[RankActor] = RankActor
    make_supervisor: type[Supervisor] = Supervisor

    def __init__(
        self,
        config: ResolvedConfig,
        placement: Placement,
        engine_id: str,
        ranks: Seq[Any] = (),
        num_kv_blocks: int | None = None,
    ) -> None:
        """`ranks`: the actors of the first epoch's ranks. `num_kv_blocks`: how many blocks the
        engine began with, if this driver replaces one that has died.
        """
        gc.disable()  # until the engine has started
        logging.basicConfig(level=config.engine.log_level.upper())
        self._config = config
        self._engine_id = engine_id
        self._maker = RankMaker(config, placement, engine_id, self.rank_actor)
        self._frontends = Frontends(config.engine.frontend_timeout_s)
        self._grammars = GrammarMatching(
            Path(config.engine.tokenizer or config.model_dir) / "tokenizer.json",
            config.model.vocab_size,
            sorted(config.model.eos_token_ids),
        )
        self._ranks = [RankHandle(actor) for actor in ranks]
        self._num_kv_blocks = num_kv_blocks
        self._limits: SchedulerLimits | None = None
        self._engine_loop: StepLoop | None = None
        self._supervisor: Supervisor | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._process: ProcessId | None = None
        self._dead: str | None = None
        self._has_died = asyncio.Event()

    async def start(self) -> StartReport:
        """Start the ranks and the step loop. Raises what kept them from starting."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._process = mark(self._engine_id)
        self._event_loop = asyncio.get_running_loop()
        self._supervisor = self.make_supervisor(
            self._maker,
            busy_since_s=lambda: self._loop().busy_since_s,
            has_work=lambda: self._loop().engine.has_work,
            on_group=lambda group: self._loop().post(RanksReplaced(executor=group)),
            on_lost=lambda epoch, _: self._loop().post(RanksLost(epoch=epoch)),
            on_dead=self._die,
        )
        start = self._supervisor.start
        group, report = await asyncio.to_thread(start, self._ranks, self._num_kv_blocks)
        self._limits = limits_of(self._config, report.num_blocks)
        ahead = self._config.num_steps_ahead
        scheduler = Scheduler(self._limits, clock=time.time)
        engine = Engine(scheduler, group, num_steps_ahead=ahead, grammars=self._grammars)
        self._engine_loop = StepLoop(
            engine,
            self._deliver_soon,
            self._die,
            on_lost=self._supervisor.step_failed,
            on_applied=self._supervisor.applied,
        )
        self._supervisor.watch()
        gc.freeze()  # so that later garbage collections do not walk over the blocks
        gc.enable()
        self._engine_loop.start()
        self._watch = asyncio.create_task(self._drop_silent_frontends())
        return StartReport(
            device=self._config.device,
            limits=self._limits,
            seconds=report.seconds,
            lines=report.lines,
            checkpoint=report.checkpoint,
        )

    async def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`."""
        _, loop = self._alive()
        return loop.engine.scheduler.records.since(time.time() - seconds)

    async def processes(self) -> dict[str, ProcessId]:
        """The processes of this engine by name: `driver`, and `rank 0` and so on of this epoch."""
        assert self._supervisor is not None and self._process is not None
        return {"driver": self._process} | self._supervisor.processes()

    async def wait_for_end(self) -> None:
        """Never returns: the call fails when this process ends. Raises `EngineDeadError` when the
        engine stops for good before that.
        """
        await self._has_died.wait()
        raise EngineDeadError(self._dead)

    async def submit(self, frontend_id: str, requests: list[Request]) -> None:
        """Queue requests, all or none. Raises `RequestError` for one that cannot run,
        `EngineDeadError`. A frontend that did not get the answer may send the same requests again:
        those already here are not queued twice.
        """
        if any(request.grammar for request in requests):
            await asyncio.to_thread(self._grammars.start)
        limits, loop = self._alive()
        fresh = self._frontends.admit(frontend_id, requests, limits)
        if fresh:
            loop.post(Submit(frontend_id=frontend_id, requests=fresh))

    async def finish(
        self, request_ids: list[str], reason: str, frontend_id: str, *after: None
    ) -> None:
        """End requests that their frontend no longer needs ("abort", or "stop" where a stop string
        matched).

        `after` are the refs of `submit` calls that are still on their way: Ray makes this call wait
        for them.
        """
        self._frontends.remove(frontend_id, request_ids)
        if self._engine_loop is not None:
            self._engine_loop.post(Finish(request_ids=request_ids, reason=reason))

    async def poll(self, frontend_id: str, acknowledged: int, wait_s: float) -> bytes:
        """`Deltas` for a frontend, pickled because Ray passes bytes on unchanged. See
        `Frontends.collect`.
        """
        deltas = await self._frontends.collect(frontend_id, acknowledged, wait_s)
        return pickle.dumps(deltas, protocol=5)

    async def stats(self) -> EngineStats:
        """The scheduler's state and counters. Raises `EngineDeadError`."""
        _, loop = self._alive()
        assert self._supervisor is not None
        busy_since_s = loop.busy_since_s
        return dataclasses.replace(
            loop.stats(),
            is_ready=self._supervisor.is_ready,
            state=self._supervisor.recovery.state.value,
            num_recoveries=self._supervisor.recovery.num_recoveries,
            step_age_s=time.monotonic() - busy_since_s if busy_since_s is not None else 0.0,
            waits_for=self._maker.placement.waits_for or self._supervisor.recovery.waits_for(),
        )

    async def shutdown(self) -> None:
        """Stop the step loop and end the ranks."""
        if self._engine_loop is not None:
            self._engine_loop.stop()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        if self._engine_loop is not None:
            await asyncio.to_thread(self._engine_loop.join, STOP_TIMEOUT_S)
        self._grammars.close()

    # -- event loop --------------------------------------------------------------------------------

    def _loop(self) -> StepLoop:
        assert self._engine_loop is not None
        return self._engine_loop

    def _alive(self) -> tuple[SchedulerLimits, StepLoop]:
        if self._dead is not None or self._limits is None or self._engine_loop is None:
            raise EngineDeadError(self._dead or "the engine has not been started")
        return self._limits, self._engine_loop

    async def _drop_silent_frontends(self) -> None:
        """Abort the requests of frontends that have stopped polling."""
        limit_s = self._config.engine.frontend_timeout_s
        while True:
            await asyncio.sleep(min(limit_s, max(SILENCE_CHECK_S, limit_s / 4)))
            for frontend_id, request_ids in self._frontends.drop_silent().items():
                logger.warning("frontend %s is silent: its requests are aborted", frontend_id)
                self._loop().post(Finish(request_ids=request_ids, reason="abort"))

    def _end_all(self, death: EngineDeadError) -> None:
        """The engine is dead: every unfinished request ends with the reason, including those still
        in the inbox.
        """
        self._dead = str(death)
        self._has_died.set()
        self._frontends.fail_all(death)

    # -- engine thread -----------------------------------------------------------------------------

    def _deliver_soon(self, news: NewsByFrontend) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._frontends.deliver, news)

    def _die(self, error: Exception) -> None:
        """End every request with the error, and end the ranks. Any thread."""
        reason = reason_of(error)
        logger.error("the engine stops: %s", reason, exc_info=error)
        assert self._event_loop is not None and self._supervisor is not None
        # The supervisor says that nothing can be started; any other error is a bug.
        kind = EngineLostError if isinstance(error, EngineDeadError) else EngineDeadError
        death = kind(f"the engine has stopped: {reason}")
        self._event_loop.call_soon_threadsafe(self._end_all, death)
        self._supervisor.end()
