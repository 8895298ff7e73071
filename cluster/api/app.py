"""The APIs as an ASGI application over one client of an engine; no Ray, no torch.

One table names the paths. Every answer, even to an unforeseen error, has a JSON body from
`errors.py`. A request that waits or streams is watched: when its client leaves, it is aborted, and
its blocks are free a step later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qs

from cluster.api import metrics as metrics_module
from cluster.api import page
from cluster.api.access import Access, check_content_type
from cluster.api.document import openapi
from cluster.api.endpoints import (
    Job,
    Served,
    chat_job,
    completion_job,
    detokenize,
    model_card,
    tokenize,
)
from cluster.api.errors import HttpError, body_of, headers_of, messages_body_of, status_of
from cluster.api.limits import Admission, ApiLimits, Upload, Uploads
from cluster.api.messages.adapter import count_tokens, messages_job
from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.metrics import ApiMetrics, Family, Timing, engine_families
from cluster.api.reading import Request, read
from cluster.api.replies import Writer, encode_json, json_pieces
from cluster.api.responses.adapter import responses_job
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cluster.api.trace import chrome_trace
from cluster.api.workers import Workers
from cluster.client.client import Client
from cluster.client.outputs import Generation
from cluster.client.streams import Item
from cluster.client.tokenizer import Tokenizer
from cluster.timeouts import API_STATS_TIMEOUT_S
from scheduler.errors import EaglerayError, OverloadedError, RequestError
from scheduler.messages import EngineStats

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")
Gather = Callable[[], Awaitable[list[list[Family]]]]

# For the process that serves: the polling thread must not keep the event loop waiting.
SWITCH_INTERVAL_S = 0.0005
STATS_AGE_S = 0.1  # callers within this time share one answer of the engine
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
MAX_TRACING = 4  # requests for traces that may wait, for one thread
STREAM_TURN_S = 0.005  # how long a stream makes events before others get a turn
MESSAGES_PATH = "/v1/messages"
SESSION_HEADER = b"x-session-id"  # requests of one session go to the same engine
OPEN_PATHS = ("/health", "/live", "/version", "/metrics", "/openapi.json", *page.FILES)


class Gone(Exception):
    """The client has left, or has stopped reading."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Message, receive: Receive, send: Send, timeout_s: float, *, echo_id: bool
    ) -> None:
        self.method: str = scope["method"]
        # Below a route prefix, this is the whole path.
        self.path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        given_id = self.headers.get(b"x-request-id", uuid.uuid4().hex.encode())[:200]
        self._own_headers = [(b"x-request-id", given_id)] if echo_id else []
        self.query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        self.status: int | None = None
        self.writer: Writer | None = None  # the writer of the stream, once that has begun
        self.written_s = 0.0  # when something was last written
        self._commented = False  # whether that was a comment
        self._receive, self._send, self._timeout_s = receive, send, timeout_s

    async def body(self, upload: Upload) -> bytes:
        """The body of the request. Raises `HttpError` 413 for one that is too long, 408 for one
        that takes too long, `OverloadedError` for one too many, and `Gone`.
        """
        length = self.headers.get(b"content-length", b"")
        if length.isdigit():
            upload.check_length(int(length[:20]))
        parts, more = [], True
        while more:
            try:
                async with asyncio.timeout_at(upload.deadline_s):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(408, upload.reason()) from None
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            upload.add(len(parts[-1]))
            more = message.get("more_body", False)
        return b"".join(parts)

    async def left(self) -> None:
        """Returns when the client has left. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a whole answer."""
        extra = {"content-length": str(len(body))} | (headers or {})
        await self.start(status, content_type, extra)
        await self._write({"type": "http.response.body", "body": body})

    async def start(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        """Send status and headers."""
        self.status = status
        every = {"content-type": content_type, **headers}
        pairs = [(name.encode(), value.encode()) for name, value in every.items()]
        pairs += self._own_headers
        await self._write({"type": "http.response.start", "status": status, "headers": pairs})

    async def event(self, data: bytes, *, more: bool = True) -> None:
        """Send events of a stream, and begin the stream with the first ones. Raises as `write`."""
        if self.status is None:
            headers = {"cache-control": "no-cache"}
            await self.start(200, "text/event-stream; charset=utf-8", headers)
        await self.write(data, more=more)

    async def comment(self) -> None:
        """Send a line that the clients of a stream ignore. Raises as `write`."""
        await self.event(b": waiting\n\n")
        self._commented = True

    async def write(self, data: bytes, *, more: bool) -> None:
        """Send a part of the body. Raises `Gone` for a client that has stopped reading.

        Clients that strip what they read (`vllm bench serve` 0.32) lose the end of a comment and
        take what follows for a part of it. So what follows begins with another comment, which ends
        the first.
        """
        self.written_s = time.monotonic()
        if self._commented:
            self._commented = False
            data = b":\n\n" + data
        await self._write({"type": "http.response.body", "body": data, "more_body": more})

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise Gone from None

    async def unless_left(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if the client leaves meanwhile, cancel it and raise `Gone`."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.left())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone
            task.result()
        finally:
            watch.cancel()
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


class Api:
    """The ASGI application. Used from one event loop only."""

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        version: str,
        access: Access | None = None,
        limits: ApiLimits | None = None,
        echo_request_id: bool = True,
    ) -> None:
        """`access`: by default anybody may send requests. `echo_request_id`: off where a proxy in
        front adds `x-request-id` itself.
        """
        self.limits = limits or ApiLimits()
        self.admission = Admission(self.limits)
        self.metrics = ApiMetrics()
        self.metrics.open.set_function(lambda: self.admission.num_open)
        self.gather_metrics: Gather | None = None  # of all processes that serve, including this one
        self._client = client
        self._served = Served(
            name=model_name, created=int(time.time()), builder=client.builder, tokenizer=tokenizer
        )
        self._version = version
        self._echo_request_id = echo_request_id
        self._access = access or Access()
        self._uploads = Uploads(self.limits)
        # A few threads, so that little memory is used at a time.
        self._reading = ThreadPoolExecutor(READERS, "reading")
        self._writing = Workers("writing", WRITERS)
        self._tokenizing = Workers("tokenizing", TOKENIZERS, MAX_TOKENIZING)
        self._tracing = Workers("traces", 1, MAX_TRACING)
        # A thread of its own: in the common pool, the work would wait behind a burst of requests.
        self._asking = ThreadPoolExecutor(1, "stats")
        self._stats: asyncio.Future[EngineStats] | None = None
        self._stats_at_s = 0.0
        self._document = encode_json(openapi(version)).encode()
        self._paths: dict[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/responses": ("POST", self._responses),
            MESSAGES_PATH: ("POST", self._messages),
            f"{MESSAGES_PATH}/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._models),
            f"/v1/models/{model_name}": ("GET", self._model),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/live": ("GET", self._live),
            "/version": ("GET", self._show_version),
            "/metrics": ("GET", self._show_metrics),
            "/debug/trace": ("GET", self._trace),
            "/openapi.json": ("GET", self._openapi),
            **dict.fromkeys(page.FILES, ("GET", self._page)),
        }
        self._pages = page.load()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        limit_s = self.limits.slow_reader_timeout_s
        exchange = Exchange(scope, receive, send, limit_s, echo_id=self._echo_request_id)
        status = 499
        try:
            await self._dispatch(exchange)
            status = exchange.status or 500
        except Gone:
            pass
        except Exception as error:
            status = status_of(error)
            await self._refuse(exchange, error)
        finally:
            path = exchange.path if exchange.path in self._paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()

    async def _dispatch(self, exchange: Exchange) -> None:
        self._access.check_site(exchange.headers)
        if exchange.path not in OPEN_PATHS:
            self._access.check_fetch(exchange.headers)
            self._access.check_key(exchange.headers)
        if exchange.path not in self._paths:
            if exchange.path.startswith("/v1/models/"):
                self._served.check_name(exchange.path.removeprefix("/v1/models/"))
            known = ", ".join(self._paths)
            raise HttpError(404, f"there is nothing at {exchange.path[:200]!r}; paths are {known}")
        method, handler = self._paths[exchange.path]
        if exchange.method != method:
            raise HttpError(405, f"{exchange.path} takes {method}, not {exchange.method}")
        if method == "POST":
            check_content_type(exchange.headers)
        await handler(exchange)

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error, as an event if the stream has begun."""
        with contextlib.suppress(Gone):
            if exchange.writer is not None and exchange.status is not None:
                await exchange.write(exchange.writer.error(error), more=False)
                return
            is_messages = exchange.path.startswith(MESSAGES_PATH)
            body = messages_body_of(error) if is_messages else body_of(error)
            data = encode_json(body).encode()
            await exchange.answer(status_of(error), data, headers=headers_of(error))

    # -- generating --------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(
            exchange, ChatRequest, lambda r: chat_job(r, self._served, self.limits.max_messages)
        )

    async def _complete(self, exchange: Exchange) -> None:
        await self._generate(exchange, CompletionRequest, lambda r: completion_job(r, self._served))

    async def _responses(self, exchange: Exchange) -> None:
        most = self.limits.max_messages
        await self._generate(
            exchange, ResponsesRequest, lambda r: responses_job(r, self._served, most)
        )

    async def _messages(self, exchange: Exchange) -> None:
        most = self.limits.max_messages
        await self._generate(
            exchange, MessagesRequest, lambda r: messages_job(r, self._served, most)
        )

    async def _count_tokens(self, exchange: Exchange) -> None:
        most = self.limits.max_messages
        await self._compute(
            exchange, CountTokensRequest, lambda r: count_tokens(r, self._served, most)
        )

    async def _generate(
        self, exchange: Exchange, model: type[Request], job_of: Callable[[Request], Job]
    ) -> None:
        """Run the job of the request in the body. While the server is full, no body is parsed: a
        refusal must take as little as possible from the requests that run.
        """
        with self._uploads.begin() as upload:
            job = await self._read(exchange, upload, model, job_of, self.admission.check_room)

            def make_writer(generations: list[Generation]) -> Writer:
                upload.end()  # the prompts are token ids now
                return job.make_writer(generations)

            await self._run(exchange, dataclasses.replace(job, make_writer=make_writer))

    async def _compute(
        self, exchange: Exchange, model: type[Request], answer: Callable[[Request], dict[str, Any]]
    ) -> None:
        """Answer a request with what the tokenizer makes of it, in a thread. Raises
        `OverloadedError`, before a body is parsed, if too many such requests wait.
        """
        before = self._tokenizing.check_room
        with self._uploads.begin() as upload:
            request = await self._read(
                exchange, upload, model, lambda request: request, before=before
            )
            work = self._tokenizing.run(lambda: b"".join(json_pieces(answer(request))))
            data = await work
        await exchange.answer(200, data)

    async def _read(
        self,
        exchange: Exchange,
        upload: Upload,
        model: type[Request],
        convert: Callable[[Request], Result],
        before: Callable[[], None] | None = None,
    ) -> Result:
        """What `convert` makes of the request in the body; `before` is called when the body is
        complete. A large body is read in a thread.
        """
        body = await exchange.body(upload)
        if before is not None:
            before()

        def make() -> Result:
            return convert(read(model, body, self.limits.max_messages))

        if len(body) <= READ_INLINE_BYTES:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._reading, make)

    async def _run(self, exchange: Exchange, job: Job) -> None:
        if session := exchange.headers.get(SESSION_HEADER):
            for prompt in job.prompts:
                assert isinstance(prompt, dict)
                prompt["session_id"] = session[:200].decode("latin-1")
        await exchange.unless_left(self._run_admitted(exchange, job))

    async def _run_admitted(self, exchange: Exchange, job: Job) -> None:
        """Nothing is awaited between the last write and the end of the admission: a client may send
        its next request as soon as it has its answer.
        """
        with self.admission.admit(job.num_outputs):
            await (self._stream if job.streamed else self._answer_whole)(exchange, job)

    async def _answer_whole(self, exchange: Exchange, job: Job) -> None:
        timing = Timing(self.metrics)
        generations = await self._client.submit_async(job.prompts, job.params)
        try:
            job.check(generations)
            writer = job.make_writer(generations)
        except BaseException:
            self._client.abort(generations)
            raise
        outputs = await self._client.wait_async(generations)
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.metrics.output_tokens.inc(sum(len(done.token_ids) for done in output.outputs))
        timing.end()
        if job.num_written(generations) <= WRITE_INLINE_TOKENS:
            body = b"".join(json_pieces(writer.body()))
        else:
            body = await self._writing.run(lambda: b"".join(json_pieces(writer.body())))
        await exchange.answer(200, body)

    async def _stream(self, exchange: Exchange, job: Job) -> None:
        timing = Timing(self.metrics)
        async with self._client.stream(job.prompts, job.params) as (generations, chunks):
            job.check(generations)
            exchange.writer = writer = job.make_writer(generations)
            num_outputs = len(generations[0].outputs)
            keeping = asyncio.create_task(self._keep_alive(exchange))
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

    async def _keep_alive(self, exchange: Exchange) -> None:
        """Send a comment from time to time while a stream is silent, so that no proxy on the way
        takes it for dead.
        """
        while True:
            seen_s = exchange.written_s
            await asyncio.sleep(self.limits.keep_alive_s)
            if exchange.written_s == seen_s:
                with contextlib.suppress(Gone):  # the stream's next write raises it too
                    await exchange.comment()

    # -- the rest ----------------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange) -> None:
        most = self.limits.max_messages
        await self._compute(exchange, TokenizeRequest, lambda r: tokenize(r, self._served, most))

    async def _detokenize(self, exchange: Exchange) -> None:
        await self._compute(exchange, DetokenizeRequest, lambda r: detokenize(r, self._served))

    async def _models(self, exchange: Exchange) -> None:
        body = {"object": "list", "data": [model_card(self._served)]}
        await exchange.answer(200, encode_json(body).encode())

    async def _model(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode_json(model_card(self._served)).encode())

    async def _live(self, exchange: Exchange) -> None:
        await exchange.answer(200, b"{}")

    async def _health(self, exchange: Exchange) -> None:
        """Ready means that the ranks answer, work makes progress, and requests are accepted."""
        if self.admission.is_draining:
            raise OverloadedError("the server is shutting down")
        stats = await self.stats()
        if not stats.is_ready:
            raise OverloadedError(
                f"the ranks are {stats.state}, and the last result came {stats.step_age_s:.1f} s"
                f" ago; requests are kept and will continue. {stats.waits_for}".rstrip(". ")
            )
        body = {"state": stats.state, "step_age_s": round(stats.step_age_s, 3)}
        await exchange.answer(200, encode_json(body).encode())

    async def _show_version(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode_json({"version": self._version}).encode())

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._document)

    async def _page(self, exchange: Exchange) -> None:
        body, content_type = self._pages[exchange.path]
        await exchange.answer(200, body, content_type, page.HEADERS)

    async def _trace(self, exchange: Exchange) -> None:
        """The last steps of this process' engine as a Chrome trace; `?seconds=10` says how many."""
        [text] = exchange.query.get("seconds", ["10"])[:1]
        try:
            seconds = float(text)
        except ValueError:
            raise RequestError(f"seconds must be a number, got {text[:50]!r}", "seconds") from None

        def write() -> bytes:
            return b"".join(json_pieces(chrome_trace(self._client.records(seconds))))

        await exchange.answer(200, await self._tracing.run(write))

    async def _show_metrics(self, exchange: Exchange) -> None:
        many = await self.gather_metrics() if self.gather_metrics else [await self.families()]
        body = metrics_module.render(metrics_module.merge(many))
        await exchange.answer(200, body, metrics_module.CONTENT_TYPE)

    async def families(self) -> list[Family]:
        """The metrics of this process, and those of its engine if it answers."""
        found = self.metrics.families()
        with contextlib.suppress(EaglerayError):
            found += engine_families(await self.stats())
        return found

    async def stats(self) -> EngineStats:
        """The engine's counters, at most `STATS_AGE_S` old. Raises `EaglerayError` for an engine
        that is dead or does not answer.
        """
        now_s = time.monotonic()
        if self._stats is None or now_s - self._stats_at_s > STATS_AGE_S:
            self._stats_at_s = now_s
            loop = asyncio.get_running_loop()
            self._stats = asyncio.ensure_future(
                loop.run_in_executor(self._asking, self._client.stats)
            )
        try:
            return await asyncio.wait_for(asyncio.shield(self._stats), API_STATS_TIMEOUT_S)
        except TimeoutError:
            raise OverloadedError(
                f"the engine did not answer within {API_STATS_TIMEOUT_S:g} s"
            ) from None

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait until the running ones have ended, for at most `limit_s`;
        returns how many outputs are left.
        """
        self.admission.is_draining = True
        until_s = time.monotonic() + limit_s
        while self.admission.num_open and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        return self.admission.num_open


async def _in_turns(writer: Writer, items: list[Item]) -> bytes:
    """The events of these chunks. Others get a turn while many are made."""
    events, began_s = [], time.monotonic()
    for place, piece in ((place, piece) for place, chunk in items for piece in chunk.pieces()):
        events.append(writer.events(place, piece))
        if time.monotonic() - began_s > STREAM_TURN_S:
            await asyncio.sleep(0)
            began_s = time.monotonic()
    return b"".join(events)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
