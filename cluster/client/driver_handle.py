"""The driver of an engine, as one frontend calls it, and the drivers that replace it.

A call that is lost on the way, or finds no room in Ray's object store, is made again: the driver
takes nothing twice. A driver that dies or does not answer is replaced by its owner, and the
requests that it had are sent to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cluster.client.outstanding import OutstandingRequests
from cluster.ray_errors import (
    DriverDiedError,
    LostCallError,
    NoAnswerError,
    NoRoomError,
    cause_of,
    result_of,
    start_call,
    was_lost,
)
from cluster.resources.session import FORKED_MESSAGE
from cluster.timeouts import CALL_TIMEOUT_S, POLL_WAIT_S
from scheduler.errors import EaglerayError, EngineDeadError, OverloadedError
from scheduler.messages import Deltas, Request

logger = logging.getLogger("eagleray")

RETRY_PAUSE_S = 0.2
# A driver that answers after this time has served, although there was no news from it.
MIN_HEALTHY_UPTIME_S = 10.0

ReplaceDriver = Callable[[Any, EaglerayError, bool], Any]


def refuse_replacement(actor: Any, error: EaglerayError, has_been_healthy: bool) -> Any:
    """Stands in for an owner where there is none."""
    if isinstance(error, DriverDiedError):
        raise EngineDeadError(str(error)) from error
    raise error


class DriverHandle:
    """Calls one engine's driver. Any thread may call.

    actor: the present driver. has_been_healthy: whether there was any news from it, or it answered
    for a while. dead_actor: a driver that has died, until the polling thread has dealt with that.
    death_error: why the engine is dead: no driver could be started, or this one's engine has ended.
    """

    def __init__(
        self,
        actor: Any,
        outstanding: OutstandingRequests,
        change_condition: threading.Condition,
        *,
        is_ray_connected: Callable[[], bool],
        replace: ReplaceDriver,
        answer_limit_s: float,
        finishes_after_close: bool,
        recovery_waits_for: Callable[[], str],
    ) -> None:
        """See `Frontend`. `finishes_after_close`: `finish` tells the driver even after `close`."""
        self.actor = actor
        self.has_been_healthy = False
        self.dead_actor: Any = None
        self.death_error: EngineDeadError | None = None
        self.is_closed = False
        self._close_reason = "the engine was shut down; start a new one"
        self._outstanding_requests = outstanding
        self._change_condition = change_condition
        self._is_ray_connected = is_ray_connected
        self._replace = replace
        self._answer_limit_s = answer_limit_s
        self._finishes_after_close = finishes_after_close
        self._recovery_waits_for = recovery_waits_for
        self._frontend_id = uuid.uuid4().hex[:12]
        self._process_id = os.getpid()
        # When a call of an actor is canceled, Ray cancels the calls that it has made: in a served
        # replica, even the message that a request was canceled. A call from a thread of its own
        # belongs to no other call.
        self._send_executor = ThreadPoolExecutor(1, "eagleray-finish")
        self._replace_lock = threading.Lock()
        self._actor_since_s = time.monotonic()
        self._no_room_since_s: float | None = None  # for answers to polls

    def close(self, reason: str = "") -> None:
        """Make no more calls, except those of `finish` with `finishes_after_close`. Who tries to is
        told the reason.
        """
        with self._change_condition:
            self.is_closed = True
            self._close_reason = reason or self._close_reason
            self._change_condition.notify_all()
        if not self._finishes_after_close:
            self._send_executor.shutdown(wait=False)

    def check_not_shut_down(self) -> None:
        """Called before calls to an actor: after Ray was shut down, a call would start a new
        Ray. Raises `EngineDeadError`.
        """
        if os.getpid() != self._process_id:
            raise EngineDeadError(FORKED_MESSAGE)
        if self.is_closed or not self._is_ray_connected():
            raise EngineDeadError(self._close_reason)

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, requests: list[Request], refs: list[Any]) -> None:
        """Send requests to the driver, or to the next one if it has died. The refs of the calls to
        the last one are added to `refs`.
        """
        while True:
            actor = self.actor
            try:
                registration_number = self._submit_to(actor, requests, refs)
                if self._accept(actor, requests, registration_number):
                    return
            except (DriverDiedError, NoAnswerError) as error:
                self.replace_driver(actor, error)
                refs.clear()
            self.check_not_shut_down()

    def poll(self, actor: Any, acknowledged_reply_number: int) -> Deltas | None:
        """What is new, once the driver has what was accepted. None if nothing can be said: the
        answer was lost, and the next one brings its content again; another driver has taken over;
        or this one does not know the frontend. Raises `NoRoomError` if there was no room for
        answers for `answer_limit_s`.
        """
        with self._replace_lock:
            self.check_not_shut_down()
            if actor is not self.actor:
                return None
            if actor is self.dead_actor:
                raise DriverDiedError("the driver has died")
            self._send_lost_requests()
        action, limit_s = "poll the driver", POLL_WAIT_S + self._answer_limit_s
        try:
            arguments = self._frontend_id, acknowledged_reply_number, POLL_WAIT_S
            ref = start_call(actor.poll, action, pickle.dumps(arguments, protocol=5))
            deltas: Deltas | None = pickle.loads(result_of(ref, action, limit_s))
        except LostCallError:
            time.sleep(RETRY_PAUSE_S)
            return None
        except NoRoomError:
            now_s = time.monotonic()
            self._no_room_since_s = self._no_room_since_s or now_s
            if now_s - self._no_room_since_s > self._answer_limit_s:
                self._no_room_since_s = None
                raise
            time.sleep(RETRY_PAUSE_S)
            return None
        self._no_room_since_s = None
        if deltas is None:
            with self._change_condition:
                if actor is self.actor:
                    self._outstanding_requests.note_lost()
        return deltas

    def ask(self, method_name: str, action: str, *arguments: Any) -> Any:
        """The answer of a method of the driver, for a caller who does not wait until a driver that
        has died is replaced. Raises `OverloadedError` meanwhile, `EngineDeadError`,
        `NoAnswerError`.
        """
        self.check_not_shut_down()
        try:
            method = getattr(self.actor, method_name)
            return self._answer(method, action, *arguments, limit_s=CALL_TIMEOUT_S)
        except DriverDiedError:
            if self.death_error is not None or self._replace is refuse_replacement:
                raise
            raise OverloadedError(
                "the driver has died and is being replaced; requests are kept and will continue."
                f" {self._recovery_waits_for()}".rstrip(". ")
            ) from None

    def finish(self, request_ids: list[str], reason: str, submit_refs: Iterable[Any] = ()) -> None:
        """Tell the driver that nobody needs these, once `submit_refs` have ended. Does not wait."""
        if request_ids:
            self._run_on_sender(self._send_finish, self.actor, request_ids, reason, *submit_refs)

    def _accept(self, actor: Any, requests: list[Request], registration_number: int) -> bool:
        """Note that this driver has the requests. False if it has been replaced since, or nobody
        would ask it for news any more.
        """
        with self._change_condition:
            has_them = actor is self.actor and not self.is_closed
            if has_them:
                self._outstanding_requests.accept(requests, registration_number)
            return has_them

    def _submit_to(self, actor: Any, requests: list[Request], refs: list[Any] | None) -> int:
        """Returns the number under which the driver knows this frontend."""
        arguments, limit_s = (self._frontend_id, requests), self._answer_limit_s
        registration_number: int = self._answer(
            actor.submit, "submit requests", *arguments, limit_s=limit_s, refs=refs
        )
        return registration_number

    def _send_lost_requests(self) -> None:
        """Send the driver the accepted requests that it does not have. It takes nothing twice."""
        with self._change_condition:
            requests = self._outstanding_requests.lost_requests()
        if not requests:
            return
        self._accept(self.actor, requests, self._submit_to(self.actor, requests, None))
        request_ids = (request.request_id for request in requests)
        ended_ids = [i for i in request_ids if i not in self._outstanding_requests]
        self.finish(ended_ids, "abort")

    def _answer(
        self,
        method: Any,
        action: str,
        *arguments: Any,
        limit_s: float,
        refs: list[Any] | None = None,
    ) -> Any:
        """The answer of a method of the driver. The ref of each call is added to `refs`."""
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                ref = start_call(method, action, *arguments)
                if refs is not None:
                    refs.append(ref)
                return result_of(ref, action, limit_s)
            except (LostCallError, NoRoomError):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
            self.check_not_shut_down()

    def _run_on_sender(self, make_call: Callable[..., None], *arguments: Any) -> None:
        """Make a call to the driver on the sender's thread."""
        with contextlib.suppress(RuntimeError):  # it was closed just now
            self._send_executor.submit(make_call, *arguments)

    def _send_finish(
        self, actor: Any, request_ids: list[str], reason: str, *submit_refs: Any
    ) -> None:
        is_too_late = self.is_closed and not self._finishes_after_close
        if is_too_late or not self._is_ray_connected():
            return

        def retry_if_lost(finish_future: Future[None]) -> None:
            if was_lost(finish_future) and actor is self.actor:
                self._run_on_sender(self._send_finish, actor, request_ids, reason, *submit_refs)

        finish_future = actor.finish.remote(
            request_ids, reason, self._frontend_id, *submit_refs
        ).future()
        finish_future.add_done_callback(retry_if_lost)

    # -- the end of a driver, and the next one -----------------------------------------------------

    def watch_end(self) -> None:
        """From now on, notice the end of the driver, or of its engine, without requests too."""
        actor = self.actor
        if not self.is_closed and self._is_ray_connected():
            end_future = actor.wait_for_end.remote().future()
            end_future.add_done_callback(lambda end_future: self._note_end(actor, end_future))

    def current_actor(self) -> Any:
        """The present driver; waits while it is being replaced, and while it is sent requests."""
        with self._replace_lock:
            return self.actor

    def live_actor(self) -> Any:
        """As `current_actor`. Raises `EngineDeadError`, also where the driver's process answers but
        its engine has stopped.
        """
        actor = self.current_actor()
        self.check_not_shut_down()
        if self.death_error is not None:
            raise self.death_error
        return actor

    def check(self) -> None:
        """Replace the driver if it does not answer. Raises `EngineDeadError`."""
        if self.death_error is not None:
            raise self.death_error
        self.check_not_shut_down()
        actor = self.actor
        try:
            self._answer(actor.stats, "read the counters", limit_s=self._answer_limit_s)
        except (DriverDiedError, NoAnswerError) as error:
            self.replace_driver(actor, error)
        else:
            self.has_been_healthy |= time.monotonic() - self._actor_since_s > MIN_HEALTHY_UPTIME_S

    def replace_driver(self, actor: Any, error: EaglerayError) -> None:
        """Have the owner replace this driver, unless another thread has done so, and send every
        accepted request again. Raises `EngineDeadError` if there is no new driver.
        """
        with self._replace_lock:
            while self.actor is actor:
                self.check_not_shut_down()
                successor = self._successor(actor, error)
                with self._change_condition:
                    self.check_not_shut_down()
                    self.actor = successor
                    self._outstanding_requests.note_new_driver()
                try:
                    self.watch_end()
                    self._send_lost_requests()
                except (DriverDiedError, NoAnswerError) as failure:
                    actor, error = successor, failure
                except EaglerayError as failure:
                    # The polling thread tries again, and tells whoever waits for them.
                    logger.warning("requests were not sent to the next driver: %s", failure)

    def _successor(self, actor: Any, error: EaglerayError) -> Any:
        """The owner's next driver. Raises `EngineDeadError` if there is none, and keeps it."""
        try:
            successor = self._replace(actor, error, self.has_been_healthy)
        except EngineDeadError as death:
            self.death_error = death
            raise
        self.death_error, self.has_been_healthy = None, False
        self._actor_since_s = time.monotonic()
        return successor

    def _note_end(self, actor: Any, end_future: Future[None]) -> None:
        if was_lost(end_future):
            if actor is self.actor:  # otherwise the next one is watched
                self._run_on_sender(self.watch_end)
            return
        error = end_future.exception()
        cause = cause_of(error) if isinstance(error, Exception) else None
        with self._change_condition:
            if actor is not self.actor:
                return  # it has been replaced meanwhile
            if isinstance(cause, EngineDeadError) and not isinstance(cause, DriverDiedError):
                self.death_error = cause  # its process answers every call with that
            else:
                self.dead_actor = actor
            self._change_condition.notify_all()
