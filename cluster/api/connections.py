"""HTTP connections within bounds: uvicorn's protocol, which has none of its own for heads,
pipelined requests and slow clients.

A connection that sends no complete head in time is closed, as is one whose request goes on after
its answer; a head that is too large is answered with 431. The time of a body is the matter of
`exchange.py`, which knows whether it wants one. A connection that takes nothing of its answer for
some time is dropped by the system.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from cluster.api.app import Api
from cluster.api.errors import HttpError, http_error, openai_error_body
from cluster.api.exchange import WRITE_NOW_KEY, JsonResponse
from scheduler.bounds import HTTP_BOUNDS, short_repr
from scheduler.errors import EaglerayError, OverloadedError

KEEP_ALIVE_S = 75  # an idle connection stays open for longer than that of common proxies (60 s)
# Bytes that may frame a chunk of a body, per byte of it; a chunk of one byte takes 6.
_MAX_FRAMING_PER_BYTE = 8


class _SmallEvent(asyncio.Event):
    """An event for few waiters, in a list: the base's deque takes 0.7 KiB if it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters: list[asyncio.Future[bool]] = []  # type: ignore[assignment]


class _Http11Cycle(RequestResponseCycle):
    """An exchange of HTTP/1.1."""

    def write_now(self, data: bytes) -> bool:
        """Write a part of the body of an answer that has begun, as one chunk. False, with nothing
        written, where the answer has not begun, or would have to wait for the client, or the client
        has left. Without data: whether it could be written.
        """
        if self.flow.write_paused or self.disconnected or not self.chunked_encoding:
            return False
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _Http10Cycle(RequestResponseCycle):
    """An exchange of HTTP/1.0. That has no chunks, which the base would send: an answer ends with
    the connection, so each part may have any length.
    """

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Pipeline(list[Any]):
    """The few requests that wait, last first. The base's deque takes 0.7 KiB if it is empty."""

    def appendleft(self, request: Any) -> None:
        """As of a deque."""
        self.insert(0, request)


class _Flow(FlowControl):
    """Whether more may be written. An event, of 0.8 KiB, is made only for clients that are slow."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._is_writable_event: asyncio.Event | None = None  # type: ignore[assignment]

    async def drain(self) -> None:
        if self._is_writable_event is not None:
            await self._is_writable_event.wait()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._is_writable_event = self._is_writable_event or asyncio.Event()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._is_writable_event is not None:
            self._is_writable_event.set()
            self._is_writable_event = None


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The parser calls the methods `on_...` from within `data_received`.

    Its own attributes have slots, since an object with more than 30 others takes 1 KiB more.
    """

    __slots__ = (
        "_excess_framing_bytes",
        "_has_head_begun",
        "_head_bytes",
        "_is_reading_body",
        "_is_reading_head",
        "_num_headers",
        "_timer",
        "_unfinished_head_bytes",
    )

    # A test shortens these.
    head_timeout_s: float = HTTP_BOUNDS["head time"].maximum
    unread_body_timeout_s: float = HTTP_BOUNDS["rest time"].maximum
    max_connections: int = HTTP_BOUNDS["connections"].maximum
    # `server_config` sets these. The second: those without a complete request, longest so first.
    slow_reader_timeout_s: float
    connections_without_request: ClassVar[dict[BoundedProtocol, None]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._running_cycle: RequestResponseCycle | None = None  # `cycle` is the one read last
        self._is_reading_head = self._is_reading_body = False
        self._has_head_begun = False  # in the bytes received last
        self._head_bytes = self._num_headers = 0  # parsed of the present request, with trailers
        # Received after the data that began it; the parser says nothing of a header without end.
        self._unfinished_head_bytes = 0
        self._excess_framing_bytes = 0  # received of its body, less what that may take

    @property
    def _is_answering(self) -> bool:
        """Whether there is a request without a complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if option := getattr(socket, "TCP_USER_TIMEOUT", None):  # of Linux alone
            timeout_ms = int(1000 * self.slow_reader_timeout_s)
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, timeout_ms)
        if len(self.connections) > self.max_connections:
            if not self.connections_without_request:
                reason = f"at most {self.max_connections} connections are possible"
                self._refuse(OverloadedError(f"{reason}, and all have requests; try again later"))
                return
            oldest_connection = next(iter(self.connections_without_request))
            del self.connections_without_request[oldest_connection]
            oldest_connection.transport.abort()
        self.connections_without_request[self] = None
        self._close_after(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_without_request.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)
        # The base tells only the exchange whose request was read last.
        if self._running_cycle is not None:
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and not (self._is_reading_body or self._is_answering):
            self._close_after(self.head_timeout_s)
        was_in_body = self._is_reading_body
        self._has_head_begun = False
        if was_in_body:
            self._excess_framing_bytes += len(data)
        self._feed(data)
        if self.transport.is_closing():
            return
        max_bytes = HTTP_BOUNDS["head"].maximum
        if self._is_reading_head and not self._has_head_begun:
            self._unfinished_head_bytes += len(data)
            if self._unfinished_head_bytes > max_bytes:
                self._refuse(_head_too_large())
        elif was_in_body and self._is_reading_body and self._excess_framing_bytes > max_bytes:
            self.transport.close()

    def _feed(self, data: bytes) -> None:
        """Parse, as the base does it, but read a request that asks for another protocol as if it
        did not ask: the parser would take its body for that protocol.
        """
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_for_upgrade():
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base
            except httptools.HttpParserError as error:
                self.logger.warning("Invalid HTTP request received.")
                refusal = error.__context__  # by one of the methods below
                if not isinstance(refusal, EaglerayError):
                    refusal = HttpError(400, "this is not a request of HTTP/1.1 or HTTP/1.0")
                self._refuse(refusal)
                return

    def _asks_for_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= HTTP_BOUNDS["pipelined"].maximum:
            raise OverloadedError("too many requests wait for answers of this connection")
        super().on_message_begin()
        self._is_reading_head = self._has_head_begun = True
        self._head_bytes = self._num_headers = self._unfinished_head_bytes = (
            self._excess_framing_bytes
        ) = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._count_head(len(self.url))
        self._check_transfer_codings()
        self._stop_timer()
        self._unset_keepalive_if_required()  # this head may have come with the rest of a body
        self._is_reading_head, self._is_reading_body = False, True
        super().on_headers_complete()
        # The base makes the cycle, whose task has not begun.
        self.cycle.message_event = _SmallEvent()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Http10Cycle
            self.cycle.waiting_for_100_continue = False
        else:
            cycle: Any = self.cycle
            cycle.__class__ = _Http11Cycle
            cycle.scope[WRITE_NOW_KEY] = cycle.write_now
        if not self.pipeline:
            self._running_cycle = self.cycle

    def _check_transfer_codings(self) -> None:
        """Raise `HttpError` for a body that is more than cut into chunks, which is all that the
        parser undoes.
        """
        values = [value for name, value in self.headers if name == b"transfer-encoding"]
        codings = [coding.strip().lower() for coding in b",".join(values).split(b",")]
        unknown_codings = [coding for coding in codings if coding not in (b"", b"chunked")]
        if unknown_codings:
            raise HttpError(
                501 if codings[-1] == b"chunked" else 400,
                f"transfer-encoding: {short_repr(unknown_codings[0].decode('latin-1'))} is not"
                " supported, only chunked is; a compressed body names its coding in"
                " content-encoding",
            )

    def on_body(self, body: bytes) -> None:
        self._excess_framing_bytes -= _MAX_FRAMING_PER_BYTE * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._is_reading_body = False
        if self._is_answering:
            self.connections_without_request.pop(self, None)
        else:  # it was answered before, which has begun a timer that the body has ended
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._running_cycle = self.pipeline[-1][0] if self.pipeline else None
        if not self._is_answering:
            self.connections_without_request[self] = None
            # What is left of a body is read, so that the client sees the answer, but not forever.
            if self._is_reading_body:
                self._close_after(self.unread_body_timeout_s)
        super().on_response_complete()

    def _refuse(self, error: EaglerayError) -> None:
        """Close the connection, for which there is no exchange, with an answer, unless this would
        end up in the middle of another.
        """
        if not self._is_answering:
            refusal = http_error(error)
            headers = {"connection": "close"} | refusal.headers
            answer = JsonResponse(openai_error_body(refusal), refusal.status, headers)
            lines = [b"%s: %s\r\n" % header for header in answer.raw_headers]
            head = b"".join([STATUS_LINE[answer.status_code], *lines])
            self.transport.write(head + b"\r\n" + answer.body)
        self.transport.close()

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if (
            self._head_bytes > HTTP_BOUNDS["head"].maximum
            or self._num_headers > HTTP_BOUNDS["headers"].maximum
        ):
            raise _head_too_large()

    def _close_after(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(limit_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head_too_large() -> HttpError:
    max_bytes, max_headers = HTTP_BOUNDS["head"].maximum, HTTP_BOUNDS["headers"].maximum
    reason = f"at most {max_bytes} bytes and {max_headers} headers are possible"
    return HttpError(431, f"the headers are too large; {reason}")


def server_config(app: Api, **options: Any) -> uvicorn.Config:
    """How `app` is served: within the bounds above."""

    class Protocol(BoundedProtocol):
        __slots__ = ()
        slow_reader_timeout_s = app.limits.slow_reader_timeout_s
        connections_without_request: ClassVar[dict[BoundedProtocol, None]] = {}

    return uvicorn.Config(
        app,
        http=Protocol,
        lifespan="off",
        ws="none",
        access_log=False,
        proxy_headers=False,  # nothing here depends on them
        # uvicorn's own would close all handlers of this process, those of Ray Serve too, whose
        # controller, when it has died and starts again, asks each replica for the file of its log.
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )
