"""Work that must not hold the event loop: each kind has threads of its own, and waits for none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from scheduler.errors import OverloadedError

Result = TypeVar("Result")


class BoundedThreadPool:
    """A few threads with a counted queue."""

    def __init__(
        self, name: str, num_threads: int, max_waiting_calls: float = float("inf")
    ) -> None:
        """`name` says what they do. `max_waiting_calls`: calls that may wait for a thread."""
        self._name = name
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._max_calls = num_threads + max_waiting_calls
        self.calls: set[Future[Any]] = set()  # that run or wait

    def check_room(self) -> None:
        """Raise `OverloadedError` if one more call would be too many."""
        if len(self.calls) >= self._max_calls:
            raise OverloadedError(
                f"{len(self.calls)} requests for {self._name} are running or waiting, as many as"
                " are possible; try again later"
            )

    async def run(self, work: Callable[[], Result], *, inline: bool = False) -> Result:
        """What `work` returns. Raises `OverloadedError` where too many wait already. If this
        is canceled, the work leaves the queue; once it runs, it counts until it has ended.
        `inline`: without a thread, as it is little.
        """
        if inline:
            return work()
        self.check_room()
        # In a variable, the future would be kept by its own error, whose traceback has this frame,
        # and with it all that the work held, until the collector comes.
        return await asyncio.wrap_future(self._begin(work))

    def _begin(self, work: Callable[[], Result]) -> Future[Result]:
        call = self._threads.submit(work)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call
