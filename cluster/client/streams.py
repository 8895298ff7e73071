"""Chunks on their way from the polling thread to an event loop: one wake of the loop per batch of
news, whatever the number of streams, and no timer.

The polling thread puts chunks into a `Relay` and wakes it once when the batch is done. A stream
that waits may take its chunks at once, by a call, so that its task need not run for each of them;
one that has not been read in the meantime finds everything pending together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.client.outputs import Chunk, Generation

# Items delivered before the event loop gets to run its other tasks again.
MAX_ITEMS_PER_TURN = 64

Item = tuple[int, "Chunk"]  # index of the prompt among those submitted together, and its chunk
TakeNow = Callable[[list[Item]], bool]  # whether it has taken them


class Relay:
    """The way from any thread to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending_items: deque[tuple[ChunkStream, Item | Future[None]]] = deque()
        self._is_delivery_scheduled = False  # `_deliver_batch` will be called again

    def put(self, stream: ChunkStream, item: Item | Future[None]) -> None:
        """Any thread. Nothing is delivered before `wake`."""
        self._pending_items.append((stream, item))

    def wake(self) -> None:
        """Any thread: have the loop deliver what is pending."""
        if self._pending_items:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        if not self._is_delivery_scheduled:
            self._deliver_batch()

    def _deliver_batch(self) -> None:
        changed_streams: dict[ChunkStream, None] = {}
        for _ in range(min(len(self._pending_items), MAX_ITEMS_PER_TURN)):
            stream, item = self._pending_items.popleft()
            stream.receive(item)
            changed_streams[stream] = None
        for stream in changed_streams:
            stream.deliver()
        self._is_delivery_scheduled = bool(self._pending_items)
        if self._is_delivery_scheduled:
            self.loop.call_soon(self._deliver_batch)


class ChunkStream:
    """The chunks of some generations, read by one task of the relay's loop."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._num_open_generations = 0
        self._end_futures: list[Future[None]] = []  # of generations that have ended
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits
        self._take_now: TakeNow | None = None  # likewise
        self._failure: Exception | None = None  # of `_take_now`

    def put(self, prompt_index: int, chunk: Chunk) -> None:
        """The sink of the prompt at `prompt_index`. Any thread."""
        self._relay.put(self, (prompt_index, chunk))

    def follow(self, generations: list[Generation]) -> None:
        """The stream ends when these have. On the loop, once."""
        self._num_open_generations = len(generations)
        for generation in generations:
            # The future keeps its callbacks, so none of them may keep the generation.
            generation.done_future.add_done_callback(functools.partial(self._relay.put, self))
        self._relay.wake()  # some may have ended already

    def receive(self, item: Item | Future[None]) -> None:
        """On the loop: an item, or the end of a generation. `deliver` follows."""
        if isinstance(item, tuple):
            self._items.append(item)
        else:
            self._num_open_generations -= 1
            self._end_futures.append(item)

    def deliver(self) -> None:
        """On the loop: pass on what was received."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # what was received is read later
        if (
            self._items
            and self._take_now is not None
            and self._take_or_note_failure(self._take_now)
        ):
            self._items = []
        if self._items or self._end_futures or self._failure is not None:
            waiter.set_result(None)

    def _take_or_note_failure(self, take_now: TakeNow) -> bool:
        try:
            return take_now(self._items)
        except Exception as error:  # of this stream; the relay goes on with the others
            self._failure = error
            return True

    async def next(self, take_now: TakeNow | None = None) -> list[Item]:
        """Everything new, at least one item; an empty list at the end. Raises the error that a
        generation failed with, once everything before it has been read.

        `take_now` is called, on the loop, with what comes while this waits. What it takes is not
        returned; an error of it is raised here.
        """
        while not self._items:
            while self._end_futures:
                self._end_futures.pop().result()
            if self._num_open_generations == 0:
                return []
            self._waiter, self._take_now = self._relay.loop.create_future(), take_now
            try:
                await self._waiter
            finally:
                self._waiter = self._take_now = None
            if self._failure is not None:
                try:
                    raise self._failure
                finally:
                    self._failure = None  # its traceback has frames that keep this stream
        items, self._items = self._items, []
        return items
