"""`LLM`: an engine and how a program uses it. Starts everything, hands prompts to it, stops everything.

    with LLM("Qwen/Qwen3-0.6B", tensor_parallel_size=2) as llm:
        for output in llm.generate(["Hello"], SamplingParams(max_tokens=20)):
            print(output.text)

Works inside a program that runs Ray or an event loop, and leaves both as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import queue
import random
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.checkpoint import find_model, generation_defaults
from cluster.driver import Driver, EngineReport
from cluster.frontend import CALL_TIMEOUT_S, Chunk, CompletionOutput, Frontend, Generation, call
from cluster.placement import SESSION, actor_environment, pick_device, place
from cluster.progress import ProgressBar
from cluster.prompts import Prompt, as_list, check_token_ids, conversations, form_of, one_each
from cluster.text import Message, Tokenizer, load_tokenizer
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig, read_generation_config
from scheduler.errors import ConfigError, EaglerayError, RequestError
from scheduler.params import SEED_LIMIT, SamplingParams
from scheduler.scheduler import check_request, check_vocabulary
from workers.checkpoint import check_checkpoint
from workers.configuration import foresee_config, resolve_config

SHUTDOWN_TIMEOUT_S = 2.0

logger = logging.getLogger("eagleray")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. `outputs` holds `n` completions; `text` and the like are those of the first."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


class LLM:
    """One engine: a driver actor and `tensor_parallel_size` ranks. A context manager; `shutdown` ends it.

    `model` is a directory or a hub id, the small default model unless given; the other options are those of
    `configs.EngineConfig`. `sampling_defaults` stand between a request's own parameters and the checkpoint's.
    Raises `ConfigError` for what cannot work, before any actor starts where that can be known.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        sampling_defaults: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = str(model)
        self.config = EngineConfig.from_dict(options)
        model_dir = find_model(self.config.model, self.config.revision)
        self._model = ModelConfig.from_dir(model_dir)
        self._model.check_tensor_parallel_size(self.config.tensor_parallel_size)
        check_checkpoint(model_dir, self._model)
        defaults = generation_defaults(read_generation_config(model_dir))
        if not isinstance(sampling_defaults, SamplingParams | None):
            raise ConfigError(f"sampling_defaults must be a SamplingParams, got {type(sampling_defaults).__name__}")
        self._defaults = (sampling_defaults or SamplingParams()).over(defaults)
        self._random = random.Random(self.config.seed)
        self._generations: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()
        self._exit = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), self._exit)  # also at exit
        foresee_config(self.config, self._model, model_dir)  # what is wrong already, before Ray starts
        tokenizer_dir = find_model(self.config.tokenizer, what="tokenizer") if self.config.tokenizer else model_dir
        try:
            self._start(model_dir, tokenizer_dir)
        except BaseException:
            self.shutdown()
            raise

    # -- whole outputs ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, or mappings with `prompt`, `prompt_token_ids` or `messages` (and
        optionally `cache_salt`). Returns outputs in the order of the prompts. Raises `RequestError` before any runs.
        """
        many = as_list(prompts)
        params = one_each(sampling_params, len(many))
        num_outputs = sum((p and p.n) or self._defaults.n or 1 for p in params)
        with ProgressBar(num_outputs, enabled=progress) as bar:
            generations = self._submit(many, params, [bar.sink() if progress else None for _ in many])
            try:
                for generation in generations:
                    generation.done.result()
            except BaseException:
                self._frontend.abort(generations)
                raise
        return [_request_output(generation) for generation in generations]

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
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """`generate` for an event loop; cancelling it aborts the requests."""
        many = as_list(prompts)
        params = one_each(sampling_params, len(many))
        generations = await self._submit_async(many, params, [None] * len(many))
        try:
            await asyncio.gather(*(asyncio.wrap_future(generation.done) for generation in generations))
        finally:
            self._frontend.abort(generations)
        return [_request_output(generation) for generation in generations]

    async def achat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`chat` for an event loop."""
        return await self.agenerate(conversations(messages), sampling_params)

    # -- streams ----------------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Generator[Chunk, None, None]:
        """Chunks of one request as they come. Leaving the loop early aborts it and frees its blocks.

        `request_id` is a name of one's own for `abort`.
        """
        chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        generation = self._submit([prompt], one_each(sampling_params, 1), [chunks.put], request_id)[0]
        generation.done.add_done_callback(lambda _: chunks.put(None))
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
            generation.done.result()
        finally:
            self._frontend.abort([generation])

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for an event loop; close it (or leave `async for`) to abort."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def put(chunk: Chunk | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        generation = (await self._submit_async([prompt], one_each(sampling_params, 1), [put], request_id))[0]
        generation.done.add_done_callback(lambda _: put(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            generation.done.result()
        finally:
            self._frontend.abort([generation])

    def abort(self, request_id: str) -> bool:
        """End the stream that was given this `request_id`; its last chunk says "abort". False if it is not running."""
        generation = self._generations.pop(request_id, None)
        if generation is None or generation.done.done():
            return False
        self._frontend.abort([generation])
        return True

    # -- the engine -------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    @property
    def report(self) -> EngineReport:
        """Limits of the engine, and how it came up."""
        return self._report

    def stats(self) -> dict[str, float]:
        """Counters of the scheduler: sequences running and waiting, free blocks, steps, preemptions, cached tokens."""
        return self._frontend.stats()

    def check_prompt(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` if it could not be run; nothing is sent."""
        generation = self._generation(prompt)
        [wanted] = one_each(sampling_params, 1)
        params = dataclasses.replace(wanted or SamplingParams(), seed=0)  # draws nothing
        for request in self._requests(generation, params, prompt, None):
            check_request(request, self._report.limits)
        return generation.prompt_token_ids

    def shutdown(self) -> None:
        """Stop everything this engine started; Ray too, if we started it. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start(self, model_dir: Path, tokenizer_dir: Path) -> None:
        began = time.perf_counter()
        size = self.config.tensor_parallel_size
        lease = SESSION.connect(self.config.ray_address, size)
        self._exit.callback(SESSION.release, lease)
        device = pick_device(self.config.device, size)
        connected = time.perf_counter()
        placement = place(size, device)
        self._exit.callback(_while_held, lease, remove_placement_group, placement)
        config = _resolve(self.config, self._model, model_dir, device, placement)
        self._driver = _start_driver(config, placement)
        self._frontend = Frontend(self._driver, None, lambda: SESSION.holds(lease))
        self._exit.callback(self._frontend.join, SHUTDOWN_TIMEOUT_S)  # no thread of ours is in Ray when Ray stops
        self._exit.callback(_while_held, lease, _stop_driver, self._driver)
        self._exit.callback(self._frontend.close)
        starting = self._driver.start.remote()
        self._tokenizer = self._load_tokenizer(tokenizer_dir)  # while the ranks start
        report: EngineReport = call(starting, "start the engine", self.config.start_timeout_s + CALL_TIMEOUT_S)
        self._frontend.tokenizer = self._tokenizer
        for line in report.lines:
            logger.info(line)
        seconds = {"ray": connected - began, **report.seconds, "all": time.perf_counter() - began}
        self._report = dataclasses.replace(report, seconds=seconds)
        logger.info("start: %s", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))

    def _load_tokenizer(self, path: Path) -> Tokenizer | None:
        tokenizer = load_tokenizer(path)
        if tokenizer is None and self.config.tokenizer is not None:
            raise ConfigError(f"tokenizer {self.config.tokenizer!r}: {path} has no tokenizer files")
        return tokenizer

    # -- requests ---------------------------------------------------------------------------------------------------

    def _submit(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams | None],
        sinks: Seq[Callable[[Chunk], None] | None],
        request_id: str | None = None,
    ) -> list[Generation]:
        held = self._generations.get(request_id) if request_id is not None else None
        if held is not None and not held.done.done():
            raise RequestError(f"request_id {request_id!r} is in use", "request_id")
        generations, requests = [], []
        for prompt, wanted, sink in zip(prompts, params, sinks, strict=True):
            generation = self._generation(prompt)
            generations.append(generation)
            requests += self._requests(generation, wanted, prompt, sink)
        self._frontend.submit(generations, requests)
        if request_id is not None:
            self._generations[request_id] = generations[0]
        return generations

    async def _submit_async(self, *args: Any) -> list[Generation]:
        """`_submit` on another thread. Cancelled in the middle, what was submitted is aborted."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, *args))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._abort_submitted)
            raise

    def _abort_submitted(self, submitted: asyncio.Future[list[Generation]]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self._frontend.abort(submitted.result())

    def _requests(
        self,
        generation: Generation,
        wanted: SamplingParams | None,
        prompt: Prompt,
        sink: Callable[[Chunk], None] | None,
    ) -> list[Any]:
        params = (wanted or SamplingParams()).over(self._defaults)
        if params.stop_strings() and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none", "stop")
        check_token_ids(params, self._model.vocab_size)
        seed = params.seed if params.seed is not None else self._random.randrange(SEED_LIMIT)
        salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt must be text, got {type(salt).__name__}", "cache_salt")
        return self._frontend.prepare(
            generation, params, seed=seed, eos_token_ids=self._model.eos_token_ids, cache_salt=salt, sink=sink
        )

    def _generation(self, prompt: Prompt) -> Generation:
        """Token ids of a prompt in any of its forms. Raises `RequestError`."""
        value: Any = prompt
        if isinstance(prompt, Mapping):
            form = form_of(prompt)
            value = prompt[form]
            if form == "messages":
                return Generation(None, self._need_tokenizer("messages").encode_chat(value))
        if isinstance(value, str):
            return Generation(value, self._need_tokenizer("a text prompt").encode(value))
        if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
            raise RequestError(f"a prompt is text or a list of token ids, got {type(value).__name__}", "prompt")
        check_vocabulary(value, self._model.vocab_size)
        return Generation(None, list(value))

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this checkpoint has none; send prompt_token_ids", "prompt"
            )
        return self._tokenizer


def _resolve(
    engine: EngineConfig, model: ModelConfig, model_dir: Path, device: str, placement: PlacementGroup
) -> ResolvedConfig:
    """See `resolve_config`, which looks at what is installed: here, or with a GPU that only the ranks have, there."""
    if device == "cpu" or torch.cuda.is_available():
        return resolve_config(engine, model, model_dir, device)
    there = ray.remote(resolve_config).options(
        num_cpus=1,
        num_gpus=1,
        max_retries=0,
        runtime_env=actor_environment(),
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=0),
    )
    resolved: ResolvedConfig = call(
        there.remote(engine, model, model_dir, device),
        "see what is installed where the ranks run",
        engine.start_timeout_s,
    )
    return resolved


def _start_driver(config: ResolvedConfig, placement: PlacementGroup) -> Any:
    return (
        ray.remote(Driver)
        .options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=0),
        )
        .remote(config, placement)
    )


def _while_held(lease: str, stop: Callable[[Any], None], what: Any) -> None:
    """Stop something of ours, unless Ray has been shut down before us and took it along: a call would start it anew."""
    if SESSION.holds(lease):
        stop(what)


def _close_in(pid: int, stack: contextlib.ExitStack) -> None:
    """Close, but not in a fork of the process that owns the engine."""
    if os.getpid() == pid:
        stack.close()


def _stop_driver(driver: Any) -> None:
    with contextlib.suppress(EaglerayError):  # it may be dead already; what is left of it is killed next
        call(driver.shutdown.remote(), "stop the driver", SHUTDOWN_TIMEOUT_S)
    ray.kill(driver)


def _request_output(generation: Generation) -> RequestOutput:
    return RequestOutput(
        prompt=generation.prompt,
        prompt_token_ids=generation.prompt_token_ids,
        outputs=generation.completions,
        num_cached_tokens=generation.num_cached_tokens,
    )
