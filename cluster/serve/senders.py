"""Sends requests to one of several engines, on threads of its own: an engine that hangs keeps
nobody waiting but those whose requests were sent to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from cluster.client.frontend import Frontend
from cluster.client.outputs import Generation
from cluster.ray_errors import NoAnswerError

# How many calls to one engine may wait for their answers at a time.
NUM_THREADS = 8


class RequestSender:
    """The frontend of one engine, and the threads that submit to it."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._threads = ThreadPoolExecutor(NUM_THREADS, "eagleray-send")
        self._unanswered_at_s = float("-inf")  # when the engine last gave no answer

    async def send(self, generations: Seq[Generation]) -> None:
        """`Frontend.submit` without blocking the event loop. Raises what that raises. What waits
        for a thread when another call gets no answer is not sent, and raises `NoAnswerError`.
        """
        loop = asyncio.get_running_loop()
        asked_at_s = time.monotonic()
        await loop.run_in_executor(self._threads, self._submit, list(generations), asked_at_s)

    def _submit(self, generations: list[Generation], asked_at_s: float) -> None:
        if self._unanswered_at_s > asked_at_s:
            raise NoAnswerError("the engine did not answer another request")
        try:
            self.frontend.submit(generations)
        except NoAnswerError:
            self._unanswered_at_s = time.monotonic()
            raise
        ended = [each for each in generations if each.done.done()]  # aborted meanwhile
        self.frontend.finish(ended)
