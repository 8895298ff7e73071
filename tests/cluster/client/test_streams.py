"""The way of chunks from the polling thread to an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.client.outputs import Chunk
from cluster.client.streams import MAX_ITEMS_PER_TURN, ChunkStream, Item, Relay


class Way:
    """A relay of the running loop, and streams of one generation each."""

    def __init__(self, num_streams: int = 1) -> None:
        self.relay = Relay(asyncio.get_running_loop())
        self.streams = [ChunkStream(self.relay) for _ in range(num_streams)]
        self.ends: list[Future[None]] = [Future() for _ in self.streams]
        for stream, end in zip(self.streams, self.ends, strict=True):
            generation: Any = SimpleNamespace(done_future=end)
            stream.follow([generation])

    async def bring(self, *texts: str, to: int = 0, ends: bool = False) -> None:
        """What a polling thread does with one batch of news."""

        def put() -> None:
            for text in texts:
                self.streams[to].put(0, Chunk(index=0, text=text, token_ids=[1]))
            if ends:
                self.ends[to].set_result(None)
            self.relay.wake()

        thread = threading.Thread(target=put)
        thread.start()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)


def texts_of(items: list[Item]) -> list[str]:
    return [chunk.text for _, chunk in items]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10.0))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_stream_that_waits_takes_chunks_without_its_task() -> None:
    async def work() -> None:
        way, taken = Way(), list[list[str]]()

        def take(items: list[Item]) -> bool:
            taken.append(texts_of(items))
            return True

        reading = asyncio.ensure_future(way.streams[0].next(take))
        await settled()
        await way.bring("a", "b")
        await way.bring("c")
        assert taken == [["a", "b"], ["c"]] and not reading.done()
        await way.bring("d", ends=True)
        assert taken[-1] == ["d"] and await reading == []

    run(work())


def test_what_is_not_taken_is_returned_and_what_follows_waits_behind_it() -> None:
    async def work() -> None:
        way, refused = Way(), list[list[str]]()

        def refuse(items: list[Item]) -> bool:
            refused.append(texts_of(items))
            return False

        stream = way.streams[0]
        stream.put(0, Chunk(index=0, text="a", token_ids=[1]))
        reading = asyncio.ensure_future(stream.next(refuse))
        await asyncio.sleep(0)
        way.relay._deliver()  # the reader's task has not run yet when the next batch comes
        stream.put(0, Chunk(index=0, text="b", token_ids=[1]))
        way.relay._deliver()
        assert refused == [["a"]]
        assert texts_of(await reading) == ["a", "b"]

    run(work())


def test_chunks_that_come_while_nobody_waits_are_returned_by_the_next_call() -> None:
    async def work() -> None:
        way = Way()
        await way.bring("a", "b")
        await way.bring("c", ends=True)
        assert texts_of(await way.streams[0].next(lambda items: True)) == ["a", "b", "c"]
        assert await way.streams[0].next() == []

    run(work())


def test_an_error_of_a_stream_that_takes_reaches_its_reader_and_no_other() -> None:
    async def work() -> None:
        way, taken = Way(num_streams=2), list[str]()

        def fail(items: list[Item]) -> bool:
            raise ValueError("of this stream")

        def take(items: list[Item]) -> bool:
            taken.extend(texts_of(items))
            return True

        reading = [
            asyncio.ensure_future(stream.next(take_now))
            for stream, take_now in zip(way.streams, (fail, take), strict=True)
        ]
        await settled()
        way.streams[0].put(0, Chunk(index=0, text="a", token_ids=[1]))
        await way.bring("b", to=1)
        with pytest.raises(ValueError, match="of this stream"):
            await reading[0]
        assert taken == ["b"] and not reading[1].done()
        await way.bring(to=1, ends=True)
        assert await reading[1] == []

    run(work())


def test_a_stream_does_not_keep_what_failed_to_take_its_chunks() -> None:
    """Through the traceback of the error: nobody knows when the collector comes for cycles."""

    class Request:
        def take(self, items: list[Item]) -> bool:
            raise ValueError("of this stream")

    async def work() -> None:
        way, request = Way(), Request()
        reading = asyncio.ensure_future(way.streams[0].next(request.take))
        await settled()
        await way.bring("a", ends=True)
        await asyncio.wait([reading])
        assert isinstance(reading.exception(), ValueError)
        weak = weakref.ref(request)
        del reading, request
        assert weak() is None

    gc.disable()
    try:
        run(work())
    finally:
        gc.enable()


def test_a_reader_that_is_canceled_takes_nothing_any_more() -> None:
    async def work() -> None:
        way, taken = Way(), list[str]()

        def take(items: list[Item]) -> bool:
            taken.extend(texts_of(items))
            return True

        reading = asyncio.ensure_future(way.streams[0].next(take))
        await settled()
        reading.cancel()
        await asyncio.wait([reading])
        await way.bring("a")
        assert taken == []

    run(work())


def test_other_tasks_run_between_the_parts_of_a_large_batch() -> None:
    async def work() -> None:
        way = Way(num_streams=2 * MAX_ITEMS_PER_TURN)
        taken, turns = list[str](), list[int]()

        def take(items: list[Item]) -> bool:
            taken.extend(texts_of(items))
            return True

        async def count() -> None:
            while len(taken) < len(way.streams):
                turns.append(len(taken))
                await asyncio.sleep(0)

        reading = [asyncio.ensure_future(stream.next(take)) for stream in way.streams]
        counting = asyncio.ensure_future(count())
        await settled()
        for number in range(len(way.streams) - 1):
            way.streams[number].put(0, Chunk(index=0, text=str(number), token_ids=[1]))
        await way.bring("last", to=len(way.streams) - 1)
        await counting
        assert MAX_ITEMS_PER_TURN in turns
        assert taken == [*map(str, range(len(way.streams) - 1)), "last"]
        for task in reading:
            task.cancel()

    run(work())
