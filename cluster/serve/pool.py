"""Makes several engines look like one to a client, by leases.

Each request is sent to the engine that its lease names. When an engine is lost, its requests get
new leases and continue at others, with the tokens they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.client.frontend import Frontend
from cluster.client.outputs import Generation
from cluster.ray_errors import NoAnswerError
from cluster.serve.engine import EngineReport, Lease
from cluster.serve.leases import LeaseCall
from cluster.serve.prefixes import PrefixTable, prefix_hashes, session_hash
from cluster.serve.router import Wanted
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, OverloadedError
from scheduler.messages import EngineStats
from scheduler.records import StepRecord

LEASE_TIMEOUT_S = 120.0  # an engine that starts or recovers takes the requests once it is ready
ANSWER_TIMEOUT_S = 2.0
PAUSE_S = 0.2
MAX_MOVES = 5  # so that a request that ends one engine after another does not reach all of them

logger = logging.getLogger("eagleray")


@dataclass(slots=True, eq=False)
class _Held:
    """A request, and where it is. frontend: None while it moves."""

    generation: Generation
    lease: LeaseCall | None = None
    granted: Lease | None = None  # not used yet
    replica: str = ""
    frontend: Frontend | None = None
    failed_at: list[str] = field(default_factory=list)


class EnginePool:
    """An `EngineLink` over the engines of a deployment. Made on the event loop that holds the
    leases; its methods are called from other threads.
    """

    def __init__(
        self, engines: DeploymentHandle[Any], block_size: int, answer_limit_s: float
    ) -> None:
        self._engines = engines
        self._leases = engines.options(method_name="lease", stream=True)
        self._block_size = block_size
        self._answer_limit_s = answer_limit_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by the id of the generation
        self._frontends: dict[Any, Frontend] = {}  # by the id of the driver
        self._table = PrefixTable()
        self._callbacks: list[Callable[[], None]] = []

    async def reach(self, generations: list[Generation]) -> None:
        """Lease engines in advance, because `submit` would block a thread while it waits for them.
        On the event loop of the pool. Raises `OverloadedError`.
        """
        held = self._hold(generations)
        try:
            async with asyncio.timeout(LEASE_TIMEOUT_S):
                await self._lease_all(held)
        except TimeoutError:
            self.abort(generations)
            raise _no_answer(LEASE_TIMEOUT_S) from None
        except BaseException:
            self.abort(generations)
            raise

    def submit(self, generations: list[Generation]) -> None:
        """Send the requests of these generations, all or none. Raises `RequestError`,
        `OverloadedError` when no engine takes them in time.
        """
        with self._lock:
            found = [self._held.get(id(generation)) for generation in generations]
        held = [each for each in found if each is not None] or self._hold(generations)
        try:
            self._place(held, time.monotonic() + LEASE_TIMEOUT_S)
        except BaseException:
            self.abort(generations)
            raise

    def abort(self, generations: list[Generation]) -> None:
        """End generations early."""
        by_frontend: dict[Frontend, list[Generation]] = {}
        for generation in generations:
            with self._lock:
                held = self._held.get(id(generation))
                frontend = held.frontend if held is not None else None
            if frontend is not None:
                by_frontend.setdefault(frontend, []).append(generation)
            else:  # it has ended, or is moving: then it is ended where it arrives
                for output in generation.outputs:
                    if output.completion.finish_reason is None:
                        output.abort()
                generation.end()
        for frontend, of_one in by_frontend.items():
            frontend.abort(of_one)
        self._news()

    def after_news(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each batch of news, on the thread that handled
        it.
        """
        self._callbacks.append(callback)

    def stats(self) -> EngineStats:
        """The counters of all engines, added up. Raises `OverloadedError` if none answers."""
        return merged(self._run(self.all_stats(), ANSWER_TIMEOUT_S))

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of one of the engines: those of several do not fit into one list."""
        [found] = self._run(self._ask("records", seconds), ANSWER_TIMEOUT_S)[:1] or [[]]
        records: list[StepRecord] = found
        return records

    async def all_stats(self) -> list[EngineStats]:
        """The counters of each engine that answers."""
        return await self._ask("stats")

    async def describe(self) -> list[EngineReport]:
        """Every engine that answers."""
        return await self._ask("describe")

    def _hold(self, generations: list[Generation]) -> list[_Held]:
        held = [_Held(generation) for generation in generations]
        with self._lock:
            self._held |= {id(each.generation): each for each in held}
        for each in held:
            each.generation.done.add_done_callback(functools.partial(self._release, each))
        return held

    # -- placing -----------------------------------------------------------------------------------

    def _place(self, held: list[_Held], until_s: float) -> None:
        """Lease an engine for each request and send it there, or to another engine if that one is
        lost meanwhile.
        """
        while held:
            self._lease(held, until_s)
            by_frontend: dict[Frontend, list[_Held]] = {}
            for each in held:
                if each.frontend is not None:
                    by_frontend.setdefault(each.frontend, []).append(each)
            held = []
            for frontend, of_one in by_frontend.items():
                try:
                    frontend.submit([each.generation for each in of_one])
                except (EngineDeadError, NoAnswerError) as error:
                    self._lost(of_one, error)
                    held += [each for each in of_one if not each.generation.done.done()]
                else:
                    gone = [e.generation for e in of_one if e.generation.done.done()]
                    frontend.finish(gone)  # aborted meanwhile
            if held:
                time.sleep(PAUSE_S)

    def _lease(self, held: list[_Held], until_s: float) -> None:
        """Lease an engine for each request that has not been aborted."""
        if without := [each for each in held if each.granted is None]:
            self._run(self._lease_all(without), max(0.0, until_s - time.monotonic()))
        for each in held:
            lease, each.granted = each.granted, None
            if lease is not None:
                with self._lock:
                    each.replica, each.frontend = lease.replica, self._frontend(lease.driver)

    async def _lease_all(self, held: list[_Held]) -> None:
        await asyncio.gather(*map(self._lease_one, held))

    async def _lease_one(self, held: _Held) -> None:
        """Lease an engine for one request. Sets `granted`, unless the request has ended."""
        request = held.generation.requests[0]
        prompt = request.token_ids[: request.num_prompt_tokens]
        session, avoid = held.generation.session_id, list(held.failed_at)
        hashes = prefix_hashes(prompt, self._block_size, request.cache_salt)
        of_session = session_hash(session) if session is not None else None
        while not held.generation.done.done():
            with self._lock:
                self._table.ended(held)  # at the engine of an earlier lease
            choose = functools.partial(self._choose, held, hashes, of_session, tuple(avoid))
            call = held.lease = LeaseCall(self._leases.remote(Wanted(tuple(avoid), choose)))
            if held.generation.done.done():  # `_release` may have been faster
                call.end()
            try:
                lease = await call.granted
            except (RayError, RayServeException, EaglerayError) as error:
                # The lease or its engine is lost; another one is asked.
                logger.warning("a lease failed: %s", str(error).split("\n")[0])
                call.end()
                await asyncio.sleep(PAUSE_S)
            except asyncio.CancelledError:
                call.end()
                if not held.generation.done.done():
                    raise
            else:
                if lease.driver is not None:
                    held.granted = lease
                    return
                call.end()
                await asyncio.sleep(PAUSE_S if lease.replica in avoid else PAUSE_S / 10)
                avoid.append(lease.replica)

    def _choose(
        self,
        held: _Held,
        hashes: Seq[int],
        session: int | None,
        avoid: Seq[str],
        engines: Collection[str],
    ) -> str:
        """The engine for a request, by name. On the router's thread."""
        with self._lock:
            chosen = self._table.choose(held, engines, hashes, session, avoid)
            if held.generation.done.done():  # `_release` may have been faster
                self._table.ended(held)
        return chosen

    def _frontend(self, driver: Any) -> Frontend:
        """The frontend of a driver. Call it with the lock held."""
        key = driver._ray_actor_id
        if key not in self._frontends:
            frontend = Frontend(
                driver,
                answer_limit_s=self._answer_limit_s,
                on_dead=lambda generations, error: self._move(key, generations, error),
            )
            frontend.after_news(self._news)
            frontend.follow()
            self._frontends[key] = frontend
        return self._frontends[key]

    def _move(self, key: Any, generations: list[Generation], error: EaglerayError) -> None:
        """An engine is lost: move its requests to others."""
        with self._lock:
            frontend = self._frontends.pop(key, None)
            held = [h for h in (self._held.get(id(g)) for g in generations) if h is not None]
        if held:
            logger.warning("%d requests move to other engines: %s", len(held), error)
        self._lost(held, error)
        until_s = time.monotonic() + LEASE_TIMEOUT_S
        for each in held:
            if not each.generation.done.done():
                try:
                    self._place([each], until_s)
                except EaglerayError as failure:  # the other requests continue
                    each.generation.fail(failure)
                except Exception as failure:  # a bug here must not leave callers waiting
                    logger.exception("a request could not be moved")
                    each.generation.fail(EngineError(f"this request could not move: {failure!r}"))
        self._news()
        if frontend is not None:
            frontend.close()

    def _lost(self, held: list[_Held], error: EaglerayError) -> None:
        """These requests have lost their engine. Those that were at too many engines fail."""
        for each in held:
            with self._lock:
                each.frontend = None
            self._cancel(each)
            each.failed_at.append(each.replica)
            if len(each.failed_at) > MAX_MOVES:
                each.generation.fail(
                    EngineDeadError(
                        f"this request was at {len(each.failed_at)} engines that were lost one"
                        f" after another; the last one: {error}"
                    )
                )

    def _release(self, held: _Held, done: Future[None]) -> None:
        """Called when a request has ended, or its caller was canceled."""
        with self._lock:
            self._held.pop(id(held.generation), None)
            self._table.ended(held)
            frontend = held.frontend
        if done.cancelled() and frontend is not None:
            frontend.abort([held.generation])
        self._cancel(held)

    def _cancel(self, held: _Held) -> None:
        if held.lease is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all else with it
                self._loop.call_soon_threadsafe(held.lease.end)

    def _news(self) -> None:
        for callback in self._callbacks:
            callback()

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of the engines that give one in time."""
        asked = self._engines.broadcast(method, *args)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answers = await asked.results_async(return_exceptions=True)
        except TimeoutError:
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _run(self, work: Any, limit_s: float) -> Any:
        """Run a coroutine on the event loop. Raises `OverloadedError` after `limit_s`."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(limit_s)
        except TimeoutError:
            running.cancel()
            raise _no_answer(limit_s) from None


def _no_answer(limit_s: float) -> OverloadedError:
    return OverloadedError(f"no engine answered within {limit_s:.0f} s")


def merged(many: list[EngineStats]) -> EngineStats:
    """The sum of the counters, ready if any engine is. Raises `OverloadedError` without any."""
    if not many:
        raise OverloadedError("no engine answers")
    ready = [stats for stats in many if stats.is_ready] or many
    parts = {name for stats in many for name in stats.step_seconds}
    ranks = range(max(len(stats.rank_seconds) for stats in many))
    numbers = (
        *("num_running", "num_waiting", "num_free_blocks", "num_blocks", "num_steps", "queue_s"),
        *("num_preemptions", "num_prompt_tokens", "num_cached_tokens", "num_admitted"),
        "num_recoveries",
    )
    return replace(
        ready[0],
        **{name: sum(getattr(stats, name) for stats in many) for name in numbers},
        step_seconds={n: sum(s.step_seconds.get(n, 0.0) for s in many) for n in sorted(parts)},
        rank_seconds=tuple(sum(s.rank_seconds[r] for s in many if s.rank_seconds) for r in ranks),
    )
