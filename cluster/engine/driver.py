"""The driver actor: it owns the scheduler, and with it every token of one engine.

A Ray actor around three parts. The *event loop* serves the frontends: it checks requests, passes
them on as commands, and answers polls (`frontends.py`). The *engine thread* runs the step loop
(`loop.py`). The *supervisor* (`recovery/supervisor.py`) replaces ranks that fail, and the requests
continue. A bug in the engine itself ends it: every request fails with an error that says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from cluster.engine.frontends import FrontendRecords
from cluster.engine.loop import Finish, NewsByFrontend, RanksLost, RanksReplaced, StepLoop, Submit
from cluster.engine.report import StartReport
from cluster.error_kinds import reason_of
from cluster.grammar.matching import GrammarMatching
from cluster.log import log_to_stderr
from cluster.ranks.actor import RankActor
from cluster.ranks.group import RankHandle, RankMaker
from cluster.ranks.processes import ProcessId, mark_this_process
from cluster.recovery.supervisor import Supervisor
from cluster.resources.placement import Placement
from cluster.scheduler_limits import limits_of
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.errors import EngineDeadError, EngineLostError
from scheduler.limits import SchedulerLimits
from scheduler.messages import EngineStats, Request
from scheduler.records import StepRecord
from scheduler.scheduler import Scheduler

MIN_SILENCE_CHECK_PERIOD_S = 1.0
STOP_TIMEOUT_S = 2.0
SWITCH_INTERVAL_S = 0.0005  # event loop and engine thread alternate often, and neither runs long

logger = logging.getLogger("eagleray.driver")


class Driver:
    """Run as a Ray actor. `poll` waits for news, for as long as it is told, `wait_for_end` for the
    end, `start` and `shutdown` for the ranks; every other method answers at once.
    """

    rank_actor_class: type[RankActor] = RankActor
    make_supervisor: type[Supervisor] = Supervisor

    def __init__(
        self,
        config: ResolvedConfig,
        placement: Placement,
        engine_id: str,
        rank_actors: Seq[Any] = (),
        num_kv_blocks: int | None = None,
    ) -> None:
        """`rank_actors`: of the first epoch. `num_kv_blocks`: how many blocks the
        engine had at first, if this driver replaces one that has died.
        """
        gc.disable()  # until the engine has started
        log_to_stderr(config.engine.log_level)
        self._config = config
        self._engine_id = engine_id
        self._driver_id = uuid.uuid4().hex
        self._rank_maker = RankMaker(config, placement, engine_id, self.rank_actor_class)
        self._frontends = FrontendRecords(config.engine.frontend_timeout_s)
        self._grammars = GrammarMatching(
            Path(config.engine.tokenizer or config.model_dir) / "tokenizer.json",
            config.model.vocab_size,
            sorted(config.model.eos_token_ids),
        )
        self._first_ranks = [RankHandle(actor) for actor in rank_actors]
        self._num_kv_blocks = num_kv_blocks
        self._limits: SchedulerLimits | None = None
        self._step_loop: StepLoop | None = None
        self._supervisor: Supervisor | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._silence_task: asyncio.Task[None] | None = None
        self._process: ProcessId | None = None
        self._death: EngineDeadError | None = None  # why the engine has stopped for good
        self._death_event = asyncio.Event()

    async def start(self) -> StartReport:
        """Start the ranks and the step loop. Raises the error that kept them from starting."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._process = mark_this_process(self._engine_id)
        self._event_loop = asyncio.get_running_loop()
        self._supervisor = self.make_supervisor(
            self._rank_maker,
            busy_since_s=lambda: self._started_step_loop().busy_since_s,
            has_work=lambda: self._started_step_loop().engine.has_work,
            on_group_ready=lambda group, cache_survives: self._started_step_loop().post(
                RanksReplaced(executor=group, cache_survives=cache_survives)
            ),
            on_lost=lambda epoch, _: self._started_step_loop().post(RanksLost()),
            on_dead=self._die,
        )
        group, group_report = await asyncio.to_thread(
            self._supervisor.start, self._first_ranks, self._num_kv_blocks
        )
        self._limits = limits_of(self._config, group_report.num_blocks)
        engine = Engine(
            Scheduler(self._limits, clock=time.monotonic),
            group,
            num_steps_ahead=self._config.num_steps_ahead,
            grammars=self._grammars,
        )
        self._step_loop = StepLoop(
            engine,
            self._deliver_soon,
            self._die,
            on_failed_step=self._supervisor.note_failed_step,
            on_result_applied=self._supervisor.note_applied_result,
            on_conviction=self._supervisor.convictions.note,
        )
        self._supervisor.watch()
        gc.freeze()  # so that later garbage collections do not visit the blocks
        gc.enable()
        self._step_loop.start()
        self._silence_task = asyncio.create_task(self._drop_silent_frontends())
        return StartReport(
            device=self._config.device,
            limits=self._limits,
            seconds=group_report.seconds,
            log_lines=group_report.log_lines,
            checkpoint_id=group_report.checkpoint_id,
        )

    async def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`."""
        _, step_loop = self._limits_and_step_loop()
        return step_loop.engine.scheduler.records.since(time.monotonic() - seconds)

    async def processes(self) -> dict[str, ProcessId]:
        """The processes of this engine by name: "driver", "rank 0", ..., "spare 0", ..."""
        assert self._supervisor is not None and self._process is not None
        return {"driver": self._process} | self._supervisor.processes()

    async def wait_for_end(self) -> None:
        """Never returns: the call fails when this process ends. Raises `EngineDeadError` when the
        engine stops for good before that.
        """
        await self._death_event.wait()
        assert self._death is not None
        raise self._death.with_traceback(None)

    async def submit(self, frontend_id: str, requests: list[Request]) -> int:
        """Queue requests, all or none. Raises `RequestError` for one that cannot run,
        `EngineDeadError`. A frontend without an answer may send again: none is queued twice.
        Returns the number under which the frontend is known (`FrontendRecords`).
        """
        limits, step_loop = self._limits_and_step_loop()
        registration_number, new_requests = self._frontends.register_requests(
            frontend_id, requests, limits
        )
        if new_requests:
            arrival_s = time.monotonic()
            arrived = [dataclasses.replace(each, arrival_s=arrival_s) for each in new_requests]
            step_loop.post(Submit(registration_number=registration_number, requests=arrived))
        return registration_number

    async def finish(
        self, request_ids: list[str], reason: str, frontend_id: str, *submit_refs: int
    ) -> None:
        """End requests that their frontend no longer needs: `reason` is "abort", or "stop" where a
        stop string matched. `submit_refs`: of `submit` calls, for which Ray makes this call wait.
        """
        self._frontends.remove(frontend_id, request_ids)
        if self._step_loop is not None:
            self._step_loop.post(Finish(request_ids=request_ids, reason=reason))

    async def poll(self, arguments: bytes) -> bytes:
        """What `FrontendRecords.collect` returns for its arguments. Both are pickled, since Ray
        passes bytes on unchanged: with three arguments a call takes each side a seventh longer.
        """
        deltas = await self._frontends.collect(*pickle.loads(arguments))
        return pickle.dumps(deltas, protocol=5)

    async def stats(self) -> EngineStats:
        """The scheduler's state and counters. Raises `EngineDeadError`."""
        _, step_loop = self._limits_and_step_loop()
        assert self._supervisor is not None
        busy_since_s = step_loop.busy_since_s
        return dataclasses.replace(
            step_loop.stats(),
            is_ready=self._supervisor.is_ready,
            state=self._supervisor.recovery.state.value,
            num_recoveries=self._supervisor.recovery.num_recoveries,
            step_age_s=time.monotonic() - busy_since_s if busy_since_s is not None else 0.0,
            recovery_waits_for=self._rank_maker.placement.missing_resources
            or self._supervisor.recovery.last_failed_start(),
            driver_id=self._driver_id,
        )

    async def shutdown(self) -> None:
        """Stop the step loop and end the ranks."""
        if self._step_loop is not None:
            self._step_loop.stop()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        if self._step_loop is not None:
            await asyncio.to_thread(self._step_loop.join, STOP_TIMEOUT_S)
        self._grammars.close()

    # -- event loop --------------------------------------------------------------------------------

    def _started_step_loop(self) -> StepLoop:
        assert self._step_loop is not None
        return self._step_loop

    def _limits_and_step_loop(self) -> tuple[SchedulerLimits, StepLoop]:
        if self._death is not None:
            raise self._death.with_traceback(None)
        if self._limits is None or self._step_loop is None:
            raise EngineDeadError("the engine has not been started")
        return self._limits, self._step_loop

    async def _drop_silent_frontends(self) -> None:
        """Forget frontends that have stopped calling, and abort their requests."""
        limit_s = self._config.engine.frontend_timeout_s
        while True:
            await asyncio.sleep(min(limit_s, max(MIN_SILENCE_CHECK_PERIOD_S, limit_s / 4)))
            for frontend_id, request_ids in self._frontends.forget_silent_frontends().items():
                logger.warning("frontend %s is silent: its requests are aborted", frontend_id)
                self._started_step_loop().post(Finish(request_ids=request_ids, reason="abort"))

    def _deliver(self, news: NewsByFrontend) -> None:
        """Put news into the mailboxes. A fault there loses news, so it ends the engine."""
        try:
            self._frontends.deliver(news)
        except Exception as error:
            if self._death is None:  # on another thread: this one must answer while ranks end
                threading.Thread(target=self._die, args=(error,), daemon=True).start()

    def _fail_all_requests(self, death: EngineDeadError) -> None:
        """End every unfinished request with the reason, including those still in the inbox."""
        self._death = self._death or death
        self._death_event.set()
        self._frontends.fail_all(death)

    # -- engine thread -----------------------------------------------------------------------------

    def _deliver_soon(self, news: NewsByFrontend) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._deliver, news)

    def _die(self, error: Exception) -> None:
        """Stop for good: every request fails with the reason, and the ranks end. Any thread."""
        reason = reason_of(error)
        logger.error("the engine stops: %s", reason, exc_info=error)
        assert self._event_loop is not None and self._supervisor is not None
        # The supervisor reports that no ranks can be started; any other error is a bug.
        error_class = EngineLostError if isinstance(error, EngineDeadError) else EngineDeadError
        death = error_class(f"the engine has stopped: {reason}")
        self._event_loop.call_soon_threadsafe(self._fail_all_requests, death)
        self._supervisor.end()
