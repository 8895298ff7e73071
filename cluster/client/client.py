"""A client of one engine: builds requests, sends them, and follows them. `LLM` is a facade over
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Sequence as Seq

from cluster.client.frontend import Frontend
from cluster.client.outputs import Chunk, Generation, RequestOutput, Sink
from cluster.client.prompts import Prompt, as_list, one_each
from cluster.client.requests import RequestBuilder
from scheduler.errors import RequestError
from scheduler.params import SamplingParams

Params = SamplingParams | Seq[SamplingParams] | None


class Client:
    """Requests of one process to one engine. Any thread may call."""

    def __init__(self, builder: RequestBuilder, frontend: Frontend) -> None:
        self.builder = builder
        self._frontend = frontend
        self._named: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()

    def submit(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params = None,
        sinks: Seq[Sink | None] | None = None,
        request_id: str | None = None,
    ) -> list[Generation]:
        """Send requests, all or none. A sink gets the chunks of its prompt, on the polling thread.

        `request_id` names a single prompt for `abort_named`. Raises `RequestError` before any
        request runs.
        """
        many = as_list(prompts)
        named = self._named.get(request_id) if request_id is not None else None
        if named is not None and not named.done.done():
            raise RequestError(f"request_id {request_id!r} is in use", "request_id")
        each = zip(many, one_each(params, len(many)), sinks or [None] * len(many), strict=True)
        generations = [self.builder.build(prompt, wanted, sink) for prompt, wanted, sink in each]
        self._frontend.submit(generations)
        if request_id is not None:
            self._named[request_id] = generations[0]
        return generations

    def wait(self, generations: list[Generation]) -> list[RequestOutput]:
        """The finished requests. Raises the error of the first that failed and aborts the
        others.
        """
        try:
            return [generation.result() for generation in generations]
        except BaseException:
            self.abort(generations)
            raise

    async def submit_async(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params = None,
        sinks: Seq[Sink | None] | None = None,
        request_id: str | None = None,
    ) -> list[Generation]:
        """`submit` on another thread. If it is canceled, what it submitted is aborted."""
        task = asyncio.to_thread(self.submit, prompts, params, sinks, request_id)
        submitting = asyncio.ensure_future(task)
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._abort_submitted)
            raise

    async def wait_async(self, generations: list[Generation]) -> list[RequestOutput]:
        """`wait` for an event loop; canceling it aborts the requests."""
        try:
            await asyncio.gather(*(asyncio.wrap_future(g.done) for g in generations))
        finally:
            self.abort(generations)
        return [generation.output() for generation in generations]

    def abort(self, generations: list[Generation]) -> None:
        """End generations early. Does nothing to those that have ended."""
        self._frontend.abort(generations)

    def abort_named(self, request_id: str) -> bool:
        """End the request submitted as `request_id`. False if it is not running."""
        generation = self._named.pop(request_id, None)
        if generation is None or generation.done.done():
            return False
        self.abort([generation])
        return True

    def _abort_submitted(self, submitted: asyncio.Future[list[Generation]]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self.abort(submitted.result())


class ChunkQueue:
    """Chunks of one request on their way to an event loop. `put` is a sink; None ends the
    stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

    def put(self, chunk: Chunk | None) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

    async def get(self) -> Chunk | None:
        """The next chunk."""
        return await self._chunks.get()
