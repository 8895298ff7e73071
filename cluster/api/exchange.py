"""One request and its answer. A client that leaves ends both with `ClientDisconnected`; one that
stops reading is made to leave by `connections.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from cluster.api.admission import Upload
from cluster.api.errors import HttpError
from cluster.api.replies import Writer, encode_json, json_pieces
from cluster.api.threads import BoundedThreadPool

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
# In an ASGI scope: what writes a part of the body of an answer at once, or says that it cannot.
WRITE_NOW_KEY = "eagleray.write_now"
_STREAM_START = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}


class JsonResponse(JSONResponse):
    """An answer in the JSON of streams: on one line, with null for numbers that JSON lacks."""

    def render(self, content: object) -> bytes:
        return encode_json(content).encode()


async def json_response(
    make: Callable[[], object], threads: BoundedThreadPool, *, inline: bool = False
) -> Response:
    """An answer with what `make` returns, made and written as `BoundedThreadPool.run` does it."""
    data = await threads.run(lambda: b"".join(json_pieces(make())), inline=inline)
    return Response(data, media_type="application/json")


class ClientDisconnected(Exception):
    """The client has left."""


class Exchange:
    """One request and its answer.

    scope: the request as ASGI has it, with the path below a route prefix. answer_headers: sent with
    the answer, whatever that becomes. upload: set where a body is wanted. arrival_s: when the head
    of the request was there, by `time.perf_counter`. status: None until the answer has begun.
    writer: that of a stream. last_write_s: when a stream was last written to, by `time.monotonic`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, adds_request_id: bool
    ) -> None:
        # Of a server that can, see `connections.py`. What it belongs to has the scope, so the scope
        # must not keep it.
        self._write_now: Callable[[bytes], bool] = scope.pop(WRITE_NOW_KEY, _cannot_write)
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        # With "app", Starlette's routes raise what they refuse.
        scope_changes = {"path": self.path, "root_path": "", "app": None, "exchange": self}
        self.scope: Scope = {**scope, **scope_changes}
        headers = scope["headers"]  # pairs of bytes
        self.headers = {k.decode("latin-1"): v.decode("latin-1").strip() for k, v in headers}
        self.answer_headers: dict[str, str] = {}
        if adds_request_id:
            request_id = self.headers.get("x-request-id") or secrets.token_hex(16)
            self.answer_headers["x-request-id"] = request_id[:200]
        self.upload: Upload
        self.arrival_s = time.perf_counter()
        self.status: int | None = None
        self.writer: Writer | None = None
        self.last_write_s = 0.0
        self._was_comment_last = False  # whether a comment was last written
        self._timer: asyncio.TimerHandle | None = None
        self._comment_task: asyncio.Task[None] | None = None
        self.receive, self._send = receive, send

    async def body(self) -> bytes:
        """The body of the request, counted by `upload`. Raises `HttpError` 413 for one that is too
        long, 408 for one that takes too long, `OverloadedError`, and `ClientDisconnected`.
        """
        upload = self.upload
        upload.check_length(int(self.headers.get("content-length", 0)))
        parts, has_more = [], True
        while has_more:
            try:
                async with asyncio.timeout_at(upload.deadline_s):
                    message = await self.receive()
            except TimeoutError:
                raise HttpError(408, upload.timeout_message()) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parts.append(message.get("body", b""))
            upload.add(len(parts[-1]))
            has_more = message.get("more_body", False)
        return b"".join(parts)

    async def answer(self, response: Response) -> None:
        """Send a whole answer."""
        await response(self.scope, self.receive, self.send)

    async def send(self, message: Message) -> None:
        """ASGI's `send`. It adds `answer_headers`, and takes the body from answers to HEAD."""
        message = {**message}
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self.answer_headers)
        elif self.method == "HEAD":
            message["body"] = b""
        await self._send(message)

    async def send_events(self, data: bytes, *, has_more: bool = True) -> None:
        """Send events of a stream, and begin the stream with the first ones."""
        self.last_write_s = time.monotonic()
        if self.status is None:
            await self.send(_STREAM_START)
        data = self._prepend_comment_end(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": has_more})

    @property
    def can_write_now(self) -> bool:
        """Whether `send_events_nowait` may be called: a stream has begun, and nothing waits."""
        return self.status is not None and self._write_now(b"")

    def send_events_nowait(self, data: bytes) -> None:
        """As `send_events`, without waiting, where `can_write_now`."""
        self.last_write_s = time.monotonic()
        self._write_now(self._prepend_comment_end(data))

    def _prepend_comment_end(self, data: bytes) -> bytes:
        """Clients that strip what they read (`vllm bench serve` 0.32) lose the end of a comment and
        take what follows for a part of it. So what follows begins with a comment, which ends it.
        """
        if not self._was_comment_last:
            return data
        self._was_comment_last = False
        return b":\n\n" + data

    def keep_alive(self, pause_s: float) -> None:
        """While the stream is silent, send a line that clients ignore after each pause, so that no
        proxy on the way takes it for dead; until `end_keep_alive`. Timers, since the task of a
        coroutine that sleeps takes five times the memory.
        """
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_s, self._comment_if_silent, self.last_write_s, pause_s)

    def _comment_if_silent(self, earlier_write_s: float, pause_s: float) -> None:
        if self.last_write_s == earlier_write_s:
            self._comment_task = asyncio.create_task(self._send_comment(pause_s))
        else:
            self.keep_alive(pause_s)

    async def _send_comment(self, pause_s: float) -> None:
        await self.send_events(b": waiting\n\n")
        self._was_comment_last = True
        self.keep_alive(pause_s)

    def end_keep_alive(self) -> None:
        for pending in (self._timer, self._comment_task):
            if pending is not None:
                pending.cancel()

    async def run_until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if the client leaves meanwhile, cancel it and raise `ClientDisconnected`. The
        body must have been read.
        """
        task = asyncio.ensure_future(work)
        disconnect_task = asyncio.ensure_future(self._wait_for_disconnect())
        disconnect_task.add_done_callback(partial(_cancel, task))
        try:
            await task
        except asyncio.CancelledError:
            if disconnect_task.done():
                raise ClientDisconnected from None
            raise
        finally:
            disconnect_task.cancel()
            del task  # its error, whose traceback has this frame, would keep it, and so itself

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _cannot_write(data: bytes) -> bool:
    return False


def _cancel(task: asyncio.Future[None], _: object) -> None:
    task.cancel()
