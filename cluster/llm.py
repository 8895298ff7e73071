"""`LLM`: an engine, and the methods by which a program uses it.

    with LLM("Qwen/Qwen3-0.6B", tensor_parallel_size=2) as llm:
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=20)):
            print(output.text)

Works inside a program that runs Ray or an event loop, and leaves both as they were.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Generator, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from cluster.client.client import Client
from cluster.client.outputs import Chunk, Generation, RequestOutput
from cluster.client.progress import ProgressBar
from cluster.client.prompts import Message, Prompt, as_prompt_list, conversations
from cluster.client.setup import EngineSetup, make_engine_setup
from cluster.engine.report import StartReport
from cluster.engine.start import EngineProcesses
from configs.engine import EngineConfig
from scheduler.errors import ConfigError, id_in_use_error
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams


class _Reservation:
    """In place of a stream that is being sent."""


class LLM:
    """One engine: a driver actor and `tensor_parallel_size` ranks. A context manager; `shutdown`
    ends it.

    `model` is a directory or a hub id, by default the small default model; the other options are
    those of `configs.EngineConfig`. `sampling_defaults` fill the parameters that a request leaves
    unset; the checkpoint's own defaults fill the rest. Raises `ConfigError` for options that cannot
    work, if possible before any actor starts.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        setup: EngineSetup | None = None,
        sampling_defaults: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        """`setup`: the result of `make_engine_setup`, in place of all other arguments."""
        if model is not None:
            options["model"] = str(model)
        if setup is None:
            setup = make_engine_setup(EngineConfig.from_dict(options), sampling_defaults)
        elif options or sampling_defaults is not None:
            raise ConfigError("give either a setup or options, not both")
        self.config = setup.config
        self._setup = setup
        self._engine_processes = EngineProcesses(setup)
        self._process_id = os.getpid()
        # By the names that the program gave; a reservation until it is sent.
        self._streams: dict[str, Generation | _Reservation] = {}
        self._streams_lock = threading.Lock()
        self.client = Client(
            setup.request_builder(self._engine_processes.report.limits),
            self._engine_processes.frontend,
        )

    # -- whole outputs -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, or mappings with `prompt`, `prompt_token_ids` or
        `messages`.

        A mapping may also have a `cache_salt`. Returns outputs in the order of the prompts. Raises
        `RequestError` before any request runs. `progress` shows a bar on standard error.
        """
        if not progress:
            return self.client.wait(self.client.submit(prompts, sampling_params))
        prompt_list = as_prompt_list(prompts)
        with ProgressBar() as bar:
            sinks = [bar.sink() for _ in prompt_list]
            generations = self.client.submit(prompt_list, sampling_params, sinks)
            bar.expect(sum(len(generation.outputs) for generation in generations))
            return self.client.wait(generations)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the checkpoint's chat template."""
        return self.generate(conversations(messages), sampling_params, progress=progress)

    async def agenerate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for an event loop; canceling it aborts the requests."""
        return await self.client.wait_async(
            await self.client.submit_async(prompts, sampling_params)
        )

    async def achat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`chat` for an event loop."""
        return await self.agenerate(conversations(messages), sampling_params)

    # -- streams -----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generator[Chunk, None, None]:
        """Chunks of one request as they come. Leaving the loop early aborts it and frees its
        blocks.

        `request_id` is a name of your choice for `abort`.
        """
        chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        with self._reserved_id(request_id):
            [generation] = self.client.submit([prompt], sampling_params, [chunks.put])
            generation.done_future.add_done_callback(lambda _: chunks.put(None))
            with self._registered_stream(generation, request_id):
                while (chunk := chunks.get()) is not None:
                    yield chunk
                generation.result()

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for an event loop; close it (or leave `async for`) to abort."""
        with self._reserved_id(request_id):
            async with self.client.stream([prompt], sampling_params) as ([generation], chunks):
                with self._registered_stream(generation, request_id):
                    while items := await chunks.next():
                        for _, chunk in items:
                            yield chunk

    def abort(self, request_id: str) -> bool:
        """End the stream with this `request_id`; its last chunk has the `finish_reason` "abort".
        False if it is not running.
        """
        generation = self._streams.get(request_id)
        if not isinstance(generation, Generation) or generation.done_future.done():
            return False
        self.client.abort([generation])
        return True

    @contextlib.contextmanager
    def _reserved_id(self, request_id: str | None) -> Iterator[None]:
        """Keeps a name from other streams until this one is registered. Raises `RequestError` if a
        running stream has it.
        """
        if request_id is None:
            yield
            return
        reservation = _Reservation()
        with self._streams_lock:
            other = self._streams.get(request_id)
            has_ended = isinstance(other, Generation) and other.done_future.done()
            if other is not None and not has_ended:
                raise id_in_use_error(request_id)
            self._streams[request_id] = reservation
        try:
            yield
        finally:
            with self._streams_lock:
                if self._streams.get(request_id) is reservation:  # it was not sent
                    del self._streams[request_id]

    @contextlib.contextmanager
    def _registered_stream(self, generation: Generation, request_id: str | None) -> Iterator[None]:
        """The stream has this name while it is read, and is aborted afterwards."""
        if request_id is not None:
            self._streams[request_id] = generation
        try:
            yield
        finally:
            self.client.abort([generation])
            with self._streams_lock:
                if request_id is not None and self._streams.get(request_id) is generation:
                    del self._streams[request_id]

    # -- the engine --------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works with this checkpoint."""
        return self._setup.has_chat_template

    @property
    def report(self) -> StartReport:
        """The device and limits of the engine, and how long its start took."""
        return self._engine_processes.report

    def stats(self) -> EngineStats:
        """Counters. Raises `OverloadedError` while the driver is replaced, `EngineDeadError`."""
        return self._engine_processes.frontend.stats()

    def check_prompt(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` if it could not run. Sends nothing."""
        return self.client.builder.checked_token_ids(prompt, sampling_params)

    def shutdown(self) -> None:
        """Stop everything this engine started; Ray too, if we started it. Safe to call twice. Does
        nothing in a process that was forked from the one that has the engine.
        """
        if os.getpid() != self._process_id:
            return
        self.client.builder.close()
        self._engine_processes.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
