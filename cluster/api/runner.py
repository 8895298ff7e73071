"""What POST requests ask for: bodies are read, jobs run over the client, and answers written.

Reading, writing and tokenizing of what is large takes place on a few threads each, so that none
holds the event loop and little memory is used at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.access import check_content_type
from cluster.api.chats import chat_job, tokenize
from cluster.api.document import POST
from cluster.api.encoding import decode, encoding_of
from cluster.api.endpoints import Job, Served, completion_job, detokenize
from cluster.api.exchange import Exchange
from cluster.api.limits import Admission, ApiLimits, Upload, Uploads
from cluster.api.messages.adapter import count_tokens, messages_job
from cluster.api.metrics import ApiMetrics, Timing
from cluster.api.reading import read
from cluster.api.replies import Writer, json_pieces
from cluster.api.responses.adapter import count_input, responses_job
from cluster.api.schema import Model
from cluster.api.structure import loosened_headers
from cluster.api.unknown import HEADER, IgnoredFields, Unknown, header_of
from cluster.api.workers import Workers
from cluster.client.client import Client
from cluster.client.outputs import Generation
from cluster.client.streams import Item

Result = TypeVar("Result")
Convert = Callable[[Any, Served, int], Result]  # of a request, with the most messages it may have

# A body of more bytes is read in a thread. In the worst case, a schema of nothing but "{},", this
# many take 20 ms.
READ_INLINE_BYTES = 16_384
READERS = 2
WRITERS = 2
# An answer of more tokens, alternatives and repeated prompt tokens is written in a thread. So many
# take about 5 ms.
WRITE_INLINE_TOKENS = 1024
TOKENIZERS = 1  # threads of `/tokenize` and its like
MAX_TOKENIZING = 16  # requests that may wait for them
STREAM_TURN_S = 0.005  # how long a stream makes events before others get a turn
# Requests of one session go to the same engine. The last two are those of Codex and Claude Code.
SESSION_HEADERS = (b"x-session-id", b"session-id", b"x-claude-code-session-id")
MESSAGES_PATH = "/v1/messages"

# By path: what makes a job, or an answer, of a request in the form that `document.py` names.
JOBS: dict[str, Convert[Job]] = {
    "/v1/chat/completions": chat_job,
    "/v1/completions": lambda request, served, _: completion_job(request, served),
    "/v1/responses": responses_job,
    MESSAGES_PATH: messages_job,
}
COMPUTED: dict[str, Convert[dict[str, Any]]] = {
    f"{MESSAGES_PATH}/count_tokens": count_tokens,
    "/v1/responses/input_tokens": count_input,
    "/tokenize": tokenize,
    "/detokenize": lambda request, served, _: detokenize(request, served),
}


class Endpoint:
    """An ASGI application for a path that takes JSON. Starlette wraps `send` for functions, which
    each part of a stream would have to pass.
    """

    def __init__(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        check_content_type(exchange.headers)
        await self._answer(exchange)


class Runner:
    """Answers the requests of one API process. Used from one event loop only."""

    def __init__(
        self,
        client: Client,
        served: Served,
        limits: ApiLimits,
        metrics: ApiMetrics,
        *,
        refuse_unknown_fields: bool,
    ) -> None:
        self.admission = Admission(limits)
        self.uploads = Uploads(limits)
        self.tokenizing = Workers("tokenizing", TOKENIZERS, MAX_TOKENIZING)
        self._reading = Workers("reading", READERS)
        self._writing = Workers("writing", WRITERS)
        self._client, self._served = client, served
        self._limits, self._metrics = limits, metrics
        self._refuse_unknown_fields = refuse_unknown_fields
        self._ignored_fields = IgnoredFields(metrics.ignored_fields)

    def endpoints(self) -> dict[str, Endpoint]:
        """What answers each path."""
        answers = dict.fromkeys(JOBS, Endpoint(self._generate))
        return answers | dict.fromkeys(COMPUTED, Endpoint(self._compute))

    async def _generate(self, exchange: Exchange) -> None:
        """Run the job of the request in the body. While the server is full, no body is parsed: a
        refusal must take as little as possible from the requests that run.
        """
        headers = exchange.headers
        names = (headers[name] for name in SESSION_HEADERS if name in headers)
        session = next(names, b"")[:200].decode("latin-1")

        def job_of(request: Model) -> Job:
            return JOBS[exchange.path](request, self._served, self._limits.max_messages)

        with self.uploads.begin() as upload:
            job = await self._read(exchange, upload, job_of, self.admission.check_room)

            def make_writer(generations: list[Generation]) -> Writer:
                upload.end()  # the prompts are token ids now
                return job.make_writer(generations)

            if session:
                job = job.of_session(session)
            counted_job = dataclasses.replace(job, make_writer=make_writer)
            await exchange.unless_left(self._run(exchange, counted_job))

    async def _compute(self, exchange: Exchange) -> None:
        """Answer a request with what the tokenizer makes of it, in a thread. Raises
        `OverloadedError`, before a body is parsed, if too many such requests wait.
        """
        before = self.tokenizing.check_room
        with self.uploads.begin() as upload:
            request = await self._read(exchange, upload, lambda request: request, before)

            def answer() -> bytes:
                made = COMPUTED[exchange.path](request, self._served, self._limits.max_messages)
                return b"".join(json_pieces(made))

            data = await self.tokenizing.run(answer)
        await exchange.answer(Response(data, media_type="application/json"))

    async def _read(
        self,
        exchange: Exchange,
        upload: Upload,
        convert: Callable[[Model], Result],
        before: Callable[[], None],
    ) -> Result:
        """What `convert` makes of the request in the body; `before` is called when the body is
        complete. A large body is read in a thread, and an encoded one is decoded there. The answer
        will name the fields that are ignored.
        """
        unknown = Unknown(refuse=self._refuse_unknown_fields)
        encoding = encoding_of(exchange.headers)
        body = await exchange.body(upload)
        before()
        if encoding:
            num_sent, most = len(body), self._limits.max_body_bytes
            body = await self._reading.run(partial(decode, body, encoding, most))
            upload.add(len(body) - num_sent)

        def make() -> Result:
            request = read(POST[exchange.path][0], body, self._limits.max_messages, unknown)
            result = convert(request)
            if isinstance(result, Job):
                unknown.names |= dict.fromkeys(result.ignored)
            return result

        try:
            return make() if len(body) <= READ_INLINE_BYTES else await self._reading.run(make)
        finally:
            if unknown.names:
                exchange.answer_headers[HEADER] = header_of(unknown.names)
                self._ignored_fields.note(unknown.names)

    async def _run(self, exchange: Exchange, job: Job) -> None:
        """Nothing is awaited between the last write and the end of the admission: a client may send
        its next request as soon as it has its answer.
        """
        with self.admission.admit(job.num_outputs):
            await (self._stream if job.streamed else self._answer_whole)(exchange, job)

    async def _answer_whole(self, exchange: Exchange, job: Job) -> None:
        timing = Timing(self._metrics)
        generations = await self._client.submit_async(job.prompts, job.params)
        try:
            job.check(generations)
            exchange.answer_headers |= loosened_headers(generations)
            writer = job.make_writer(generations)
        except BaseException:
            self._client.abort(generations)
            raise
        outputs = await self._client.wait_async(generations)
        for output in outputs:
            if output.error is not None:
                raise output.error
            self._metrics.output_tokens.inc(sum(len(done.token_ids) for done in output.outputs))
        timing.end()

        def write() -> bytes:
            return b"".join(json_pieces(writer.body()))

        is_short = job.num_written(generations) <= WRITE_INLINE_TOKENS
        data = write() if is_short else await self._writing.run(write)
        await exchange.answer(Response(data, media_type="application/json"))

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        timing = Timing(self._metrics)
        async with self._client.stream(job.prompts, job.params) as (generations, chunks):
            job.check(generations)
            exchange.answer_headers |= loosened_headers(generations)
            exchange.writer = writer = job.make_writer(generations)
            num_outputs = len(generations[0].outputs)
            keeping = asyncio.create_task(exchange.keep_alive(self._limits.keep_alive_s))
            try:
                while items := await chunks.next():
                    for place, chunk in items:
                        timing.tokens(place * num_outputs + chunk.index, len(chunk.token_ids))
                    data = await _in_turns(writer, items)
                    if data:
                        await exchange.event(data)
            finally:
                keeping.cancel()
            timing.end()
            await exchange.event(writer.end(includes_usage=job.includes_usage), more=False)


async def _in_turns(writer: Writer, items: list[Item]) -> bytes:
    """The events of these chunks. Others get a turn while many are made."""
    events, began_s = [], time.monotonic()
    for place, piece in ((place, piece) for place, chunk in items for piece in chunk.pieces()):
        events.append(writer.events(place, piece))
        if time.monotonic() - began_s > STREAM_TURN_S:
            await asyncio.sleep(0)
            began_s = time.monotonic()
    return b"".join(events)
