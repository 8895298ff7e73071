"""The driver's record of its frontends: the requests and news of each, and which have gone silent.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field

from cluster.client.news import News
from cluster.engine.loop import NewsByFrontend
from cluster.engine.mailbox import Mailbox
from scheduler.errors import EaglerayError, EngineError, RequestError
from scheduler.limits import SchedulerLimits, check_request
from scheduler.messages import Deltas, Request


@dataclass(slots=True)
class _Frontend:
    record_number: int
    mailbox: Mailbox = field(default_factory=Mailbox)
    news_event: asyncio.Event = field(default_factory=asyncio.Event)
    last_call_s: float = field(default_factory=time.monotonic)
    num_waiting_polls: int = 0
    request_ids: set[str] = field(default_factory=set)  # unfinished

    def fail(self, request_ids: list[str], error: EaglerayError) -> None:
        for request_id in request_ids:
            news = News(first_index=0, finish_reason="error", error=error)
            self.mailbox.put(request_id, news)
        self.request_ids.difference_update(request_ids)
        self.news_event.set()


class Frontends:
    """Every frontend that has called recently."""

    make_frontend: type[_Frontend] = _Frontend

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the silence after which a frontend's requests are aborted; after twice that
        time the frontend is forgotten.
        """
        self._timeout_s = timeout_s
        self._frontends: dict[str, _Frontend] = {}
        self._record_numbers = itertools.count(1)
        self._silence_checked_s = time.monotonic()

    def record_requests(
        self, frontend_id: str, requests: list[Request], limits: SchedulerLimits
    ) -> list[Request]:
        """Record the requests of a frontend, all or none. Returns those to queue: without any that
        it has sent before, since it sends requests again if it got no answer. Raises `RequestError`
        for one that cannot run.
        """
        new_requests: dict[str, Request] = {}
        for request in requests:
            request_id = request.request_id
            if self._was_sent_before(frontend_id, request_id):
                continue
            check_request(request, limits)
            if request_id in new_requests or self._is_running(request_id):
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            new_requests[request_id] = request
        self._record_call(frontend_id).request_ids.update(new_requests)
        return list(new_requests.values())

    def record_number(self, frontend_id: str) -> int:
        """Of a frontend that has called. Another one than before says that it was forgotten
        meanwhile, with the requests that it had.
        """
        return self._frontends[frontend_id].record_number

    def remove(self, frontend_id: str, request_ids: list[str]) -> None:
        """Forget requests that a frontend no longer needs."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None:
            frontend.request_ids.difference_update(request_ids)
            for request_id in request_ids:
                frontend.mailbox.drop(request_id)

    async def collect(
        self, frontend_id: str, acknowledged_reply_number: int, wait_s: float
    ) -> Deltas:
        """All news for a frontend as soon as there is any; empty after `wait_s`.

        Raises `EngineError` for a frontend that was silent for so long that it was forgotten: its
        requests have been aborted.
        """
        if frontend_id not in self._frontends:
            raise _silence_error(2 * self._timeout_s)
        frontend = self._record_call(frontend_id)
        if not frontend.mailbox.has_news:
            frontend.news_event.clear()
            frontend.num_waiting_polls += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(frontend.news_event.wait(), wait_s)
            finally:
                frontend.num_waiting_polls -= 1
        frontend.last_call_s = time.monotonic()
        return frontend.mailbox.collect(acknowledged_reply_number)

    def deliver(self, news: NewsByFrontend) -> None:
        """Put the news of a step into the mailboxes and wake the polls that wait for them."""
        for frontend_id, frontend_news in news.items():
            frontend = self._frontends.get(frontend_id)
            if frontend is None:
                continue  # it went silent and its requests were aborted
            for request_id, request_news in frontend_news.items():
                if request_id not in frontend.request_ids:
                    continue  # it has failed, or the frontend has ended it
                frontend.mailbox.put(request_id, request_news)
                if request_news.finish_reason:
                    frontend.request_ids.discard(request_id)
            frontend.news_event.set()

    def fail_all(self, error: EaglerayError) -> None:
        """End every unfinished request with an error."""
        for frontend in self._frontends.values():
            frontend.fail(list(frontend.request_ids), error)

    def fail_silent_frontends(self) -> dict[str, list[str]]:
        """Fail the requests of frontends that have stopped polling; returns them by frontend."""
        failed_ids = {}
        now_s = time.monotonic()
        # While this process was stopped, it could hear nobody: that does not count as silence.
        has_driver_stalled = now_s - self._silence_checked_s > max(2.0, self._timeout_s / 2)
        self._silence_checked_s = now_s
        for frontend_id, frontend in list(self._frontends.items()):
            if has_driver_stalled or frontend.num_waiting_polls:
                frontend.last_call_s = now_s
            silence_s = now_s - frontend.last_call_s
            if silence_s > self._timeout_s and frontend.request_ids:
                failed_ids[frontend_id] = list(frontend.request_ids)
                frontend.fail(failed_ids[frontend_id], _silence_error(self._timeout_s))
            elif silence_s > 2 * self._timeout_s:  # it has had time to come back for its news
                del self._frontends[frontend_id]
        return failed_ids

    def _was_sent_before(self, frontend_id: str, request_id: str) -> bool:
        """Whether this frontend sent this request before and can still get its news."""
        frontend = self._frontends.get(frontend_id)
        return frontend is not None and (
            request_id in frontend.request_ids or frontend.mailbox.holds(request_id)
        )

    def _is_running(self, request_id: str) -> bool:
        return any(request_id in frontend.request_ids for frontend in self._frontends.values())

    def _record_call(self, frontend_id: str) -> _Frontend:
        """The record of a frontend that calls now, made for a new one."""
        frontend = self._frontends.get(frontend_id)
        if frontend is None:
            frontend = self.make_frontend(next(self._record_numbers))
            self._frontends[frontend_id] = frontend
        frontend.last_call_s = time.monotonic()
        return frontend


def _silence_error(seconds: float) -> EngineError:
    return EngineError(
        f"this frontend did not poll for {seconds:g} s, so its requests were aborted"
    )
