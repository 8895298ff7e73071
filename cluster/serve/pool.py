"""Makes several engines look like one to a client, by leases.

Each request is sent to the engine that its lease names. When an engine is lost, its requests get
new leases and continue at other engines, with the tokens they have.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.client.frontend import Frontend
from cluster.client.outputs import Generation
from cluster.ray_errors import NoAnswerError
from cluster.serve.calls import answers_in_time
from cluster.serve.leases import RETRY_PAUSE_S, EngineLeases, RoutedRequest
from cluster.serve.senders import RequestSender
from cluster.timeouts import POOL_STATS_TIMEOUT_S, POOL_THREAD_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, OverloadedError
from scheduler.messages import EngineStats
from scheduler.records import StepRecord

MAX_MOVES = 5  # so that a request that ends one engine after another does not reach all of them
SUMMED_STATS = [f.name for f in fields(EngineStats) if f.name.startswith("num_")] + ["queue_s"]

logger = logging.getLogger("eagleray")


class EnginePool:
    """An `EngineLink` over the engines of a deployment. Made on the event loop that holds the
    leases; its coroutines run there, other methods are called from other threads.
    """

    def __init__(
        self,
        engines: DeploymentHandle[Any],
        block_size: int,
        answer_limit_s: float,
        lease_limit_s: float,
        holder: Any | None = None,
        *,
        is_only_chooser: bool = True,
    ) -> None:
        """`answer_limit_s`: how long an engine may take to answer, `lease_limit_s`: how long a
        request may wait for an engine. `holder`: the actor in which this is, if it is one.
        `is_only_chooser`: no other process leases these engines for the same clients.
        """
        self._engines = engines
        self._leases = EngineLeases(engines, block_size, holder, is_only_chooser=is_only_chooser)
        self._answer_limit_s = answer_limit_s
        self._lease_limit_s = lease_limit_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        # Unfinished, by the id of the generation.
        self._routed_requests: dict[int, RoutedRequest] = {}
        self._senders: dict[Any, RequestSender] = {}  # by the actor id of the driver
        self._news_callbacks: list[Callable[[], None]] = []

    async def send(self, generations: list[Generation]) -> None:
        """Lease engines for these generations and send their requests, all or none. On the event
        loop of the pool. Raises `RequestError`, `OverloadedError` when no engine takes them in
        time.
        """
        routed_requests = [RoutedRequest(generation) for generation in generations]
        with self._lock:
            self._routed_requests |= {id(r.generation): r for r in routed_requests}
        for generation in generations:
            # The future keeps its callbacks, so none of them may keep the generation.
            callback = functools.partial(self._handle_done, id(generation))
            generation.done_future.add_done_callback(callback)
        try:
            async with asyncio.timeout(self._lease_limit_s):
                await self._lease_and_send(routed_requests)
        except TimeoutError:
            self.abort(generations)
            raise _no_answer_error(self._lease_limit_s) from None
        except BaseException:
            self.abort(generations)
            raise

    def submit(self, generations: list[Generation]) -> None:
        """`send`, for other threads than the event loop's."""
        asyncio.run_coroutine_threadsafe(self.send(generations), self._loop).result()

    def abort(self, generations: list[Generation], error: EaglerayError | None = None) -> None:
        """End generations early, with the reason "abort" or with `error`."""
        generations_by_frontend: dict[Frontend, list[Generation]] = {}
        for generation in generations:
            with self._lock:
                routed_request = self._routed_requests.get(id(generation))
                frontend = routed_request.frontend if routed_request is not None else None
            if frontend is not None:
                generations_by_frontend.setdefault(frontend, []).append(generation)
            else:  # it has ended, or has no engine now: then it is ended where it arrives
                generation.abort(error)
        for frontend, frontend_generations in generations_by_frontend.items():
            frontend.abort(frontend_generations, error)
        self._call_news_callbacks()

    def add_news_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each batch of news, on the thread that handled it."""
        self._news_callbacks.append(callback)

    def stats(self) -> EngineStats:
        """The counters of all engines, added up. Raises `OverloadedError` if none answers."""
        return merged_stats(self._run(self.all_stats(), POOL_THREAD_TIMEOUT_S))

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds` of one of the engines: those of several do not fit into
        one list. Raises `OverloadedError` if none answers.
        """
        answers = self._run(self._ask_engines("records", seconds), POOL_THREAD_TIMEOUT_S)
        if not answers:
            raise _no_answer_error()
        records: list[StepRecord] = answers[0]
        return records

    async def all_stats(self) -> list[EngineStats]:
        """The counters of each engine that answers."""
        return await self._ask_engines("stats")

    # -- placing -----------------------------------------------------------------------------------

    async def _lease_and_send(self, routed_requests: list[RoutedRequest]) -> None:
        """Lease an engine for each request and send it there, or to another engine if that one is
        lost meanwhile. Once all have a lease, none waits for the engine of another one.
        """
        leases = await asyncio.gather(*map(self._leases.lease, routed_requests))
        requests_by_sender: dict[RequestSender, list[RoutedRequest]] = {}
        for routed_request, lease in zip(routed_requests, leases, strict=True):
            if lease is not None:  # otherwise the request has ended
                with self._lock:
                    sender = self._sender(lease.driver)
                    routed_request.replica_id = lease.replica_id
                    routed_request.frontend = sender.frontend
                requests_by_sender.setdefault(sender, []).append(routed_request)
        await asyncio.gather(*(self._send_to(*part) for part in requests_by_sender.items()))

    async def _send_to(self, sender: RequestSender, routed_requests: list[RoutedRequest]) -> None:
        """Send requests to one engine, or elsewhere if it is lost."""
        try:
            await sender.send([request.generation for request in routed_requests])
        except (EngineDeadError, NoAnswerError) as error:
            self._note_loss(routed_requests, error)
            if unfinished := [request for request in routed_requests if not request.has_ended()]:
                await asyncio.sleep(RETRY_PAUSE_S)
                await self._lease_and_send(unfinished)

    def _sender(self, driver: Any) -> RequestSender:
        """The sender of a driver's requests. Call it with the lock held."""
        driver_id = driver._ray_actor_id
        if driver_id not in self._senders:
            frontend = Frontend(
                driver,
                answer_limit_s=self._answer_limit_s,
                on_dead=lambda generations, error: self._move(driver_id, generations, error),
            )
            frontend.add_news_callback(self._call_news_callbacks)
            frontend.driver_handle.watch_end()
            self._senders[driver_id] = RequestSender(frontend)
        return self._senders[driver_id]

    def _move(self, driver_id: Any, generations: list[Generation], error: EaglerayError) -> None:
        """An engine is lost: move its requests to others. Does not wait until they have moved."""
        with self._lock:
            self._senders.pop(driver_id, None)
            all_requests = self._routed_requests
            routed_requests = [all_requests[id(g)] for g in generations if id(g) in all_requests]
        if routed_requests:
            logger.warning("%d requests move to other engines: %s", len(routed_requests), error)
        self._note_loss(routed_requests, error)
        for routed_request in routed_requests:
            if not routed_request.has_ended():
                asyncio.run_coroutine_threadsafe(
                    self._lease_and_send_or_fail(routed_request), self._loop
                )
        self._call_news_callbacks()

    async def _lease_and_send_or_fail(self, routed_request: RoutedRequest) -> None:
        """Place a request that has lost its engine; if that is not possible, it fails alone."""
        generation = routed_request.generation
        try:
            async with asyncio.timeout(self._lease_limit_s):
                await self._lease_and_send([routed_request])
        except TimeoutError:
            self.abort([generation], _no_answer_error(self._lease_limit_s))
        except EaglerayError as failure:
            self.abort([generation], failure)
        except Exception as failure:  # a bug here must not leave callers waiting
            logger.exception("a request could not be moved")
            self.abort([generation], EngineError(f"this request could not move: {failure!r}"))
        self._call_news_callbacks()

    def _note_loss(self, routed_requests: list[RoutedRequest], error: EaglerayError) -> None:
        """These requests have lost their engine. Those that were at too many engines fail."""
        for routed_request in routed_requests:
            with self._lock:
                routed_request.frontend = None
            self._leases.give_back(routed_request)
            routed_request.lost_replica_ids.append(routed_request.replica_id)
            num_lost = len(routed_request.lost_replica_ids)
            routed_request.generation.rename(str(num_lost))
            if num_lost > MAX_MOVES:
                routed_request.generation.fail(
                    EngineDeadError(
                        f"this request was at {num_lost} engines that were lost one after another;"
                        f" the last one: {error}"
                    )
                )

    def _handle_done(self, generation_id: int, done_future: Future[None]) -> None:
        """Called when a request has ended, or its caller was canceled."""
        with self._lock:
            routed_request = self._routed_requests.pop(generation_id)
            frontend = routed_request.frontend
        self._leases.stop_counting(routed_request)
        if done_future.cancelled() and frontend is not None:
            frontend.abort([routed_request.generation])
        self._leases.give_back(routed_request)

    def _call_news_callbacks(self) -> None:
        for callback in self._news_callbacks:
            callback()

    async def _ask_engines(self, method: str, *args: Any) -> list[Any]:
        """The answers of the engines that give one in time."""
        return await answers_in_time(self._engines, method, *args, limit_s=POOL_STATS_TIMEOUT_S)

    def _run(self, coroutine: Any, limit_s: float) -> Any:
        """Run a coroutine on the event loop. Raises `OverloadedError` after `limit_s`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise _no_answer_error(limit_s) from None


def _no_answer_error(limit_s: float | None = None) -> OverloadedError:
    answers = "answers" if limit_s is None else f"answered within {limit_s:.0f} s"
    return OverloadedError(
        f"no engine {answers}; try again later, and see the log of the server if it lasts"
    )


def merged_stats(all_stats: list[EngineStats]) -> EngineStats:
    """The counters added up, and the rest of one engine, a ready one if there is any. Raises
    `OverloadedError` for none.
    """
    if not all_stats:
        raise _no_answer_error()
    shown_stats = next((stats for stats in all_stats if stats.is_ready), all_stats[0])
    step_parts = sorted({part for stats in all_stats for part in stats.step_seconds})
    rank_times = [stats.rank_seconds for stats in all_stats]
    return replace(
        shown_stats,
        **{name: sum(getattr(stats, name) for stats in all_stats) for name in SUMMED_STATS},
        step_seconds={
            part: sum(stats.step_seconds.get(part, 0.0) for stats in all_stats)
            for part in step_parts
        },
        rank_seconds=tuple(map(sum, itertools.zip_longest(*rank_times, fillvalue=0.0))),
    )
