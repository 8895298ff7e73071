"""The driver's records of its frontends: the requests and news of each, and which are silent.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field

from cluster.engine.loop import NewsByFrontend
from cluster.engine.mailbox import Mailbox
from cluster.news import News
from scheduler.errors import EaglerayError, id_in_use_error
from scheduler.limits import SchedulerLimits, check_request
from scheduler.messages import Deltas, Request


@dataclass(slots=True)
class _FrontendRecord:
    frontend_id: str
    mailbox: Mailbox = field(default_factory=Mailbox)
    news_event: asyncio.Event = field(default_factory=asyncio.Event)
    silent_since_s: float = field(default_factory=time.monotonic)  # its last submit or poll
    num_waiting_polls: int = 0
    request_ids: set[str] = field(default_factory=set)  # unfinished


class FrontendRecords:
    """One record per frontend that has called recently, under the number of its registration. A
    frontend that comes back after it was forgotten is registered anew under another number, by
    which it learns that its requests are gone.
    """

    make_record: type[_FrontendRecord] = _FrontendRecord

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the silence after which a frontend is forgotten with its requests."""
        self._timeout_s = timeout_s
        self._frontends: dict[int, _FrontendRecord] = {}  # by registration number
        self._registration_numbers: dict[str, int] = {}  # by frontend id
        self._new_numbers = itertools.count()
        self._silence_checked_at_s = time.monotonic()

    def register_requests(
        self, frontend_id: str, requests: list[Request], limits: SchedulerLimits
    ) -> tuple[int, list[Request]]:
        """Register the requests of a frontend, all or none. Returns the number under which it is
        known, and the requests to queue: without any that it has sent before, since it sends
        requests again if it got no answer. Raises `RequestError` for one that cannot run.
        """
        new_requests: dict[str, Request] = {}
        checked_prompt_keys: set[tuple[int, int]] = set()  # outputs of one prompt share its tokens
        for request in requests:
            request_id = request.request_id
            if self._was_sent_before(frontend_id, request_id):
                continue
            prompt_key = id(request.token_ids), request.num_prompt_tokens
            if prompt_key not in checked_prompt_keys:
                check_request(request, limits)
                checked_prompt_keys.add(prompt_key)
            if request_id in new_requests or self._is_unfinished(request_id):
                raise id_in_use_error(request_id)
            new_requests[request_id] = request
        if frontend_id not in self._registration_numbers:
            self._registration_numbers[frontend_id] = next(self._new_numbers)
            self._frontends[self._registration_numbers[frontend_id]] = self.make_record(frontend_id)
        registration_number = self._registration_numbers[frontend_id]
        frontend = self._frontends[registration_number]
        frontend.silent_since_s = time.monotonic()
        frontend.request_ids.update(new_requests)
        return registration_number, list(new_requests.values())

    def remove(self, frontend_id: str, request_ids: list[str]) -> None:
        """Forget requests that a frontend no longer needs."""
        frontend = self._frontend(frontend_id)
        if frontend is not None:
            frontend.request_ids.difference_update(request_ids)
            for request_id in request_ids:
                frontend.mailbox.drop(request_id)

    async def collect(
        self, frontend_id: str, acknowledged_reply_number: int, wait_s: float
    ) -> Deltas | None:
        """All news for a frontend as soon as there is any; empty after `wait_s`. None for one that
        is not known: it has no requests here, or not any more.
        """
        frontend = self._frontend(frontend_id)
        if frontend is None:
            return None
        frontend.silent_since_s = time.monotonic()
        if not frontend.mailbox.has_news:
            frontend.news_event.clear()
            frontend.num_waiting_polls += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(frontend.news_event.wait(), wait_s)
            finally:
                frontend.num_waiting_polls -= 1
        frontend.silent_since_s = time.monotonic()
        return frontend.mailbox.collect(acknowledged_reply_number)

    def deliver(self, news: NewsByFrontend) -> None:
        """Put the news of a step into the mailboxes and wake the polls that wait for them."""
        for registration_number, frontend_news in news.items():
            frontend = self._frontends.get(registration_number)
            if frontend is None:
                continue  # it went silent and was forgotten
            for request_id, request_news in frontend_news.items():
                if request_id not in frontend.request_ids:
                    continue  # the frontend has ended it
                frontend.mailbox.put(request_id, request_news)
                if request_news.finish_reason:
                    frontend.request_ids.discard(request_id)
            frontend.news_event.set()

    def fail_all(self, error: EaglerayError) -> None:
        """End every unfinished request with an error."""
        for frontend in self._frontends.values():
            for request_id in frontend.request_ids:
                news = News(first_index=0, finish_reason="error", error=error)
                frontend.mailbox.put(request_id, news)
            frontend.request_ids.clear()
            frontend.news_event.set()

    def forget_silent_frontends(self) -> dict[str, list[str]]:
        """Forget the frontends that have stopped calling. Returns the requests that end with them,
        by frontend.
        """
        now_s = time.monotonic()
        # While this process was stopped, it could hear nobody: that does not count as silence.
        has_driver_stalled = now_s - self._silence_checked_at_s > max(2.0, self._timeout_s / 2)
        self._silence_checked_at_s = now_s
        for frontend in self._frontends.values():
            if has_driver_stalled or frontend.num_waiting_polls:
                frontend.silent_since_s = now_s
        silent_frontends = [
            frontend
            for frontend in self._frontends.values()
            if now_s - frontend.silent_since_s > self._timeout_s
        ]
        for frontend in silent_frontends:
            del self._frontends[self._registration_numbers.pop(frontend.frontend_id)]
        return {
            frontend.frontend_id: list(frontend.request_ids)
            for frontend in silent_frontends
            if frontend.request_ids
        }

    def _frontend(self, frontend_id: str) -> _FrontendRecord | None:
        registration_number = self._registration_numbers.get(frontend_id)
        return None if registration_number is None else self._frontends[registration_number]

    def _was_sent_before(self, frontend_id: str, request_id: str) -> bool:
        """Whether this frontend sent this request before and can still get its news."""
        frontend = self._frontend(frontend_id)
        return frontend is not None and (
            request_id in frontend.request_ids or frontend.mailbox.holds(request_id)
        )

    def _is_unfinished(self, request_id: str) -> bool:
        return any(request_id in frontend.request_ids for frontend in self._frontends.values())
