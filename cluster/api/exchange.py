"""One request and its answer. A client that leaves or stops reading ends both with `Gone`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from cluster.api.errors import HttpError
from cluster.api.limits import Upload
from cluster.api.replies import Writer, encode_json

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_STREAM_START = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}


class JsonResponse(JSONResponse):
    """An answer in the JSON of streams: on one line, with null for numbers that JSON lacks."""

    def render(self, content: object) -> bytes:
        return encode_json(content).encode()


class Gone(Exception):
    """The client has left, or has stopped reading."""


class Exchange:
    """One request and its answer. What sends something raises `Gone` for a client that has taken
    nothing for `timeout_s`.

    scope: the request as ASGI has it, with the path below a route prefix. answer_headers: sent with
    the answer, whatever that becomes. status: None until the answer has begun. writer: that of a
    stream. written_s: when something was last written.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, timeout_s: float, *, echo_id: bool
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        # With "app", Starlette's routes raise what they refuse.
        routed = {"path": self.path, "root_path": "", "app": None, "exchange": self}
        self.scope: Scope = {**scope, **routed}
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.answer_headers: dict[str, str] = {}
        if echo_id:
            given_id = self.headers.get(b"x-request-id") or secrets.token_hex(16).encode()
            self.answer_headers["x-request-id"] = given_id[:200].decode("latin-1")
        self.status: int | None = None
        self._start: Message = _STREAM_START
        self.writer: Writer | None = None
        self.written_s = 0.0
        self._commented = False  # whether a comment was last written
        self.receive, self._send, self._timeout_s = receive, send, timeout_s

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
                    message = await self.receive()
            except TimeoutError:
                raise HttpError(408, upload.reason()) from None
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            upload.add(len(parts[-1]))
            more = message.get("more_body", False)
        return b"".join(parts)

    async def answer(self, response: Response) -> None:
        """Send a whole answer."""
        await response(self.scope, self.receive, self.send)

    async def send(self, message: Message) -> None:
        """ASGI's `send` for whole answers. To HEAD, they have no body."""
        if message["type"] == "http.response.start":
            self._start = message  # it is sent with the body
        elif self.method == "HEAD":
            await self._write({**message, "body": b""})
        else:
            await self._write(message)

    async def event(self, data: bytes, *, more: bool = True) -> None:
        """Send events of a stream, and begin the stream with the first ones.

        Clients that strip what they read (`vllm bench serve` 0.32) lose the end of a comment and
        take what follows for a part of it. So what follows begins with another comment, which ends
        the first.
        """
        self.written_s = time.monotonic()
        if self._commented:
            self._commented = False
            data = b":\n\n" + data
        await self._write({"type": "http.response.body", "body": data, "more_body": more})

    async def keep_alive(self, pause_s: float) -> None:
        """While the stream is silent, send a line that clients ignore after each pause, so that no
        proxy on the way takes it for dead.
        """
        while True:
            seen_s = self.written_s
            await asyncio.sleep(pause_s)
            if self.written_s == seen_s:
                with contextlib.suppress(Gone):  # the stream's next write raises it too
                    await self.event(b": waiting\n\n")
                    self._commented = True

    async def unless_left(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if the client leaves meanwhile, cancel it and raise `Gone`. The body must
        have been read.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Gone
            task.result()
        finally:
            watch.cancel()
            if task.cancel():
                with contextlib.suppress(BaseException):
                    await task
            del task  # its error, whose traceback has this frame, would keep it, and so itself

    async def _left(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self.status is None:
                    self.status = self._start["status"]
                    await self._send({**self._start, "headers": self._start_headers()})
                await self._send(message)
        except (TimeoutError, OSError):
            raise Gone from None

    def _start_headers(self) -> list[tuple[bytes, bytes]]:
        added = self.answer_headers.items()
        pairs = [
            (name.encode("latin-1"), text.encode("latin-1", "replace")) for name, text in added
        ]
        return self._start["headers"] + pairs  # type: ignore[no-any-return]
