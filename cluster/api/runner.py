"""What POST requests ask for: bodies are read, jobs run over the client, and answers written.

Reading, writing and tokenizing of what is large takes place on a few threads each, so that none
holds the event loop and little memory is used at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from cluster.api.access import check_content_type
from cluster.api.admission import Admission, ApiLimits, Upload
from cluster.api.document import JOB_ENDPOINTS, POST_ENDPOINTS, TOKENIZER_ENDPOINTS
from cluster.api.encoding import decode, encoding_of
from cluster.api.endpoints import Job, ServedModel
from cluster.api.exchange import Exchange, json_response
from cluster.api.metrics import ApiMetrics, RequestTimer
from cluster.api.reading import read_request
from cluster.api.replies import Writer
from cluster.api.schema import RequestModel
from cluster.api.structure import loosened_headers
from cluster.api.threads import BoundedThreadPool
from cluster.api.unknown import IGNORED_HEADER, IgnoredFields, UnknownFields, header_of
from cluster.client.client import Client
from cluster.client.outputs import Chunk, Generation
from cluster.client.streams import Item
from scheduler.errors import PromptTooLongError

# A body of more bytes is read in a thread. In the worst case, a schema of nothing but "{},", this
# many take 20 ms.
READ_INLINE_BYTES = 16_384
# An answer of more tokens, alternatives and repeated prompt tokens is written in a thread. So many
# take about 5 ms.
WRITE_INLINE_TOKENS = 1024
NUM_TOKENIZE_THREADS = 1  # threads of `/tokenize` and its like
MAX_WAITING_TOKENIZATIONS = 16  # requests that may wait for them
MAX_IMMEDIATE_TOKENS = 64  # tokens and chunks that a stream takes without a turn of its task
STREAM_TURN_S = 0.005  # how long a stream makes events before others get a turn
# Requests of one session go to the same engine. The last two are those of Codex and Claude Code.
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")


class Runner:
    """Answers POST requests of one API process. Used from one event loop only."""

    def __init__(
        self, client: Client, served_model: ServedModel, limits: ApiLimits, metrics: ApiMetrics
    ) -> None:
        self.admission = Admission(limits)
        self.tokenize_threads = BoundedThreadPool(
            "tokenizing", NUM_TOKENIZE_THREADS, MAX_WAITING_TOKENIZATIONS
        )
        self._read_threads = BoundedThreadPool("reading", 2)
        self._write_threads = BoundedThreadPool("writing", 2)
        self._client, self._served_model = client, served_model
        self._limits, self._metrics = limits, metrics
        self._ignored_fields = IgnoredFields(metrics.ignored_fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Starlette wraps `send` for functions, which each part of a stream would have to
        pass, but not for this object.
        """
        exchange: Exchange = scope["exchange"]
        check_content_type(exchange.headers)
        with closing(Upload(self.admission)) as exchange.upload:
            await (
                self._generate if exchange.path in JOB_ENDPOINTS else self._answer_with_tokenizer
            )(exchange)

    async def _generate(self, exchange: Exchange) -> None:
        """Run the job of the request in the body."""
        job: Job = await self._read(exchange, self.admission.check_room)
        headers = exchange.headers
        session = next((headers[name] for name in SESSION_HEADERS if name in headers), "")[:200]
        if session:
            job = job.with_session(session)

        async def run() -> None:
            # Nothing is awaited between the last write and the end of the admission: a client may
            # send its next request as soon as it has its answer.
            with self.admission.admit(job.num_outputs):
                await (self._stream if job.is_streamed else self._answer_whole)(exchange, job)

        try:
            await exchange.run_until_disconnect(run())
        except PromptTooLongError as error:  # what was built of the field has no such name
            raise PromptTooLongError(
                str(error), JOB_ENDPOINTS[exchange.path].prompt_field
            ) from None

    async def _answer_with_tokenizer(self, exchange: Exchange) -> None:
        """Answer a request with what the tokenizer makes of it, in a thread."""
        request: RequestModel = await self._read(exchange, self.tokenize_threads.check_room)
        convert = partial(TOKENIZER_ENDPOINTS[exchange.path].convert, request, self._served_model)
        await exchange.answer(await json_response(convert, self.tokenize_threads))

    async def _read(self, exchange: Exchange, check_room: Callable[[], None]) -> Any:
        """The job that the request in the body asks for, or the request that the tokenizer answers.
        A large body is read in a thread, and an encoded one is decoded there. The answer will name
        the fields that are ignored.

        Where `check_room` raises `OverloadedError`, no body is parsed: a refusal must take as
        little as possible from the requests that run.
        """
        unknown_fields = UnknownFields(refuse=self._served_model.refuse_unknown)
        encoding = encoding_of(exchange.headers)
        body = await exchange.body()
        check_room()
        if encoding:
            num_encoded_bytes, max_bytes = len(body), self._limits.max_body_bytes
            body = await self._read_threads.run(partial(decode, body, encoding, max_bytes))
            exchange.upload.add(len(body) - num_encoded_bytes)

        def make() -> RequestModel | Job:
            request = read_request(
                POST_ENDPOINTS[exchange.path].model,
                body,
                self._served_model.max_messages,
                unknown_fields,
            )
            if exchange.path in TOKENIZER_ENDPOINTS:
                return request
            job = JOB_ENDPOINTS[exchange.path].convert(request, self._served_model)
            unknown_fields.names |= dict.fromkeys(job.ignored)
            return job

        try:
            return await self._read_threads.run(make, inline=len(body) <= READ_INLINE_BYTES)
        finally:
            if unknown_fields.names:
                exchange.answer_headers[IGNORED_HEADER] = header_of(unknown_fields.names)
                self._ignored_fields.note(unknown_fields.names)

    def _make_writer(self, exchange: Exchange, job: Job, generations: list[Generation]) -> Writer:
        """What writes the answer, now that the prompts are token ids. Raises as `Job.check`."""
        exchange.upload.close()
        job.check(generations)
        exchange.answer_headers |= loosened_headers(generations)
        return job.make_writer(generations)

    async def _answer_whole(self, exchange: Exchange, job: Job) -> None:
        request_timer = RequestTimer(self._metrics, exchange.arrival_s)
        generations = await self._client.submit_async(job.prompts, job.params)
        try:
            writer = self._make_writer(exchange, job, generations)
        except BaseException:
            self._client.abort(generations)
            raise
        request_outputs = await self._client.wait_async(generations)
        for request_output in request_outputs:
            if request_output.error is not None:
                raise request_output.error
            num_tokens = sum(len(completion.token_ids) for completion in request_output.outputs)
            self._metrics.tokens.add(num_tokens)
        request_timer.end()
        is_short = job.num_answer_tokens(generations) <= WRITE_INLINE_TOKENS
        await exchange.answer(
            await json_response(writer.body, self._write_threads, inline=is_short)
        )

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        request_timer = RequestTimer(self._metrics, exchange.arrival_s)
        async with self._client.stream(job.prompts, job.params) as (generations, chunks):
            exchange.writer = writer = self._make_writer(exchange, job, generations)
            outputs_per_prompt = len(generations[0].outputs)

            def note_tokens(items: list[Item]) -> None:
                for prompt_index, chunk in items:
                    request_timer.add_tokens(
                        prompt_index * outputs_per_prompt + chunk.index, len(chunk.token_ids)
                    )

            def begins_output(prompt_index: int, chunk: Chunk) -> bool:
                return not request_timer.has_begun(prompt_index * outputs_per_prompt + chunk.index)

            def try_send_now(items: list[Item]) -> bool:
                """Write these chunks at once; False, with nothing written, if they may have to
                wait for a turn of this task. The first chunk of an output always does: it may
                repeat a long prompt, with the scores of its tokens.
                """
                num_tokens = sum(1 + len(chunk.token_ids) for _, chunk in items)
                if num_tokens > MAX_IMMEDIATE_TOKENS or not exchange.can_write_now:
                    return False
                if any(begins_output(*item) for item in items):
                    return False
                note_tokens(items)
                if data := b"".join(writer.events(*item) for item in items):
                    exchange.send_events_nowait(data)
                return True

            exchange.keep_alive(self._limits.ping_interval_s)
            try:
                while items := await chunks.next(try_send_now):
                    note_tokens(items)
                    if data := await _events_in_turns(writer, items):
                        await exchange.send_events(data)
            finally:
                exchange.end_keep_alive()
            request_timer.end()
            await exchange.send_events(
                writer.end(includes_usage=job.includes_usage), has_more=False
            )


async def _events_in_turns(writer: Writer, items: list[Item]) -> bytes:
    """The events of these chunks. Others get a turn while many are made."""
    events, began_s = [], time.monotonic()
    for prompt_index, chunk in items:
        for piece in chunk.split_prompt_logprobs():
            events.append(writer.events(prompt_index, piece))
            if time.monotonic() - began_s > STREAM_TURN_S:
                await asyncio.sleep(0)
                began_s = time.monotonic()
    return b"".join(events)
