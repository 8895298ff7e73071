"""A client of one engine: builds, sends and follows requests. `LLM` is a facade over one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Protocol

from cluster.client.outputs import Generation, RequestOutput, Sink
from cluster.client.prompts import Prompt, as_prompt_list, broadcast_params
from cluster.client.requests import RequestBuilder
from cluster.client.streams import ChunkStream, Relay
from cluster.grammar.compiler import MAX_SLOW_COMPILES, NewGrammarError
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams
from scheduler.records import StepRecord

Params = SamplingParams | Seq[SamplingParams] | None
# Threads of `submit_async`, without and with known grammars: they build requests and,
# without `send`, wait for the engine's answers. Rewriting hostile schemas takes long.
NUM_SENDERS, NUM_KNOWN_GRAMMAR_SENDERS = 8, 4


class EngineLink(Protocol):
    """A client's way to its engine. `Frontend` implements it over Ray. Any thread may call."""

    def submit(self, generations: list[Generation]) -> None:
        """Send the requests of these generations, all or none."""

    def abort(self, generations: list[Generation]) -> None:
        """End generations early."""

    def stats(self) -> EngineStats:
        """The engine's counters."""

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`."""

    def add_news_callback(self, callback: Callable[[], None]) -> None:
        """Register `callback`, to be called after each batch of news, on any thread."""


class Client:
    """Requests of one process to one engine. Any thread may call."""

    def __init__(
        self,
        builder: RequestBuilder,
        link: EngineLink,
        send: Callable[[list[Generation]], Awaitable[None]] | None = None,
    ) -> None:
        """`send` is awaited to send asynchronous requests; canceled, it aborts them. Without it,
        they are sent through `link` on threads of their own, so that an engine that does not answer
        blocks nothing else.
        """
        self.builder = builder
        self._link = link
        self._send_async = send
        self._send_executor = ThreadPoolExecutor(NUM_SENDERS, "eagleray-send")
        self._known_grammar_executor = ThreadPoolExecutor(
            NUM_KNOWN_GRAMMAR_SENDERS, "known-grammars"
        )
        # More threads than grammars that are slow to compile may be under way.
        self._compile_executor = ThreadPoolExecutor(2 * MAX_SLOW_COMPILES, "grammars")
        self._relays: dict[int, Relay] = {}  # by the id of their event loop
        link.add_news_callback(self._wake_relays)

    def submit(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params = None,
        sinks: Seq[Sink | None] | None = None,
        *,
        compiles: bool = True,
    ) -> list[Generation]:
        """Send requests, all or none. Each sink gets the chunks of its prompt, on the polling
        thread or one that aborts. Raises `RequestError` before any request runs; without
        `compiles`, `NewGrammarError` if a grammar is not known.
        """
        generations = self._build(prompts, params, sinks, compiles=compiles)
        self._link.submit(generations)
        return generations

    def wait(self, generations: list[Generation]) -> list[RequestOutput]:
        """The finished requests; one that failed has its `error`. Raises it if all have failed."""
        try:
            for generation in generations:
                generation.done_future.exception()
        except BaseException:
            self.abort(generations)
            raise
        return _outputs(generations)

    async def submit_async(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params = None,
        sinks: Seq[Sink | None] | None = None,
    ) -> list[Generation]:
        """`submit` on another thread. If this is canceled, so is `send`, and what it has submitted
        is aborted.
        """
        make = self.submit if self._send_async is None else self._build
        make_generations = functools.partial(make, prompts, params, sinks)
        all_params = params if isinstance(params, list | tuple) else [params]
        has_grammar = any(
            isinstance(p, SamplingParams) and p.structured_outputs for p in all_params
        )
        if not has_grammar:
            return await self._submit_on(self._send_executor, make_generations)
        # Requests without grammars must not wait for any, nor known grammars while new ones are
        # compiled.
        with contextlib.suppress(NewGrammarError):
            make_if_known = functools.partial(make_generations, compiles=False)
            return await self._submit_on(self._known_grammar_executor, make_if_known)
        return await self._submit_on(self._compile_executor, make_generations)

    async def _submit_on(
        self, executor: ThreadPoolExecutor, make_generations: Callable[[], list[Generation]]
    ) -> list[Generation]:
        # Not in the caller's context: Ray would take the call for a part of the caller's and cancel
        # it with that. The threads of an executor have no context.
        job = executor.submit(make_generations)
        submit_future = asyncio.wrap_future(job)
        if self._send_async is not None:
            send_coroutine = self._send_built(submit_future)
            loop = asyncio.get_running_loop()
            submit_future = loop.create_task(send_coroutine, context=Context())
        try:
            return await asyncio.shield(submit_future)
        except asyncio.CancelledError:
            if not job.cancel():  # it is no longer in line for a thread
                if self._send_async is not None:
                    submit_future.cancel()
                submit_future.add_done_callback(self._abort_submitted)
            raise
        finally:
            del job, submit_future  # their error, whose traceback has this frame, would keep them

    def _build(
        self,
        prompts: Prompt | Seq[Prompt],
        params: Params,
        sinks: Seq[Sink | None] | None,
        *,
        compiles: bool = True,
    ) -> list[Generation]:
        prompts = as_prompt_list(prompts)
        params_per_prompt = broadcast_params(params, len(prompts))
        sinks = sinks or [None] * len(prompts)
        build = functools.partial(self.builder.build, compiles=compiles)
        return list(map(build, prompts, params_per_prompt, sinks))

    async def _send_built(self, build_future: asyncio.Future[list[Generation]]) -> list[Generation]:
        assert self._send_async is not None
        generations = await build_future
        await self._send_async(generations)
        return generations

    async def wait_async(self, generations: list[Generation]) -> list[RequestOutput]:
        """`wait` for an event loop; canceling it aborts the requests."""
        futures = (asyncio.wrap_future(generation.done_future) for generation in generations)
        try:
            await asyncio.gather(*futures, return_exceptions=True)
        finally:
            self.abort(generations)
        return _outputs(generations)

    @contextlib.asynccontextmanager
    async def stream(
        self, prompts: Prompt | Seq[Prompt], params: Params = None
    ) -> AsyncGenerator[tuple[list[Generation], ChunkStream], None]:
        """Submit prompts and read their chunks on this loop; leaving aborts what has not ended."""
        prompts = as_prompt_list(prompts)
        chunks = ChunkStream(self._relay())
        sinks = [functools.partial(chunks.put, index) for index in range(len(prompts))]
        generations = await self.submit_async(prompts, params, sinks)
        try:
            chunks.follow(generations)
            yield generations, chunks
        finally:
            self.abort(generations)

    def abort(self, generations: list[Generation]) -> None:
        """End generations early. Does nothing to those that have ended."""
        self._link.abort(generations)

    def stats(self) -> EngineStats:
        """Counters. Raises `OverloadedError` while the driver is replaced, `EngineDeadError`."""
        return self._link.stats()

    def records(self, seconds: float) -> list[StepRecord]:
        """The steps of the last `seconds`. Raises `EngineDeadError`."""
        return self._link.records(seconds)

    def _relay(self) -> Relay:
        """The relay of the running event loop."""
        loop = asyncio.get_running_loop()
        relay = self._relays.get(id(loop))
        if relay is None or relay.loop is not loop:
            open_relays = [r for r in self._relays.values() if not r.loop.is_closed()]
            relay = Relay(loop)
            self._relays = {id(r.loop): r for r in (*open_relays, relay)}
        return relay

    def _wake_relays(self) -> None:
        for relay in self._relays.values():
            relay.wake()

    def _abort_submitted(self, submit_future: asyncio.Future[list[Generation]]) -> None:
        if not submit_future.cancelled() and submit_future.exception() is None:
            self.abort(submit_future.result())


def _outputs(generations: list[Generation]) -> list[RequestOutput]:
    outputs = [generation.output() for generation in generations]
    errors = [output.error for output in outputs if output.error is not None]
    if errors and len(errors) == len(outputs):
        raise errors[0]
    return outputs
