"""The driver's record of its frontends: their requests, what is new for each, and which have gone
silent.

Event loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    mailbox: Mailbox = field(default_factory=Mailbox)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    last_seen_s: float = field(default_factory=time.monotonic)
    num_polls: int = 0  # polls that wait for news now
    request_ids: set[str] = field(default_factory=set)  # unfinished

    def fail(self, request_ids: list[str], error: EaglerayError) -> None:
        for request_id in request_ids:
            news = News(first_index=0, finish_reason="error", error=error)
            self.mailbox.put(request_id, news)
        self.request_ids.difference_update(request_ids)
        self.has_news.set()


class Frontends:
    """Every frontend that has called recently."""

    make_frontend: type[_Frontend] = _Frontend

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the silence after which a frontend's requests are aborted; after twice that
        time the frontend is forgotten.
        """
        self._timeout_s = timeout_s
        self._frontends: dict[str, _Frontend] = {}
        self._looked_s = time.monotonic()

    def admit(
        self, frontend_id: str, requests: list[Request], limits: SchedulerLimits
    ) -> list[Request]:
        """Note the requests of a frontend, all or none. Returns those to queue, without any that it
        has sent before: it may send requests again if it did not get an answer. Raises
        `RequestError` for one that cannot run.
        """
        fresh: dict[str, Request] = {}
        for request in requests:
            request_id = request.request_id
            if self._has(frontend_id, request_id):
                continue
            check_request(request, limits)
            if request_id in fresh or self._is_running(request_id):
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            fresh[request_id] = request
        self._seen(frontend_id).request_ids.update(fresh)
        return list(fresh.values())

    def remove(self, frontend_id: str, request_ids: list[str]) -> None:
        """A frontend no longer needs these requests."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None:
            frontend.request_ids.difference_update(request_ids)
            for request_id in request_ids:
                frontend.mailbox.drop(request_id)

    async def collect(self, frontend_id: str, acknowledged: int, wait_s: float) -> Deltas:
        """Everything new for a frontend as soon as there is something, or nothing after `wait_s`.

        Raises `EngineError` for a frontend that was silent for so long that it was forgotten: it
        polls because it has requests, and these have been aborted.
        """
        if frontend_id not in self._frontends:
            raise EngineError(
                f"this frontend did not poll for {2 * self._timeout_s:g} s, so its requests were"
                " aborted"
            )
        frontend = self._seen(frontend_id)
        if not frontend.mailbox.has_news:
            frontend.has_news.clear()
            frontend.num_polls += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(frontend.has_news.wait(), wait_s)
            finally:
                frontend.num_polls -= 1
        frontend.last_seen_s = time.monotonic()
        return frontend.mailbox.collect(acknowledged)

    def deliver(self, news: NewsByFrontend) -> None:
        """Put the news of a step into the mailboxes and wake the polls that wait for them."""
        for frontend_id, by_request in news.items():
            frontend = self._frontends.get(frontend_id)
            if frontend is None:
                continue  # it went silent and its requests were aborted
            for request_id, item in by_request.items():
                frontend.mailbox.put(request_id, item)
                if item.finish_reason:
                    frontend.request_ids.discard(request_id)
            frontend.has_news.set()

    def fail_all(self, error: EaglerayError) -> None:
        """End every unfinished request with an error."""
        for frontend in self._frontends.values():
            frontend.fail(list(frontend.request_ids), error)

    def drop_silent(self) -> dict[str, list[str]]:
        """Fail the requests of frontends that have stopped polling; returns those requests by
        frontend.
        """
        dropped = {}
        now_s = time.monotonic()
        # While this process was stopped, it could hear nobody: that does not count as silence.
        has_stalled = now_s - self._looked_s > max(2.0, self._timeout_s / 2)
        self._looked_s = now_s
        for frontend_id, frontend in list(self._frontends.items()):
            if has_stalled or frontend.num_polls:
                frontend.last_seen_s = now_s
            silent_s = now_s - frontend.last_seen_s
            if silent_s > self._timeout_s and frontend.request_ids:
                dropped[frontend_id] = list(frontend.request_ids)
                message = (
                    f"this frontend did not poll for {self._timeout_s:g} s, so its requests were"
                    " aborted"
                )
                frontend.fail(dropped[frontend_id], EngineError(message))
            elif silent_s > 2 * self._timeout_s:  # it has had time to come back for its news
                del self._frontends[frontend_id]
        return dropped

    def _has(self, frontend_id: str, request_id: str) -> bool:
        """Whether this frontend has sent this request already, and can still get its news."""
        frontend = self._frontends.get(frontend_id)
        return frontend is not None and (
            request_id in frontend.request_ids or frontend.mailbox.holds(request_id)
        )

    def _is_running(self, request_id: str) -> bool:
        return any(request_id in frontend.request_ids for frontend in self._frontends.values())

    def _seen(self, frontend_id: str) -> _Frontend:
        frontend = self._frontends.setdefault(frontend_id, self.make_frontend())
        frontend.last_seen_s = time.monotonic()
        return frontend
