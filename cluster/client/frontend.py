"""The requests of one process to one engine: sent, followed by polling the driver for news, and
ended when nobody needs them any more.

One background thread polls while the driver has requests. News goes to the outputs of the
generation it belongs to, whose sinks run on that thread, or on one that aborts.
`Generation.done_future` completes once, with or without an error. When a driver has died and its
owner has a new one (`DriverHandle`), every unfinished request is sent again, in order of arrival
and with the tokens received so far, and the streams continue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from cluster.client.driver_handle import DriverHandle, ReplaceDriver, refuse_replacement
from cluster.client.outputs import Generation
from cluster.client.outstanding import OutstandingRequests
from cluster.error_kinds import kind_of, reason_of
from cluster.news import unpack
from cluster.ray_errors import DriverDiedError, NoAnswerError
from cluster.timeouts import CALL_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError, EngineLostError
from scheduler.messages import Deltas, EngineStats
from scheduler.records import StepRecord

logger = logging.getLogger("eagleray")

OnDead = Callable[[list[Generation], EaglerayError], None]


class Frontend:
    """Requests of one process to one engine. Any thread may call.

    driver_handle: the present driver, to be asked about its life and death.
    """

    thread_class: type[threading.Thread] = threading.Thread

    def __init__(
        self,
        actor: Any,
        is_ray_connected: Callable[[], bool] = lambda: True,
        replace: ReplaceDriver = refuse_replacement,
        answer_limit_s: float = CALL_TIMEOUT_S,
        on_dead: OnDead | None = None,
        recovery_waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        """`actor`: the driver. `is_ray_connected`: whether this process is still part of the
        driver's cluster. `replace` takes a driver that has died or does not answer, the reason, and
        whether it has been healthy; it returns a new driver, or raises. `answer_limit_s`:
        how long the driver may take beyond what it was asked to wait. `on_dead` gets the requests
        that the driver had, and the reason, if there will be no other driver, and this frontend is
        closed; without it they fail. It runs on the polling thread. With it, the engine is somebody
        else's and outlives this frontend, so it is told of every request that it no longer needs to
        run, even after `close`. `recovery_waits_for`: what the replacement of a driver waits for,
        in one line.
        """
        self._on_dead = on_dead
        self._news_callbacks: list[Callable[[], None]] = []
        self._change_condition = threading.Condition()
        self._outstanding_requests = OutstandingRequests(self._change_condition)
        self.driver_handle = DriverHandle(
            actor,
            self._outstanding_requests,
            self._change_condition,
            is_ray_connected=is_ray_connected,
            replace=replace,
            answer_limit_s=answer_limit_s,
            finishes_after_close=on_dead is not None,
            recovery_waits_for=recovery_waits_for,
        )
        self._last_reply: tuple[Any, int] = (actor, 0)  # a driver, and the number of its last reply
        self._thread = self.thread_class(target=self._poll_loop, name="eagleray-poll", daemon=True)
        self._thread.start()

    def submit(self, generations: list[Generation]) -> None:
        """Send the requests of these generations, all or none, with the tokens they have. Raises
        `RequestError`, `EngineDeadError`, `OverloadedError`.
        """
        requests = [o.continued_request() for g in generations for o in g.unfinished_outputs]
        with self._change_condition:
            self.driver_handle.check_not_shut_down()
            self._outstanding_requests.add(generations)
        refs: list[Any] = []
        try:
            self.driver_handle.submit(requests, refs)
        except BaseException as error:
            self._outstanding_requests.forget(generations)
            is_permanent_error = (
                isinstance(error, EaglerayError) and not kind_of(error).is_transient
            )
            must_abort_after_close = self.driver_handle.is_closed and self._on_dead is not None
            # The driver may have them, or receive them later.
            if not is_permanent_error or must_abort_after_close:
                request_ids = [request.request_id for request in requests]
                # Ray drops the second if a call was lost.
                self.driver_handle.finish(request_ids, "abort")
                self.driver_handle.finish(request_ids, "abort", submit_refs=refs)
            raise

    def abort(self, generations: list[Generation], error: EaglerayError | None = None) -> None:
        """End generations; they keep what they have, with the reason "abort" or with `error`. Does
        not wait.
        """
        with self._change_condition:
            outputs = [output for g in generations for output in g.unfinished_outputs]
            for generation in generations:
                generation.abort(error)
            self._outstanding_requests.forget(generations)
        self._run_news_callbacks()
        self.driver_handle.finish([output.request.request_id for output in outputs], "abort")

    def finish(self, generations: list[Generation]) -> None:
        """Tell the driver that nobody needs these generations. Does not wait."""
        self.driver_handle.finish([i for g in generations for i in g.request_ids], "abort")

    def add_news_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each batch of news, on the thread that handled it."""
        self._news_callbacks.append(callback)

    def stats(self) -> EngineStats:
        """The driver's counters. Raises `OverloadedError` while the driver is replaced,
        `EngineDeadError`, `NoAnswerError`.
        """
        counters: EngineStats = self.driver_handle.ask("stats", "read the counters")
        return counters

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`. Raises as `stats`."""
        records: list[StepRecord] = self.driver_handle.ask("records", "read the records", seconds)
        return records

    def close(self) -> None:
        """Stop polling; outstanding requests fail."""
        self.driver_handle.close()
        self._fail_outstanding(EngineDeadError("the engine was shut down"))

    def join(self, limit_s: float) -> None:
        """Wait for the polling thread after `close`, once the driver is gone."""
        self._thread.join(limit_s)

    # -- polling thread ----------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        try:
            while self._wait_for_work():
                self.poll()
            death = self.driver_handle.death_error
            if death is not None and not self.driver_handle.is_closed:
                self._hand_over(death)
        finally:  # whatever ended the loop, no caller may wait any longer
            self.close()

    def _wait_for_work(self) -> bool:
        """Wait until there is a reason to poll. False after `close`, and where `on_dead` is to hear
        that the engine has stopped.
        """
        driver_handle = self.driver_handle
        with self._change_condition:
            while not (
                self._outstanding_requests.has_accepted_requests
                or driver_handle.actor is driver_handle.dead_actor
            ):
                has_stopped = self._on_dead is not None and driver_handle.death_error is not None
                if driver_handle.is_closed or has_stopped:
                    return False
                self._change_condition.wait()
            return not driver_handle.is_closed

    def poll(self) -> None:
        """Ask the driver once, and pass on what is new. Only the polling thread calls it."""
        actor = self.driver_handle.current_actor()
        polled_driver, acknowledged_reply_number = self._last_reply
        try:
            deltas = self.driver_handle.poll(
                actor, acknowledged_reply_number if polled_driver is actor else 0
            )
            if deltas is None or actor is not self.driver_handle.actor:
                return  # there is nothing to deliver, or the next driver has the requests
            self._last_reply = (actor, deltas.reply_number)
            self.driver_handle.has_been_healthy |= bool(deltas.request_ids)
            self._deliver(deltas)
            lost_error = _lost_error_in(deltas)
            if lost_error is not None and self._on_dead is not None:
                self._hand_over(lost_error)
        except (DriverDiedError, NoAnswerError) as error:
            self._replace_or_fail(actor, error)
        except EaglerayError as error:
            if actor is not self.driver_handle.actor:
                pass  # the next one has what is outstanding
            elif isinstance(error, EngineLostError) and self._on_dead is not None:
                self._hand_over(error)
            else:
                self._fail_outstanding(error)
        except Exception as error:  # a bug here must not leave callers waiting
            logger.exception("the polling thread failed")
            self._fail_outstanding(_frontend_error(error))

    def _replace_or_fail(self, actor: Any, error: EaglerayError) -> None:
        try:
            self.driver_handle.replace_driver(actor, error)
        except Exception as caught_error:
            failure = caught_error
            if not isinstance(failure, EaglerayError):  # a bug must not leave callers waiting
                logger.exception("the driver could not be replaced")
                failure = _frontend_error(caught_error)
            with self._change_condition:
                # No other will come; without `on_dead` a new request tries again.
                self.driver_handle.dead_actor = None
            if self._on_dead is None:
                self._fail_outstanding(failure)
            else:
                self._hand_over(failure, may_still_run=not isinstance(error, DriverDiedError))

    def _hand_over(self, error: EaglerayError, *, may_still_run: bool = False) -> None:
        """Close this frontend, and give what the driver had to `on_dead`. What a thread is sending
        now is not accepted any more: that thread sends it elsewhere.
        """
        assert self._on_dead is not None
        self.driver_handle.close(str(error))
        generations = self._outstanding_requests.take(only_accepted=True)
        if may_still_run:
            self.finish(generations)
        self._on_dead(generations, error)

    def _deliver(self, deltas: Deltas) -> None:
        """Pass news on to the outputs."""
        stopped_request_ids: list[str] = []
        failed_request_ids: list[str] = []
        may_move = self._on_dead is not None and _lost_error_in(deltas) is not None
        for request_id, news in unpack(deltas):
            if may_move and isinstance(news.error, EngineLostError):
                news.error = news.finish_reason = None  # it goes on with the tokens it has
            with self._change_condition:
                outstanding = self._outstanding_requests.get(request_id)
                if outstanding is None:
                    continue  # repeated, or aborted in the meantime
                generation, output = outstanding.generation, outstanding.output
                try:
                    if generation.take(output, news):
                        stopped_request_ids.append(request_id)
                except Exception as error:  # from a sink or a tokenizer; other requests go on
                    logger.exception("request %s failed in the frontend", request_id)
                    generation.fail(_frontend_error(error))
                    failed_request_ids.append(request_id)
                if output.has_ended:
                    self._outstanding_requests.pop(request_id, None)
                if generation.has_failed:  # with it, all its outputs
                    failed_request_ids += (
                        i for i in generation.request_ids if i in self._outstanding_requests
                    )
                    self._outstanding_requests.forget([generation])
        self._run_news_callbacks()
        self.driver_handle.finish(stopped_request_ids, "stop")
        self.driver_handle.finish(failed_request_ids, "abort")

    def _fail_outstanding(self, error: EaglerayError) -> None:
        """Fail what is outstanding; where requests can go elsewhere, only what the driver has."""
        generations = self._outstanding_requests.take(only_accepted=self._on_dead is not None)
        for generation in generations:
            generation.fail(error)
        self._run_news_callbacks()
        self.finish(generations)  # the driver may be alive

    def _run_news_callbacks(self) -> None:
        for callback in self._news_callbacks:
            callback()


def _lost_error_in(deltas: Deltas) -> EngineLostError | None:
    """Why the engine of a driver that answers is lost, though its requests could run elsewhere."""
    losses = (error for error in deltas.errors.values() if isinstance(error, EngineLostError))
    return next(losses, None)


def _frontend_error(error: Exception) -> EngineError:
    return EngineError(f"the frontend failed: {reason_of(error)}")
