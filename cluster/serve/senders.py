"""Sends requests to one of several engines on its own threads, so that an engine that hangs delays
only the requests that were sent to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from cluster.client.frontend import Frontend
from cluster.client.outputs import Generation
from cluster.ray_errors import NoAnswerError

NUM_SEND_THREADS = 8  # calls to one engine that may wait for their answers at a time


class RequestSender:
    """The frontend of one engine, and the threads that submit to it."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._threads = ThreadPoolExecutor(NUM_SEND_THREADS, "eagleray-send")
        self._last_timeout_at_s = float("-inf")  # when a call last got no answer

    async def send(self, generations: Seq[Generation]) -> None:
        """`Frontend.submit` without blocking the event loop. Raises what that raises. If another
        call gets no answer while this one waits for a thread, this one raises `NoAnswerError`
        without being sent.
        """
        loop = asyncio.get_running_loop()
        queued_at_s = time.monotonic()
        await loop.run_in_executor(self._threads, self._submit, list(generations), queued_at_s)

    def _submit(self, generations: list[Generation], queued_at_s: float) -> None:
        if self._last_timeout_at_s > queued_at_s:
            raise NoAnswerError("the engine did not answer another request")
        try:
            self.frontend.submit(generations)
        except NoAnswerError:
            self._last_timeout_at_s = time.monotonic()
            raise
        self.frontend.finish([g for g in generations if g.done_future.done()])  # aborted meanwhile
