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
from cluster.serve.senders import EngineSender
from cluster.timeouts import POOL_STATS_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, OverloadedError
from scheduler.messages import EngineStats
from scheduler.records import StepRecord

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
        self,
        engines: DeploymentHandle[Any],
        block_size: int,
        answer_limit_s: float,
        lease_limit_s: float,
        holder: Any | None = None,
    ) -> None:
        """`answer_limit_s`: how long an engine may take to answer, `lease_limit_s`: how long a
        request may wait until one takes it. `holder`: the actor in which this is, if it is one.
        """
        self._holder = holder
        self._engines = engines
        self._leases = engines.options(method_name="lease", stream=True)
        self._block_size = block_size
        self._answer_limit_s = answer_limit_s
        self._lease_limit_s = lease_limit_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by the id of the generation
        self._senders: dict[Any, EngineSender] = {}  # by the id of the driver
        self._table = PrefixTable()
        self._callbacks: list[Callable[[], None]] = []

    async def send(self, generations: list[Generation]) -> None:
        """Lease engines for these generations and send their requests, all or none. On the event
        loop of the pool. Raises `RequestError`, `OverloadedError` when no engine takes them in
        time.
        """
        held = self._hold(generations)
        try:
            async with asyncio.timeout(self._lease_limit_s):
                await self._place(held)
        except TimeoutError:
            self.abort(generations)
            raise _no_answer(self._lease_limit_s) from None
        except BaseException:
            self.abort(generations)
            raise

    def submit(self, generations: list[Generation]) -> None:
        """`send`, for other threads than the event loop's."""
        asyncio.run_coroutine_threadsafe(self.send(generations), self._loop).result()

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
        return merged(self._run(self.all_stats(), POOL_STATS_TIMEOUT_S))

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of one of the engines: those of several do not fit into one list."""
        [found] = self._run(self._ask("records", seconds), POOL_STATS_TIMEOUT_S)[:1] or [[]]
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
            # The future keeps its callbacks, so none of them may keep the generation.
            key = id(each.generation)
            each.generation.done.add_done_callback(functools.partial(self._release, key))
        return held

    # -- placing -----------------------------------------------------------------------------------

    async def _place(self, held: list[_Held]) -> None:
        """Lease an engine for each request and send it there, or to another engine if that one is
        lost meanwhile. No request waits for an engine that another one was sent to.
        """
        await asyncio.gather(*map(self._lease_one, held))
        by_engine: dict[EngineSender, list[_Held]] = {}
        for each in held:
            lease, each.granted = each.granted, None
            if lease is not None:
                with self._lock:
                    sender = self._sender(lease.driver)
                    each.replica, each.frontend = lease.replica, sender.frontend
                by_engine.setdefault(sender, []).append(each)
        await asyncio.gather(*(self._send_to(*part) for part in by_engine.items()))

    async def _send_to(self, sender: EngineSender, held: list[_Held]) -> None:
        """Send requests to one engine, or elsewhere if it is lost."""
        try:
            await sender.send([each.generation for each in held])
        except (EngineDeadError, NoAnswerError) as error:
            self._lost(held, error)
            if left := [each for each in held if not each.generation.done.done()]:
                await asyncio.sleep(PAUSE_S)
                await self._place(left)

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
            call = held.lease = LeaseCall(
                self._leases.remote(Wanted(tuple(avoid), choose, self._holder))
            )
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

    def _sender(self, driver: Any) -> EngineSender:
        """The sender of a driver's requests. Call it with the lock held."""
        key = driver._ray_actor_id
        if key not in self._senders:
            frontend = Frontend(
                driver,
                answer_limit_s=self._answer_limit_s,
                on_dead=lambda generations, error: self._move(key, generations, error),
            )
            frontend.after_news(self._news)
            frontend.driver.follow()
            self._senders[key] = EngineSender(frontend)
        return self._senders[key]

    def _move(self, key: Any, generations: list[Generation], error: EaglerayError) -> None:
        """An engine is lost: move its requests to others. Does not wait until they have moved."""
        with self._lock:
            sender = self._senders.pop(key, None)
            held = [h for h in (self._held.get(id(g)) for g in generations) if h is not None]
        if held:
            logger.warning("%d requests move to other engines: %s", len(held), error)
        if sender is not None:
            sender.frontend.close()
        self._lost(held, error)
        for each in held:
            if not each.generation.done.done():
                asyncio.run_coroutine_threadsafe(self._go_on(each), self._loop)
        self._news()

    async def _go_on(self, held: _Held) -> None:
        """Place a request that has lost its engine; if that is not possible, it fails alone."""
        generation = held.generation
        try:
            async with asyncio.timeout(self._lease_limit_s):
                await self._place([held])
        except TimeoutError:
            generation.fail(_no_answer(self._lease_limit_s))
        except EaglerayError as failure:
            generation.fail(failure)
        except Exception as failure:  # a bug here must not leave callers waiting
            logger.exception("a request could not be moved")
            generation.fail(EngineError(f"this request could not move: {failure!r}"))
        self._news()

    def _lost(self, held: list[_Held], error: EaglerayError) -> None:
        """These requests have lost their engine. Those that were at too many engines fail."""
        for each in held:
            with self._lock:
                each.frontend = None
            self._cancel(each)
            each.failed_at.append(each.replica)
            each.generation.rename(str(len(each.failed_at)))
            if len(each.failed_at) > MAX_MOVES:
                each.generation.fail(
                    EngineDeadError(
                        f"this request was at {len(each.failed_at)} engines that were lost one"
                        f" after another; the last one: {error}"
                    )
                )

    def _release(self, key: int, done: Future[None]) -> None:
        """Called when a request has ended, or its caller was canceled."""
        with self._lock:
            held = self._held.pop(key)
            self._table.ended(held)
            frontend = held.frontend
        if done.cancelled() and frontend is not None:
            frontend.abort([held.generation])
        self._cancel(held)

    def _cancel(self, held: _Held) -> None:
        lease, held.lease = held.lease, None  # it refers to the request
        if lease is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all else with it
                self._loop.call_soon_threadsafe(lease.end)

    def _news(self) -> None:
        for callback in self._callbacks:
            callback()

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of the engines that give one in time."""
        asked = self._engines.broadcast(method, *args)
        try:
            async with asyncio.timeout(POOL_STATS_TIMEOUT_S):
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
