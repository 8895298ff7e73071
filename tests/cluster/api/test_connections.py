"""Connections that send too much, too slowly, or nothing, on a real port."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging.handlers
import re
import socket
import time
from collections.abc import Iterator

import pytest

from cluster.api import connections
from cluster.api.admission import ApiLimits
from cluster.api.connections import BoundedProtocol
from tests.cluster.api.scripted import Server, serve, wait_until

SHORT_S = 0.3
BODY = b'{"prompt": "Hi", "max_tokens": 2}'
LONG = b'{"prompt": "Hi", "max_tokens": 300}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose limits on time are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedProtocol, "head_timeout_s", SHORT_S)
        patch.setattr(BoundedProtocol, "unread_body_timeout_s", SHORT_S)
        limits = ApiLimits(
            small_body_delay_s=SHORT_S,
            large_body_delay_s=SHORT_S,
            max_total_body_bytes=100_000,
            max_small_body_bytes=20_000,
        )
        with serve(limits=limits) as running:
            yield running


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the same limits on bodies as `server`, but with more time."""
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 30.0)
    monkeypatch.setattr(BoundedProtocol, "unread_body_timeout_s", 30.0)
    limits = ApiLimits(max_total_body_bytes=100_000, max_small_body_bytes=20_000)
    with serve(limits=limits) as running:
        yield running


def connect(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=5.0)


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    while part := connection.recv(65_536):
        answer += part
    return answer


def send_all(connection: socket.socket, part: bytes, times: int) -> bytes:
    """Send a part many times, until the server has had enough. Returns its answer."""
    answer = b""
    try:
        for _ in range(times):
            connection.sendall(part)
        answer = answer_of(connection)
    except TimeoutError:
        raise  # it neither answers nor closes
    except OSError:  # closed while there was more to send
        pass
    return answer


def test_a_connection_that_sends_nothing_is_closed(server: Server) -> None:
    with connect(server) as connection:
        began_s = time.monotonic()
        assert answer_of(connection) == b""
        assert SHORT_S / 2 < time.monotonic() - began_s < 10 * SHORT_S


@pytest.mark.parametrize(("num_requests", "num_answers"), [(17, 17), (18, 0)])
def test_a_connection_with_too_many_requests_in_line_is_closed_without_an_answer(
    server: Server, num_requests: int, num_answers: int
) -> None:
    last = b"Connection: close\r\n" if num_answers else b""
    requests = [HEAD] * (num_requests - 1) + [HEAD + last]
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    with connect(server) as connection:
        connection.sendall(b"".join(head + length + BODY for head in requests))
        assert answer_of(connection).count(b"HTTP/1.1 200 OK") == num_answers


@pytest.mark.parametrize("drip", [b"X-A: b\r\n", b"x"])
def test_a_head_that_comes_too_slowly_is_given_up(server: Server, drip: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD)
        began_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began_s + 5:
                connection.sendall(drip)
                time.sleep(0.02)
        assert time.monotonic() - began_s < 3


def test_blank_lines_do_not_keep_an_idle_connection_open(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        time.sleep(2 * SHORT_S)  # longer than a head may take, but it is idle
        began_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began_s + 5:
                connection.sendall(b"\r\n")
                time.sleep(0.02)
        assert time.monotonic() - began_s < 3


@pytest.mark.parametrize(
    ("start", "part", "times"),
    [
        (HEAD, b"X-Long: " + b"a" * 60_000, 1000),
        (HEAD + b"X-Long: ", b"a" * 60_000, 1000),
        (HEAD, b"X-A: b\r\n", 300),
        (b"GET /", b"a" * 60_000, 1000),
    ],
)
def test_a_head_that_is_too_large_is_refused(
    server: Server, start: bytes, part: bytes, times: int
) -> None:
    with connect(server) as connection:
        connection.sendall(start)
        answer = send_all(connection, part, times)
    if answer:  # otherwise the system has dropped it, as there was more to read
        assert answer.startswith(b"HTTP/1.1 431")
        assert (
            "headers are too large"
            in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        )


def test_a_head_just_too_large_gets_the_answer(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"X-A: b\r\n" * 300 + b"\r\n")
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 431") and b"at most 65536 bytes and 256 headers" in answer


@pytest.mark.parametrize("length", [17, 100_000])
def test_an_upgrade_to_http_2_is_ignored(server: Server, length: int) -> None:
    """`curl --http2` and Java's client ask for it with every first request."""
    request = (
        HEAD
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        + b"Content-Length: %d\r\n\r\n" % len(BODY)
        + BODY
    )
    last = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        sent = request * 3 + last
        for start in range(0, len(sent), length):
            connection.sendall(sent[start : start + length])
            time.sleep(0.001)
        answers = answer_of(connection)
    assert answers.count(b"HTTP/1.1 200") == 4 and answers.count(b'"text_completion"') == 3


@pytest.mark.parametrize(
    ("codings", "status", "reason"),
    [
        (b"gzip, chunked", 501, b"transfer-encoding: 'gzip' is not supported, only chunked is"),
        (b"Deflate\r\nTransfer-Encoding: chunked", 501, b"'deflate' is not supported"),
        (b"gzip", 400, b"'gzip' is not supported"),
        (b", Chunked", 200, b"text_completion"),
    ],
)
def test_a_body_in_another_transfer_coding_than_chunks_is_refused(
    server: Server, codings: bytes, status: int, reason: bytes
) -> None:
    head = HEAD + b"Connection: close\r\nTransfer-Encoding: %b\r\n\r\n" % codings
    with connect(server) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and reason in answer


def test_a_request_for_a_tunnel_is_refused(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"CONNECT a.example:80 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_of(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("length", [1000, 40_000, 64_000])
@pytest.mark.parametrize(("num_headers", "value"), [(66, b"a" * 950), (1, b"a" * 62_700)])
def test_a_head_within_its_bound_is_read_in_whatever_pieces_it_comes(
    patient: Server, length: int, num_headers: int, value: bytes
) -> None:
    lines = b"".join(b"X-%d: %s\r\n" % (place, value) for place in range(num_headers))
    head = b"GET /live HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n"
    assert 62_000 < len(head) < 65_536
    with connect(patient) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(head), length):
            connection.sendall(head[start : start + length])
            time.sleep(0.002)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "framing",
    [
        b"1;" + b"a" * 60_000,  # the extension of a chunk, without end
        b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\na\r\n" * 1000,
        b"0\r\n" + b"X-Trailer: b\r\n" * 1000,
    ],
)
def test_what_frames_a_body_is_bounded(server: Server, framing: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        began_s = time.monotonic()
        send_all(connection, framing, 1000)
        assert time.monotonic() - began_s < 3


def test_a_body_in_small_chunks_is_read(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        body = BODY + b" " * 20_000
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        connection.sendall(chunks + b"0\r\n\r\n")
        assert answer_of(connection).startswith(b"HTTP/1.1 200")


def test_a_body_that_stands_still_gets_408_and_the_connection_ends(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"1 bytes of the body came within" in answer


def test_a_slow_upload_that_makes_progress_is_read(server: Server) -> None:
    body = BODY + b" " * 12_000
    with connect(server) as connection:
        head = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        connection.sendall(head)
        for start in range(0, len(body), 1200):  # in 3 times what a body may take without progress
            connection.sendall(body[start : start + 1200])
            time.sleep(0.09)
        assert answer_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("drip", [b"", b" "])
def test_a_fast_start_of_a_body_earns_no_long_pause(server: Server, drip: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 50_000)
        connection.settimeout(0.02)
        began_s, answer = time.monotonic(), b""
        while not answer and time.monotonic() < began_s + 5:
            connection.sendall(drip)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began_s < 3  # the 50,000 bytes would be 6 seconds


def test_the_rest_of_a_refused_body_is_not_awaited_forever(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 99999999\r\n\r\n")
        answer, began_s = connection.recv(65_536), time.monotonic()
        assert answer.startswith(b"HTTP/1.1 413")
        with pytest.raises(OSError):
            while time.monotonic() < began_s + 5:
                connection.sendall(b"{" * 100)
                time.sleep(0.02)
        assert time.monotonic() - began_s < 3


def test_a_connection_whose_refused_body_has_come_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", SHORT_S)
    slow = b'{"prompt": "Hi", "max_tokens": 50}'
    next_head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(slow)
    with serve(lambda _: "word " * 300, step_s=0.02) as running:
        for rest, answer_begins in ((b"{}", b""), (b"{}" + next_head + slow, b"HTTP/1.1 200")):
            with connect(running) as connection:
                connection.sendall(b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
                refusal = b""
                while not refusal.endswith(b"}"):
                    refusal += connection.recv(65_536)
                assert refusal.startswith(b"HTTP/1.1 404")
                connection.sendall(rest)
                answer = answer_of(connection)
            assert answer[:12] == answer_begins and answer.endswith(b"}" * bool(answer))


def test_many_requests_ahead_end_the_connection(server: Server) -> None:
    with connect(server) as connection:
        send_all(connection, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, 5)
    with connect(server) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 10:
            answers += connection.recv(65_536)


def test_small_requests_are_served_while_large_ones_fill_the_room(patient: Server) -> None:
    head = HEAD + b"Content-Length: 99000\r\n\r\n"
    with connect(patient) as large, connect(patient) as small, connect(patient) as too_many:
        large.sendall(head + b" " * 98_000)
        wait_until(lambda: patient.api.admission.num_body_bytes == 98_000)
        small.sendall(HEAD + b"Content-Length: 15000\r\n\r\n" + BODY.ljust(15_000))
        assert small.recv(65_536).startswith(b"HTTP/1.1 200")
        too_many.sendall(head + b" " * 50_000)
        assert too_many.recv(65_536).startswith(b"HTTP/1.1 503")


def test_a_server_leaves_the_log_handlers_of_its_process_open() -> None:
    """Ray Serve's controller, when it has started again, asks for the file of a replica's log."""
    target = logging.NullHandler()
    handler = logging.handlers.MemoryHandler(1, target=target)
    with serve():
        assert handler.target is target


def test_a_body_counts_until_its_request_is_built() -> None:
    with serve(lambda _: "word " * 300, step_s=0.02) as server, connect(server) as connection:
        with server.engine.held():
            connection.sendall(HEAD + b"Content-Length: 5000\r\n\r\n" + LONG.ljust(5000))
            wait_until(lambda: server.api.admission.num_open_outputs == 1)
            time.sleep(0.2)  # in which it could be forgotten
            assert server.api.admission.num_body_bytes == 5000
        wait_until(lambda: server.api.admission.num_body_bytes == 0)
        assert server.api.admission.num_open_outputs == 1  # it is running


def test_bodies_on_their_way_are_bounded_together(patient: Server) -> None:
    head = HEAD + b"Content-Length: 60000\r\n\r\n"
    with connect(patient) as first, connect(patient) as second:
        first.sendall(head + b" " * 59_000)
        wait_until(lambda: patient.api.admission.num_body_bytes > 50_000)
        second.sendall(head + b" " * 59_000)
        assert second.recv(65_536).startswith(b"HTTP/1.1 503")
    wait_until(lambda: patient.api.admission.num_body_bytes == 0)


def connect_without_reading(server: Server) -> socket.socket:
    """A connection of which the system receives little that is not read."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


def is_connected(server: Server, connection: socket.socket) -> bool:
    """Whether the server still has this connection."""
    return connection.getsockname() in [kept.client for kept in list(server.connections)]


# An answer of more bytes than the system takes from a server whose client does not read.
LARGE = json.dumps({"prompt": ["a"] * 10, "max_tokens": 300, "logprobs": 20}).encode()


@pytest.fixture(scope="module")
def wordy() -> Iterator[Server]:
    limits = ApiLimits(slow_reader_timeout_s=2 * SHORT_S)
    with serve(lambda _: "word " * 300, limits=limits, send_buffer=16_384) as running:
        yield running


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
def test_an_answer_that_is_not_read_is_dropped(wordy: Server, ending: bytes) -> None:
    with connect_without_reading(wordy) as connection:
        connection.sendall(HEAD + ending + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE)
        wait_until(lambda: wordy.api.admission.num_open_outputs == 10)
        wait_until(lambda: wordy.api.admission.num_open_outputs == 0, 20.0)
        assert is_connected(wordy, connection)
        wait_until(lambda: not is_connected(wordy, connection))


def test_a_client_that_leaves_during_the_first_of_its_requests_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def statuses(server: Server) -> set[str]:
        [family] = [f for f in server.api.metrics.families() if f.name == "eagleray_http_requests"]
        return {dict(labels)["status"] for _, labels, _ in family.samples}

    body = LONG.replace(b"}", b', "stream": true}')
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serve(lambda _: "word " * 300, step_s=0.01) as running:
        with connect(running) as connection:
            connection.sendall(2 * request)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        wait_until(lambda: bool(statuses(running)))
        assert statuses(running) == {"499"}
        assert len(running.engine.aborted) == 1 and not caplog.records


def test_an_answer_that_is_read_slowly_comes_whole(wordy: Server) -> None:
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(LARGE)
    with connect_without_reading(wordy) as connection:
        connection.sendall(head + LARGE)
        answer = connection.recv(65_536)
        began_s, num_bytes = time.monotonic(), len(answer)
        while part := connection.recv(65_536):
            num_bytes += len(part)
            time.sleep(0.005)
        assert time.monotonic() - began_s > 3 * SHORT_S
    length = re.search(rb"content-length: (\d+)", answer)
    assert length is not None
    assert num_bytes == answer.index(b"\r\n\r\n") + 4 + int(length[1]) > 700_000


def test_a_stream_that_is_not_read_waits_outside_the_buffer_and_comes_whole() -> None:
    num_outputs = 10
    body = LARGE.replace(b"}", b', "stream": true}')
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        serve(lambda _: "word " * 300, step_s=0.001, send_buffer=16_384) as running,
        connect_without_reading(running) as connection,
    ):
        connection.sendall(head + body)
        wait_until(lambda: running.engine.num_active == num_outputs)
        wait_until(lambda: running.engine.num_active == 0, 20.0)
        [protocol] = running.connections
        assert protocol.transport.get_write_buffer_size() < 200_000
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.count(b'"finish_reason":"') == num_outputs and b"data: [DONE]" in answer
    assert len(answer) > 400_000


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server for three connections at a time."""
    monkeypatch.setattr(BoundedProtocol, "max_connections", 3)
    with serve(lambda _: "word " * 300, step_s=0.02) as running:
        yield running


def test_a_new_connection_takes_the_place_of_the_oldest_without_a_request(narrow: Server) -> None:
    with connect(narrow) as running, connect(narrow) as body, connect(narrow) as head:
        running.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(LONG) + LONG)
        wait_until(lambda: narrow.api.admission.num_open_outputs == 1)
        body.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        wait_until(lambda: narrow.api.admission.num_body_bytes == 1)
        head.sendall(HEAD)
        with connect(narrow) as new:
            new.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert new.recv(65_536).startswith(b"HTTP/1.1 200")
            assert answer_of(body) == b""  # it was the oldest one
            assert is_connected(narrow, head)
        assert narrow.api.admission.num_open_outputs == 1


def test_too_many_connections_with_requests_are_refused(narrow: Server) -> None:
    with connect(narrow) as one, connect(narrow) as two, connect(narrow) as three:
        for connection in (one, two, three):
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(LONG) + LONG)
        wait_until(lambda: narrow.api.admission.num_open_outputs == 3)
        with connect(narrow) as fourth:
            answer = answer_of(fourth)
        assert answer.startswith(b"HTTP/1.1 503") and b"at most 3 connections" in answer
        assert narrow.api.admission.num_open_outputs == 3


def test_what_a_connection_adds_has_slots() -> None:
    """Another attribute in its dict would cost each connection a kilobyte."""
    source = inspect.getsource(BoundedProtocol)
    names = set(re.findall(r"self\.(_\w+)(?:: [^=\n]+)? =", source))
    names |= {
        name
        for group in re.findall(r"((?:self\._\w+ = )+)", source)
        for name in re.findall(r"self\.(_\w+)", group)
    }
    assert names - set(BoundedProtocol.__slots__) == {"_running_cycle"}
    assert set(BoundedProtocol.__slots__) <= names
