"""The driver actor: it owns the scheduler and with it every token of one engine.

Two threads. The *engine thread* runs the step loop and is the only one to touch the scheduler. The actor's event loop
serves the frontends: it checks and passes on requests, holds what is new in a mailbox a frontend, and answers polls.
They meet in `_inbox` (commands for the engine) and `_deliver` (news for the mailboxes).

A failed step ends the engine: every request ends with an error that says why, and the ranks are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup

from cluster.mailbox import Mailbox, News
from cluster.worker_group import WorkerGroup
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, RequestError
from scheduler.messages import Request
from scheduler.scheduler import Scheduler, SchedulerLimits, StepOutput, check_request

SILENCE_CHECK_S = 1.0
STOP_TIMEOUT_S = 2.0
CHECK_AFTER_S = 1.0  # of idleness: with many blocks the check takes tens of milliseconds, which a request would wait

logger = logging.getLogger("eagleray.driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a frontend needs to know of a started engine."""

    device: str
    limits: SchedulerLimits
    seconds: dict[str, float]
    lines: tuple[str, ...]


@dataclass(slots=True)
class _Frontend:
    mailbox: Mailbox
    news: asyncio.Event
    last_seen_s: float
    request_ids: set[str]  # unfinished

    def fail(self, request_ids: list[str], error: EaglerayError) -> None:
        """End requests with an error."""
        for request_id in request_ids:
            self.mailbox.put(request_id, News(first_index=0, finish_reason="error", error=error))
        self.request_ids.difference_update(request_ids)
        self.news.set()


class Driver:
    """Run as a Ray actor by `LLM`; every method but `start` answers without waiting for a step."""

    def __init__(self, config: ResolvedConfig, placement: PlacementGroup) -> None:
        logging.basicConfig(level=config.engine.log_level.upper())
        self._config = config
        self._group = WorkerGroup(config, placement)
        self._engine: Engine | None = None
        self._limits: SchedulerLimits | None = None
        self._frontends: dict[str, _Frontend] = {}
        self._owner: dict[str, str] = {}  # request id to frontend id; engine thread
        self._final_only: set[str] = set()  # request ids; engine thread
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- called by frontends, on the event loop ---------------------------------------------------------------------

    async def start(self) -> EngineReport:
        """Start the ranks and the step loop. Raises what kept them from starting."""
        sys.setswitchinterval(0.0005)  # the two threads hand over often, and neither computes for long
        self._loop = asyncio.get_running_loop()
        try:
            report = await asyncio.to_thread(self._group.start)
        except BaseException:
            self._group.close()
            raise
        engine = self._config.engine
        self._limits = SchedulerLimits(
            num_blocks=report.num_blocks,
            block_size=self._config.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self._config.max_model_len,
            vocab_size=self._config.model.vocab_size,
            enable_prefix_caching=engine.enable_prefix_caching,
        )
        self._engine = Engine(Scheduler(self._limits), self._group, num_steps_ahead=engine.num_steps_ahead)
        gc.collect()
        gc.freeze()  # no later collection walks over the blocks
        self._thread.start()
        self._watch = asyncio.create_task(self._drop_silent_frontends())
        return EngineReport(device=self._config.device, limits=self._limits, seconds=report.seconds, lines=report.lines)

    async def submit(self, frontend_id: str, requests: list[Request]) -> None:
        """Queue requests, all or none. Raises `RequestError` for one that cannot run, `EngineDeadError`."""
        limits = self._alive_limits()
        request_ids: set[str] = set()
        for request in requests:
            check_request(request, limits)
            name = request.request_id
            if name in request_ids or any(name in frontend.request_ids for frontend in self._frontends.values()):
                raise RequestError(f"request id {name!r} is in use", "request_id")
            request_ids.add(name)
        frontend = self._frontend(frontend_id)
        frontend.request_ids |= request_ids

        def add(engine: Engine) -> None:
            for request in requests:
                self._owner[request.request_id] = frontend_id
                if request.final_only:
                    self._final_only.add(request.request_id)
                seq = engine.add(request)
                if seq.finish_reason is not None:  # sent again with tokens that end it already
                    self._disown(request.request_id)
                    end = News(first_index=seq.num_output_tokens, finish_reason=seq.finish_reason)
                    self._loop.call_soon_threadsafe(self._deliver, {frontend_id: {request.request_id: end}})

        self._post(add)

    async def finish(self, frontend_id: str, request_ids: list[str], reason: str, after: None = None) -> None:
        """End requests whose frontend needs no more of them ("abort", or "stop" where a stop string matched).

        `after`: a `submit` on its way, given as its ref. Ray makes this call wait for it, which else may come second.
        """
        frontend = self._frontends.get(frontend_id)
        if frontend is not None:
            frontend.request_ids.difference_update(request_ids)
        self._post_finish(request_ids, reason)

    async def poll(self, frontend_id: str, acknowledged: int, wait_s: float) -> bytes:
        """Everything new for a frontend, as soon as there is something, or empty after `wait_s`: `Deltas`, pickled,
        because Ray passes bytes on as they are.

        Raises `EngineError` for one that was silent for so long that it has been forgotten.
        """
        if acknowledged and frontend_id not in self._frontends:
            raise EngineError("the driver has heard nothing from this frontend for long and has aborted its requests")
        frontend, limit = self._frontend(frontend_id), self._config.engine.frontend_timeout_s
        if not frontend.mailbox.has_news:
            frontend.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(frontend.news.wait(), min(wait_s, limit / 2))
        frontend.last_seen_s = time.monotonic()
        return pickle.dumps(frontend.mailbox.collect(acknowledged), protocol=5)

    async def stats(self) -> dict[str, float]:
        """Counters of the scheduler, and what is running, waiting and free at the moment."""
        self._alive_limits()
        assert self._engine is not None
        scheduler = self._engine.scheduler
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_free_blocks": scheduler.block_manager.num_free_blocks,
            "num_blocks": scheduler.limits.num_blocks,
            "num_steps": scheduler.stats.num_steps,
            "num_preemptions": scheduler.stats.num_preemptions,
            "num_prompt_tokens": scheduler.stats.num_prompt_tokens,
            "num_cached_tokens": scheduler.stats.num_cached_tokens,
        }

    async def shutdown(self) -> None:
        """Stop the step loop and kill the ranks."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._group.close()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    # -- event loop -------------------------------------------------------------------------------------------------

    def _alive_limits(self) -> SchedulerLimits:
        if self._dead is not None or self._limits is None:
            raise EngineDeadError(self._dead or "the engine has not been started")
        return self._limits

    def _frontend(self, frontend_id: str) -> _Frontend:
        if frontend_id not in self._frontends:
            self._frontends[frontend_id] = _Frontend(Mailbox(), asyncio.Event(), time.monotonic(), set())
        frontend = self._frontends[frontend_id]
        frontend.last_seen_s = time.monotonic()
        return frontend

    def _deliver(self, news: dict[str, dict[str, News]]) -> None:
        """Put the news of a step into the mailboxes and wake their polls."""
        for frontend_id, by_request in news.items():
            frontend = self._frontends.get(frontend_id)
            if frontend is None:
                continue  # it went silent and its requests were aborted
            for request_id, item in by_request.items():
                frontend.mailbox.put(request_id, item)
                if item.finish_reason:
                    frontend.request_ids.discard(request_id)
            frontend.news.set()

    def _end_all(self, reason: str) -> None:
        """The engine is dead: every unfinished request ends with the reason, those still in the inbox, too."""
        self._dead = reason
        for frontend in self._frontends.values():
            frontend.fail(list(frontend.request_ids), EngineDeadError(reason))

    async def _drop_silent_frontends(self) -> None:
        """Abort the requests of frontends that have stopped polling, and forget those frontends."""
        limit = self._config.engine.frontend_timeout_s
        while not self._stopping:
            await asyncio.sleep(min(limit, max(SILENCE_CHECK_S, limit / 4)))
            for frontend_id, frontend in list(self._frontends.items()):
                silent_s = time.monotonic() - frontend.last_seen_s
                if silent_s > limit and frontend.request_ids:
                    logger.warning("frontend %s is silent: its requests are aborted", frontend_id)
                    request_ids = list(frontend.request_ids)
                    error = EngineError(f"the frontend did not poll for {limit:g} s: its requests were aborted")
                    frontend.fail(request_ids, error)
                    self._post_finish(request_ids, "abort")
                elif silent_s > 2 * limit:  # it had time to come back for the news
                    del self._frontends[frontend_id]

    def _post_finish(self, request_ids: list[str], reason: str) -> None:
        def finish(engine: Engine) -> None:
            for request_id in request_ids:
                engine.finish(request_id, reason)
                self._disown(request_id)

        self._post(finish)

    def _post(self, command: Callable[[Engine], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # -- engine thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._engine is not None
        engine = self._engine
        try:
            while self._wait_for_work(engine):
                while self._inbox:
                    self._inbox.popleft()(engine)
                output = engine.step()
                if output is not None and (news := self._news(output)):
                    self._loop.call_soon_threadsafe(self._deliver, news)
        except Exception as error:
            if not self._stopping:
                self._die(error)

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there is a command or a step to run; False when the engine stops."""

        def awake() -> bool:
            return engine.has_work or bool(self._inbox) or self._stopping

        with self._wake:
            idle = not self._wake.wait_for(awake, CHECK_AFTER_S)
        if idle:
            engine.check()
            with self._wake:
                self._wake.wait_for(awake)
        return not self._stopping

    def _news(self, output: StepOutput) -> dict[str, dict[str, News]]:
        """The tokens and endings of a step by frontend and request."""
        news: dict[str, dict[str, News]] = {}
        for i, (seq, token) in enumerate(zip(output.sequences, output.token_ids, strict=True)):
            if seq.request_id in self._final_only:
                continue
            logprobs = [output.logprobs[i]] if output.logprobs is not None and output.logprobs[i] else None
            news.setdefault(self._owner[seq.request_id], {})[seq.request_id] = News(
                first_index=seq.num_output_tokens - 1,
                token_ids=[token],
                logprobs=logprobs,
                num_cached_tokens=seq.num_cached_tokens or 0,
                finish_reason=seq.finish_reason,
            )
        for seq in output.finished:
            if seq.request_id in self._final_only:
                news.setdefault(self._owner[seq.request_id], {})[seq.request_id] = News(
                    first_index=0,
                    token_ids=seq.token_ids[seq.num_prompt_tokens :],
                    num_cached_tokens=seq.num_cached_tokens or 0,
                    finish_reason=seq.finish_reason,
                )
            self._disown(seq.request_id)
        return news

    def _disown(self, request_id: str) -> None:
        self._owner.pop(request_id, None)
        self._final_only.discard(request_id)

    def _die(self, error: Exception) -> None:
        """End every request with the error; the ranks may hang in a collective, so they are killed."""
        reason = str(error) if isinstance(error, EaglerayError) else f"{type(error).__name__}: {error}"
        logger.error("the engine stops: %s", reason, exc_info=error)
        self._loop.call_soon_threadsafe(self._end_all, f"the engine has stopped: {reason}")
        self._group.close()
