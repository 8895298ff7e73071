"""An engine that generates scripted tokens, behind the protocol of a frontend, and a server over
it.

Requests, tokenizer, streams and the API are real; only the tokens are scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from cluster.api.access import Access
from cluster.api.admission import ApiLimits
from cluster.api.app import Api
from cluster.api.connections import server_config
from cluster.api.endpoints import ServedModel
from cluster.client.client import Client
from cluster.client.outputs import Generation, OutputFollower
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from cluster.news import News
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import EngineDeadError
from scheduler.limits import SchedulerLimits
from scheduler.messages import EngineStats, PromptLogprobs, Request, TokenLogprobs, int32_array
from scheduler.params import SamplingParams
from scheduler.records import StepRecord

MODEL = ModelConfig.from_dir(DEFAULT_MODEL_DIR)
TOKENIZER = Tokenizer(Path(DEFAULT_MODEL_DIR))
END_ID = TOKENIZER.encode("<|im_end|>")[0]
LIMITS = SchedulerLimits(
    num_blocks=10_000,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    max_model_len=1024,
    vocab_size=MODEL.vocab_size,
)
Script = Callable[[Request], str]


RECORDS = [
    StepRecord(
        step_id=step_id,
        epoch=0,
        launched_s=100.0 + 0.01 * step_id,
        done_s=done_s,
        num_rows=3,
        num_decoding=1,
        num_tokens=3,
        num_admitted=0,
        num_running=3,
        num_waiting=1,
        num_free_blocks=7,
        num_preempted=step_id,
        head_wait_reason="kv blocks",
        seconds={"forward": 0.004, "sample": 0.001} if done_s else {},
    )
    for step_id, done_s in ((0, 100.009), (1, 0.0))
]


def echo_number(request: Request) -> str:
    """An answer of ten words that differs between outputs."""
    return " ".join(f"w{request.sampling.seed % 1000}x{i}" for i in range(10))


@functools.lru_cache
def _tokens_of(text: str) -> list[int]:
    """One list for all requests of a text, so that the memory of many streams is not this."""
    return [*TOKENIZER.encode(text), END_ID]


class ScriptedEngine:
    """Gives every request the tokens of its script, some per step, and then ends it."""

    def __init__(self, script: Script, step_s: float, per_step: int = 1) -> None:
        self.script, self.step_s, self.per_step = script, step_s, per_step
        self.aborted: list[str] = []
        self.sessions: list[str | None] = []
        self.dead: str | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._active: dict[str, tuple[Generation, OutputFollower, list[int], int]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, generations: list[Generation]) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)
        with self._changed:
            for generation in generations:
                self.sessions.append(generation.session_id)
                for output in generation.outputs:
                    tokens = _tokens_of(self.script(output.request))
                    self._active[output.request.request_id] = (generation, output, tokens, 0)
            self._changed.notify_all()

    def abort(self, generations: list[Generation]) -> None:
        with self._changed:
            for generation in generations:
                for output in generation.outputs:
                    if output.completion.finish_reason is None:
                        self.aborted.append(output.request.request_id)
                        output.abort()
                    self._active.pop(output.request.request_id, None)
                generation.end()
        self._news()

    def stats(self) -> EngineStats:
        if self.dead:
            raise EngineDeadError(self.dead)
        return EngineStats(
            num_running=len(self._active),
            num_waiting=0,
            num_free_blocks=10,
            num_blocks=10,
            num_steps=3,
            num_preemptions=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_admitted=2,
            queue_s=0.5,
            step_seconds={"forward": 1.5},
            rank_seconds=(1.5, 1.8),
        )

    def records(self, seconds: float) -> list[StepRecord]:
        if self.dead:
            raise EngineDeadError(self.dead)
        return RECORDS

    def add_news_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take no step and accept no request until the block ends; whoever submits or aborts one
        waits.
        """
        with self._changed:
            yield

    def die(self, reason: str) -> None:
        """End every request with an error."""
        with self._changed:
            self.dead = reason
            generations = [generation for generation, *_ in self._active.values()]
            self._active.clear()
        for generation in generations:
            generation.fail(EngineDeadError(reason))
        self._news()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5)

    def _news(self) -> None:
        for callback in self._callbacks:
            callback()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                while not self._active and not self._closed:
                    self._changed.wait(1.0)
                for request_id, entry in list(self._active.items()):
                    self._step(request_id, *entry)
            self._news()
            time.sleep(self.step_s)

    def _step(
        self,
        request_id: str,
        generation: Generation,
        output: OutputFollower,
        tokens: list[int],
        place: int,
    ) -> None:
        sampling = output.request.sampling
        end = min(place + self.per_step, len(tokens), sampling.max_tokens)
        reason = "stop" if end == len(tokens) else None
        if reason is None and end == sampling.max_tokens:
            reason = "length"
        if place == 0 and sampling.prompt_logprobs >= 0:
            for part in prompt_logprobs_of(output.request):
                generation.take(output, News(first_index=0, prompt_logprobs=part))
        new = tokens[place:end]
        top = sampling.logprobs
        logprobs = [logprobs_of(token, top) for token in new] if top >= 0 else None
        stopped = generation.take(
            output,
            News(
                first_index=place,
                token_ids=new,
                logprobs=logprobs,
                num_cached_tokens=1,
                finish_reason=reason,
            ),
        )
        if stopped or reason:
            self._active.pop(request_id)
        else:
            self._active[request_id] = (generation, output, tokens, end)


def logprobs_of(token: int, top: int) -> TokenLogprobs | None:
    others = tuple((token + i) % 500 for i in range(top))
    return TokenLogprobs(
        logprob=-0.25, top_token_ids=others, top_logprobs=tuple(-0.25 - i for i in range(top))
    )


def prompt_logprobs_of(request: Request) -> Iterator[PromptLogprobs]:
    """Those of a prompt in chunks of 50 tokens: of the token at place p it is -p / 8, and 2p other
    tokens are more probable.
    """
    top = request.sampling.prompt_logprobs
    for first in range(1, request.num_prompt_tokens, 50):
        places = range(first, min(first + 50, request.num_prompt_tokens))
        yield PromptLogprobs(
            first_position=first,
            num_top_logprobs=top,
            logprobs=array("f", (-place / 8 for place in places)),
            token_ranks=int32_array(1 + 2 * place for place in places),
            top_token_ids=int32_array((place + i) % 500 for place in places for i in range(top)),
            top_logprobs=array("f", (-i / 4 for _ in places for i in range(top))),
        )


def make_api(
    engine: ScriptedEngine,
    limits: ApiLimits | None = None,
    api_key: str | None = None,
    access: Access | None = None,
    sizes: SchedulerLimits = LIMITS,
    **options: Any,
) -> Api:
    builder = RequestBuilder(MODEL, TOKENIZER, SamplingParams(), sizes, 0)
    client = Client(builder, engine)
    access = access or Access(api_key=api_key)
    served_model = ServedModel(name="tiny", builder=builder, tokenizer=TOKENIZER, **options)
    return Api(client, served_model, version="0", access=access, limits=limits)


class Server:
    """An API on a real port."""

    def __init__(
        self, api: Api, engine: ScriptedEngine, url: str, connections: Collection[Any]
    ) -> None:
        self.api, self.engine, self.url, self.connections = api, engine, url, connections


@contextlib.contextmanager
def serve(
    script: Script = echo_number,
    *,
    step_s: float = 0.0,
    limits: ApiLimits | None = None,
    api_key: str | None = None,
    access: Access | None = None,
    send_buffer: int | None = None,
    address: str = "127.0.0.1",
    **options: Any,
) -> Iterator[Server]:
    """A server on a port of the system's choice, on a thread of its own. `send_buffer`: bytes that
    the system takes for a client that does not read, by default some MiB. `options`: of
    `ServedModel`.
    """
    engine = ScriptedEngine(script, step_s)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        if send_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listening.bind((address, 0))
        api = make_api(engine, limits, api_key, access, **options)
        config = server_config(api, log_level="error", backlog=4096)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=_run, args=(server, listening), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        connections = server.server_state.connections
        host = f"[{address}]" if ":" in address else address
        yield Server(api, engine, f"http://{host}:{listening.getsockname()[1]}", connections)
        server.should_exit = True
        thread.join(10)
        engine.close()


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve([listening]))


def wait_until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)
