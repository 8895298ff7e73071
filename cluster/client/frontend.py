"""The client's connection to the driver: sends requests, polls for news, and ends requests that
nobody needs any more.

One background thread polls while anything is outstanding. News goes to the outputs of the
generation it belongs to, whose sinks run on that thread. `Generation.done` completes once, with or
without an error.

A frontend holds each request with all tokens it has received. When the driver has died and its
owner has a new one (`replace`), it sends every unfinished request again, in order of arrival and
with its tokens, and the streams continue.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cluster.client.news import unpack
from cluster.client.outputs import Generation, OutputFollower
from cluster.error_kinds import kind_of, reason_of
from cluster.ray_errors import (
    DriverDiedError,
    LostCallError,
    NoAnswerError,
    NoRoomError,
    call,
    cause_of,
    start_call,
    was_lost,
)
from cluster.timeouts import CALL_TIMEOUT_S, POLL_WAIT_S
from scheduler.errors import (
    EaglerayError,
    EngineDeadError,
    EngineError,
    EngineLostError,
    OverloadedError,
)
from scheduler.messages import Deltas, EngineStats, Request
from scheduler.records import StepRecord

logger = logging.getLogger("eagleray")

LOST_CALL_PAUSE_S = 0.2
# A driver that answers after this time has served, although there was no news from it.
SERVED_S = 10.0

Replace = Callable[[Any, EaglerayError, bool], Any]
OnDead = Callable[[list[Generation], EaglerayError], None]


def _cannot_replace(driver: Any, error: EaglerayError, has_served: bool) -> Any:
    if isinstance(error, DriverDiedError):
        raise EngineDeadError(str(error)) from error
    raise error


class Frontend:
    """Requests of one process to one driver. Any thread may call."""

    make_thread: type[threading.Thread] = threading.Thread

    def __init__(
        self,
        driver: Any,
        is_reachable: Callable[[], bool] = lambda: True,
        replace: Replace = _cannot_replace,
        answer_limit_s: float = CALL_TIMEOUT_S,
        on_dead: OnDead | None = None,
        recovery_waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        """`is_reachable`: whether this process is still part of the driver's cluster. `replace`
        takes a driver that has died or does not answer, the reason, and whether there was any news
        from it; it returns a new driver, or raises. `answer_limit_s`: how long the driver may take
        beyond what it was asked to wait. `on_dead` gets the requests that the driver had, and the
        reason, if there will be no other driver; without it they fail. It runs on the polling
        thread. With it, the engine is somebody else's and outlives this frontend, so it is told of
        every request that it no longer needs to run, even after `close`. `recovery_waits_for`: what
        the replacement of a driver waits for, in one line.
        """
        self._driver = driver
        self._is_reachable = is_reachable
        self._replace_driver = replace
        self._answer_limit_s = answer_limit_s
        self._on_dead = on_dead
        self._recovery_waits_for = recovery_waits_for
        self._id = uuid.uuid4().hex[:12]
        self._after_news: list[Callable[[], None]] = []
        # When a call of an actor is canceled, Ray cancels the calls that it has made: in a served
        # replica, even the message that a request was canceled. A call from a thread of its own
        # belongs to no other call.
        self._sender = ThreadPoolExecutor(1, "eagleray-finish")
        self._active: dict[str, tuple[Generation, OutputFollower]] = {}
        self._accepted: set[str] = set()  # requests that the driver has taken
        self._ended: Any = None  # a driver that has died
        self._has_news = False  # from the present driver
        self._driver_since_s = time.monotonic()
        self.death: EngineDeadError | None = (
            None  # why there is no driver, if none could be started
        )
        self._changed = threading.Condition()
        self._reviving = threading.Lock()
        self._closed = False
        self._acknowledged = 0
        self._no_room_since_s: float | None = None  # for answers to polls
        self._thread = self.make_thread(target=self._poll_loop, name="eagleray-poll", daemon=True)
        self._thread.start()

    def submit(self, generations: list[Generation]) -> None:
        """Send the requests of these generations, all or none, with the tokens they have. Raises
        `RequestError`, `EngineDeadError`, `OverloadedError`.
        """
        outputs = [
            (generation, output)
            for generation in generations
            for output in generation.outputs
            if output.completion.finish_reason is None
        ]
        requests = [output.continued() for _, output in outputs]
        with self._changed:
            self._check_reachable()
            for generation, output in outputs:
                self._active[output.request.request_id] = (generation, output)
        submitted: list[Any] = []
        try:
            while not self._accept(self._send(requests, submitted), requests):
                pass  # that driver has been replaced since
        except BaseException as error:
            self._forget(generations)
            has_refused = isinstance(error, EaglerayError) and not kind_of(error).is_transient
            was_closed = self._closed and self._on_dead is not None
            if not has_refused or was_closed:  # the driver may have them, or receive them later
                request_ids = [request.request_id for request in requests]
                self._finish(request_ids, "abort")  # Ray drops the next one if a call was lost
                self._finish(request_ids, "abort", after=submitted)
            raise

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

    def finish(self, generations: list[Generation]) -> None:
        """Tell the driver that nobody needs these generations. Does not wait."""
        self._finish([i for each in generations for i in each.request_ids], "abort")

    def after_news(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each batch of news, on the thread that handled
        it.
        """
        self._after_news.append(callback)

    def stats(self) -> EngineStats:
        """The driver's counters. Raises `OverloadedError` while the driver is replaced,
        `EngineDeadError`, `NoAnswerError`.
        """
        counters: EngineStats = self._ask("stats", "read the counters")
        return counters

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`. Raises as `stats`."""
        records: list[StepRecord] = self._ask("records", "read the records", seconds)
        return records

    def _ask(self, method: str, what: str, *arguments: Any) -> Any:
        """The answer of a method of the driver, for somebody who does not wait until a driver that
        has died is replaced. Raises as `stats`.
        """
        self._check_reachable()
        try:
            return self._call(
                getattr(self._driver, method), what, *arguments, limit_s=CALL_TIMEOUT_S
            )
        except DriverDiedError:
            if self.death is not None or self._replace_driver is _cannot_replace:
                raise
            raise OverloadedError(
                "the driver has died and is being replaced; requests are kept and will continue."
                f" {self._recovery_waits_for()}".rstrip(". ")
            ) from None

    def close(self) -> None:
        """Stop polling; outstanding requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._fail_all(EngineDeadError("the engine was shut down"))
        if self._on_dead is None:
            self._sender.shutdown(wait=False)

    def join(self, limit_s: float) -> None:
        """Wait for the polling thread after `close`, once the driver is gone."""
        self._thread.join(limit_s)

    def _check_reachable(self) -> None:
        """Check before each call to an actor: after Ray was shut down, it would start a new Ray."""
        if self._closed or not self._is_reachable():
            raise EngineDeadError("the engine was shut down; start a new one")

    def _send(self, requests: list[Request], submitted: list[Any]) -> Any:
        """Submit to the driver, or to the next one if it has died. The ref of each call goes to
        `submitted`. Returns the driver that has them.
        """
        while True:
            driver = self._driver
            try:
                self._call_submit(driver, requests, submitted)
                return driver
            except (DriverDiedError, NoAnswerError) as error:
                self._revive(driver, error)
                submitted.clear()
            self._check_reachable()

    def _call(
        self, method: Any, what: str, *arguments: Any, limit_s: float, refs: list[Any] | None = None
    ) -> Any:
        """The answer of a method of the driver, which takes nothing twice: a call that was lost, or
        for which there was no room, is made again. The ref of each call goes to `refs`.
        """
        until = time.monotonic() + limit_s
        while True:
            try:
                ref = start_call(method, what, *arguments)
                if refs is not None:
                    refs.append(ref)
                return call(ref, what, limit_s)
            except (LostCallError, NoRoomError):
                if time.monotonic() > until:
                    raise
                time.sleep(LOST_CALL_PAUSE_S)

    def _call_submit(self, driver: Any, requests: list[Request], submitted: list[Any]) -> None:
        what, limit_s = "submit requests", self._answer_limit_s
        self._call(driver.submit, what, self._id, requests, limit_s=limit_s, refs=submitted)

    def _accept(self, driver: Any, requests: list[Request]) -> bool:
        """Note that the driver has these requests. False if it is no longer the driver."""
        with self._changed:
            if driver is not self._driver:
                return False
            self._accepted.update(r.request_id for r in requests if r.request_id in self._active)
            self._changed.notify_all()
            return True

    def _finish(self, request_ids: list[str], reason: str, after: Iterable[Any] = ()) -> None:
        """Tell the driver that these requests are no longer needed, once the calls `after` have
        ended. Does not wait.
        """
        if request_ids:
            self._on_sender(self._send_finish, self._driver, request_ids, reason, *after)

    def _on_sender(self, make_call: Callable[..., None], *arguments: Any) -> None:
        """Make a call to the driver on the sender's thread."""
        with contextlib.suppress(RuntimeError):  # it was closed just now
            self._sender.submit(make_call, *arguments)

    def _send_finish(self, driver: Any, request_ids: list[str], reason: str, *after: Any) -> None:
        has_ended = self._closed and self._on_dead is None
        if has_ended or not self._is_reachable():
            return

        def make_again_if_lost(ended: Future[None]) -> None:
            if was_lost(ended) and driver is self._driver:
                self._on_sender(self._send_finish, driver, request_ids, reason, *after)

        ended = driver.finish.remote(request_ids, reason, self._id, *after).future()
        ended.add_done_callback(make_again_if_lost)

    def _forget(self, generations: list[Generation]) -> None:
        with self._changed:
            for generation in generations:
                for request_id in generation.request_ids:
                    self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._active.pop(request_id, None)
        self._accepted.discard(request_id)

    # -- a new driver ------------------------------------------------------------------------------

    def follow(self) -> None:
        """From now on, notice the death of the driver, or the end of its engine, even when there
        are no requests.
        """
        self._follow(self._driver)

    def _follow(self, driver: Any) -> None:
        if driver is self._driver and not self._closed and self._is_reachable():
            ended = driver.wait_for_end.remote().future()
            ended.add_done_callback(lambda ended: self._note_end(driver, ended))

    def _note_end(self, driver: Any, ended: Future[None]) -> None:
        if was_lost(ended):
            self._on_sender(self._follow, driver)
            return
        error = ended.exception()
        cause = cause_of(error) if isinstance(error, Exception) else None
        with self._changed:
            if driver is not self._driver:
                return  # it has been replaced meanwhile
            if isinstance(cause, EngineDeadError) and not isinstance(cause, DriverDiedError):
                self.death = cause  # its process answers every call with that
            else:
                self._ended = driver
                self._changed.notify_all()

    def live_driver(self) -> Any:
        """The driver; waits while it is being replaced. Raises `EngineDeadError`, also where its
        process answers but its engine has stopped.
        """
        with self._reviving:
            self._check_reachable()
            if self.death is not None:
                raise self.death
            return self._driver

    def check(self) -> None:
        """Replace the driver if it does not answer. Raises `EngineDeadError`."""
        if self.death is not None:
            raise self.death
        driver = self._driver
        try:
            self._call(driver.stats, "read the counters", limit_s=self._answer_limit_s)
        except (DriverDiedError, NoAnswerError) as error:
            self._revive(driver, error)
        else:
            has_served = time.monotonic() - self._driver_since_s > SERVED_S
            self._has_news = self._has_news or has_served

    def _revive(self, driver: Any, error: EaglerayError) -> None:
        """Have the owner replace this driver, unless another thread has done so, and send every
        accepted request again. Raises `EngineDeadError` if there is no new driver.
        """
        with self._reviving:
            while self._driver is driver:
                self._check_reachable()
                new = self._replaced(driver, error)
                with self._changed:
                    self._check_reachable()
                    self._driver, self._acknowledged = new, 0
                    again = [self._active[i][1] for i in self._active if i in self._accepted]
                try:
                    self.follow()
                    if again:
                        self._call_submit(new, [output.continued() for output in again], [])
                except (DriverDiedError, NoAnswerError) as failure:
                    driver, error = new, failure
                else:
                    ids = (output.request.request_id for output in again)
                    self._finish([i for i in ids if i not in self._active], "abort")

    def _replaced(self, driver: Any, error: EaglerayError) -> Any:
        """The owner's next driver. Raises `EngineDeadError` if there is none, and keeps it."""
        try:
            new = self._replace_driver(driver, error, self._has_news)
        except EngineDeadError as death:
            self.death = death
            raise
        self.death, self._has_news = None, False
        self._driver_since_s = time.monotonic()
        return new

    # -- polling thread ----------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        try:
            self._poll_while_open()
        finally:  # whatever ended the loop, no caller may wait any longer
            self.close()

    def _poll_while_open(self) -> None:
        while self._wait_for_work():
            self.poll()

    def poll(self) -> None:
        """Ask the driver once, and pass on what is new. Only the polling thread calls it."""
        with self._reviving:  # what is outstanding has been sent to this driver
            driver, acknowledged = self._driver, self._acknowledged
        try:
            self._check_reachable()
            if driver is self._ended:
                raise DriverDiedError("the driver has died")
            reply = start_call(driver.poll, "poll the driver", self._id, acknowledged, POLL_WAIT_S)
            limit_s = POLL_WAIT_S + self._answer_limit_s
            deltas: Deltas = pickle.loads(call(reply, "poll the driver", limit_s))
            self._no_room_since_s = None
            if driver is self._driver:  # otherwise its requests were sent to the next one
                self._acknowledged = deltas.up_to
                self._has_news = self._has_news or bool(deltas.request_ids)
                self._take(deltas)
                loss = self._loss_in(deltas)
                if loss is not None and self._on_dead is not None:
                    self._on_dead(self._take_accepted(), loss)
        except LostCallError:  # nothing is lost: the next poll brings its content again
            time.sleep(LOST_CALL_PAUSE_S)
        except NoRoomError as error:
            self._wait_for_room(error)
        except (DriverDiedError, NoAnswerError) as error:
            self._revive_or_fail(driver, error)
        except EaglerayError as error:
            self._fail_all(error)
        except Exception as error:  # a bug here must not leave callers waiting
            logger.exception("the polling thread failed")
            self._fail_all(_frontend_failed(error))

    def _wait_for_room(self, error: NoRoomError) -> None:
        """An answer did not arrive because the object store is full. The next poll brings its
        content again, but the requests do not wait for ever.
        """
        now_s = time.monotonic()
        self._no_room_since_s = self._no_room_since_s or now_s
        if now_s - self._no_room_since_s > self._answer_limit_s:
            self._no_room_since_s = None
            self._fail_all(error)
        else:
            time.sleep(LOST_CALL_PAUSE_S)

    def _revive_or_fail(self, driver: Any, error: EaglerayError) -> None:
        try:
            self._revive(driver, error)
        except Exception as raised:
            failure = raised
            if not isinstance(failure, EaglerayError):  # a bug must not leave callers waiting
                logger.exception("the driver could not be replaced")
                failure = _frontend_failed(raised)
            with self._changed:
                self._ended = None  # there will be no other driver; a new request tries again
            if self._on_dead is None:
                self._fail_all(failure)
            else:
                generations = self._take_accepted()
                if not isinstance(error, DriverDiedError):  # it may still run them
                    self.finish(generations)
                self._on_dead(generations, failure)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._accepted or self._driver is self._ended or self._closed):
                self._changed.wait()
            return not self._closed

    def _take(self, deltas: Deltas) -> None:
        stopped: list[str] = []
        failed: list[str] = []
        moves = self._loss_in(deltas) is not None
        for request_id, news in unpack(deltas):
            if moves and isinstance(news.error, EngineLostError):
                news.error = news.finish_reason = None  # it goes on with the tokens it has
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
                    failed.append(request_id)
                if output.completion.finish_reason is not None:
                    self._drop(request_id)
                if generation.has_failed:  # with it, all its outputs
                    failed += (i for i in generation.request_ids if i in self._active)
                    self._forget([generation])
        self._news_handled()
        self._finish(stopped, "stop")
        self._finish(failed, "abort")

    def _loss_in(self, deltas: Deltas) -> EngineLostError | None:
        """Why the engine of a driver that answers is lost, where its requests can move to another
        one.
        """
        if self._on_dead is None:
            return None
        losses = (error for error in deltas.errors.values() if isinstance(error, EngineLostError))
        return next(losses, None)

    def _take_accepted(self) -> list[Generation]:
        """Take the generations that the driver had; they are no longer followed."""
        with self._changed:
            accepted = {id(g): g for i, (g, _) in self._active.items() if i in self._accepted}
            self._forget(list(accepted.values()))
        return list(accepted.values())

    def _fail_all(self, error: EaglerayError) -> None:
        if self._on_dead is not None:  # requests being submitted may still go elsewhere
            generations = self._take_accepted()
            request_ids = [i for generation in generations for i in generation.request_ids]
        else:
            with self._changed:
                generations = list({id(g): g for g, _ in self._active.values()}.values())
                request_ids = list(self._active)
                self._active.clear()
                self._accepted.clear()
        for generation in generations:
            generation.fail(error)
        self._news_handled()
        self._finish(request_ids, "abort")  # the driver may be alive

    def _news_handled(self) -> None:
        for callback in self._after_news:
            callback()


def _frontend_failed(error: Exception) -> EngineError:
    return EngineError(f"the frontend failed: {reason_of(error)}")
