"""The client's end of the driver: sends requests, polls for news, and ends what nobody needs any
more.

One background thread polls while anything is outstanding. News goes to the outputs of its
generation, whose sinks run on that thread. `Generation.done` completes once, with or without an
error.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.client.outputs import Generation, OutputFollower
from cluster.news import unpack
from cluster.ray_errors import CALL_TIMEOUT_S, NoAnswerError, call
from scheduler.errors import EaglerayError, EngineDeadError, EngineError
from scheduler.messages import Deltas, EngineStats

logger = logging.getLogger("eagleray")

POLL_WAIT_S = 5.0
MAX_LOST_POLLS = 2


class Frontend:
    """Requests of one process to one driver. Any thread may call."""

    def __init__(self, driver: Any, is_reachable: Callable[[], bool] = lambda: True) -> None:
        """`is_reachable`: whether this process is still part of the driver's cluster."""
        self._driver = driver
        self._is_reachable = is_reachable
        self._id = uuid.uuid4().hex[:12]
        self._after_news: list[Callable[[], None]] = []
        # Ray cancels what a canceled call of an actor has called: in a served replica, the news
        # that a request has been canceled. A call from a thread of its own belongs to no other.
        self._sender = ThreadPoolExecutor(1, "eagleray-finish")
        self._active: dict[str, tuple[Generation, OutputFollower]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._acknowledged = 0
        self._thread = threading.Thread(target=self._poll_loop, name="eagleray-poll", daemon=True)
        self._thread.start()

    def submit(self, generations: list[Generation]) -> None:
        """Send the requests of these generations, all or none. Raises `RequestError`,
        `EngineDeadError`.
        """
        requests = [request for generation in generations for request in generation.requests]
        with self._changed:
            self._check_reachable()
            for generation in generations:
                for output in generation.outputs:
                    self._active[output.request.request_id] = (generation, output)
        submitted: Any = None
        try:
            submitted = self._driver.submit.remote(self._id, requests)
            call(submitted, "submit requests")
        except BaseException as error:
            self._forget(generations)
            if isinstance(error, NoAnswerError) or not isinstance(error, EaglerayError):
                # The driver may still take them.
                self._finish([r.request_id for r in requests], "abort", after=submitted)
            raise
        with self._changed:
            self._changed.notify_all()

    def abort(self, generations: list[Generation]) -> None:
        """End generations; they keep what they have, with `finish_reason` "abort". Does not wait
        for the engine.
        """
        with self._changed:
            outputs = [
                o for g in generations for o in g.outputs if o.completion.finish_reason is None
            ]
            for output in outputs:
                output.abort()
            for generation in generations:
                generation.end()
            self._forget(generations)
        self._news_handled()
        self._finish([output.request.request_id for output in outputs], "abort")

    def after_news(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each batch of news, on the thread that handled it."""
        self._after_news.append(callback)

    def stats(self) -> EngineStats:
        """The driver's counters. Raises `EngineDeadError`."""
        self._check_reachable()
        counters: EngineStats = call(self._driver.stats.remote(), "read the counters")
        return counters

    def close(self) -> None:
        """Stop polling; outstanding requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._sender.shutdown(wait=False)
        self._fail_all(EngineDeadError("the engine was shut down"))

    def join(self, limit_s: float) -> None:
        """Wait for the polling thread after `close`, once the driver is gone."""
        self._thread.join(limit_s)

    def _check_reachable(self) -> None:
        """Guards calls to an actor: they would start a new Ray if ours has been shut down."""
        if self._closed or not self._is_reachable():
            raise EngineDeadError("the engine was shut down; start a new one")

    def _finish(self, request_ids: list[str], reason: str, after: Any = None) -> None:
        """Tell the driver that these requests are no longer needed, once the call `after` has
        ended. Does not wait.
        """
        if request_ids and not self._closed and self._is_reachable():
            finish = self._driver.finish.remote
            with contextlib.suppress(RuntimeError):  # closed just now
                self._sender.submit(finish, request_ids, reason, self._id, after)

    def _forget(self, generations: list[Generation]) -> None:
        with self._changed:
            for generation in generations:
                for request_id in generation.request_ids:
                    self._active.pop(request_id, None)

    # -- polling thread ----------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        try:
            self._poll_while_open()
        finally:  # whatever ended the loop, nobody may keep waiting
            self.close()

    def _poll_while_open(self) -> None:
        num_lost = 0
        while self._wait_for_work():
            try:
                self._check_reachable()
                reply = self._driver.poll.remote(self._id, self._acknowledged, POLL_WAIT_S)
                limit_s = POLL_WAIT_S + CALL_TIMEOUT_S
                deltas: Deltas = pickle.loads(call(reply, "poll the driver", limit_s))
                self._acknowledged = deltas.up_to
                self._take(deltas)
                num_lost = 0
            except NoAnswerError as error:
                num_lost += 1  # a lost reply loses nothing: the next poll brings its content again
                if num_lost > MAX_LOST_POLLS:
                    self._fail_all(error)
            except EaglerayError as error:
                self._fail_all(error)
            except Exception as error:  # a bug here must not leave callers waiting
                logger.exception("the polling thread failed")
                self._fail_all(_frontend_failed(error))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not self._active and not self._closed:
                self._changed.wait()
            return not self._closed

    def _take(self, deltas: Deltas) -> None:
        stopped: list[str] = []
        failed: list[str] = []
        for request_id, news in unpack(deltas):
            with self._changed:
                entry = self._active.get(request_id)
                if entry is None:
                    continue  # repeated, or aborted in the meantime
                generation, output = entry
                try:
                    if generation.take(output, news):
                        stopped.append(request_id)
                except Exception as error:  # from a sink or a tokenizer; other requests go on
                    logger.exception("request %s failed in the frontend", request_id)
                    generation.fail(_frontend_failed(error))
                    failed += generation.request_ids
                    self._forget([generation])
                if output.completion.finish_reason is not None:
                    self._active.pop(request_id, None)
        self._news_handled()
        self._finish(stopped, "stop")
        self._finish(failed, "abort")

    def _fail_all(self, error: EaglerayError) -> None:
        with self._changed:
            generations = {id(g): g for g, _ in self._active.values()}
            self._active.clear()
        for generation in generations.values():
            generation.fail(error)
        self._news_handled()

    def _news_handled(self) -> None:
        for callback in self._after_news:
            callback()


def _frontend_failed(error: Exception) -> EngineError:
    return EngineError(f"the frontend failed: {type(error).__name__}: {error}")
