"""Work that must not hold the event loop, each kind on threads of its own: none waits behind a
burst of another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from scheduler.errors import OverloadedError

Result = TypeVar("Result")


class Workers:
    """A few threads with a counted queue."""

    def __init__(self, name: str, num_threads: int, max_waiting: int | None = None) -> None:
        """`name` says what they do. `max_waiting`: calls that may wait for a thread, None for any
        number.
        """
        self._name, self._num_threads, self._max_waiting = name, num_threads, max_waiting
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._num_calls = 0  # that run or wait

    def check_room(self) -> None:
        """Raise `OverloadedError` if one more call would be too many."""
        if self._max_waiting is None:
            return
        if self._num_calls >= self._num_threads + self._max_waiting:
            raise OverloadedError(
                f"{self._num_calls} requests for {self._name} are running or waiting, as many as"
                " are possible; try again later"
            )

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns. Raises `OverloadedError` instead of waiting in a full queue. If this
        is canceled, the work leaves the queue; once it runs, it counts until it has ended.
        """
        self.check_room()
        # In a variable, the future would be kept by its own error, whose traceback has this frame,
        # and with it all that the work held, until the collector comes.
        return await asyncio.wrap_future(self._begin(work))

    def _begin(self, work: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            self._num_calls += 1
        call = self._threads.submit(work)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Future[Result]) -> None:
        with self._lock:
            self._num_calls -= 1
