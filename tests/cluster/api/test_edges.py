"""What HTTP allows a client, on a real port: methods, versions, encodings."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import zstandard

from cluster.api.access import Access
from cluster.api.admission import ApiLimits
from cluster.api.encoding import decode
from cluster.api.exchange import Exchange
from tests.cluster.api.scripted import ScriptedEngine, Server, echo_number, make_api, serve
from tests.cluster.api.test_connections import answer_of, connect

BODY = json.dumps({"prompt": "Hi", "max_tokens": 2, "seed": 1}).encode()
STREAM = json.dumps({"prompt": "Hi", "max_tokens": 5, "stream": True}).encode()
MOST = 100_000  # bytes of a body


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip by its old name": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a head": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "nothing": ("identity", bytes),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(limits=ApiLimits(max_body_bytes=MOST)) as running:
        yield running


def post(server: Server, body: bytes, encoding: str, path: str = "/v1/completions") -> Any:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return httpx.post(server.url + path, content=body, headers=headers)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("padding", [0, 50_000])
def test_an_encoded_body_is_read_as_if_it_were_not(server: Server, name: str, padding: int) -> None:
    encoding, encode = ENCODERS[name]
    answer = post(server, encode(BODY + b" " * padding), encoding)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert server.api.admission.num_body_bytes == 0


@pytest.mark.parametrize("name", ENCODERS)
def test_the_limit_of_a_body_is_on_what_is_decoded(server: Server, name: str) -> None:
    encoding, encode = ENCODERS[name]
    assert post(server, encode(BODY.ljust(MOST)), encoding).status_code == 200
    refused = post(server, encode(BODY.ljust(MOST + 1)), encoding)
    assert refused.status_code == 413 and f"at most {MOST} bytes" in refused.text


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "nothing"])
def test_a_bomb_is_decoded_no_further_than_the_limit(name: str) -> None:
    encoding, encode = ENCODERS[name]
    bomb = encode(bytes(50_000_000))
    assert len(bomb) < 60_000
    tracemalloc.start()
    decoded = decode(bomb, encoding.lower().removeprefix("x-"), MOST)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert decoded == bytes(MOST + 1)
    assert peak_bytes < 4 * MOST


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize(
    "damage", [lambda body: b"", lambda body: body[: len(body) // 2], lambda body: BODY]
)
def test_a_damaged_encoding_is_the_clients_mistake(
    server: Server, encoding: str, damage: Callable[[bytes], bytes]
) -> None:
    answer = post(server, damage(ENCODERS[encoding][1](BODY)), encoding)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_an_encoded_body_goes_to_its_end_and_no_further(server: Server, encoding: str) -> None:
    name, encode = ENCODERS[encoding]
    answer = post(server, encode(BODY) + b"more", name)
    assert answer.status_code == 400 and "more follows its end" in answer.text
    answer = post(server, encode(BODY)[:-2], name)
    assert answer.status_code == 400 and "it is cut off" in answer.text


@pytest.mark.parametrize("encoding", ["br", "gzip, zstd", "compress"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_other_encodings_are_refused_with_those_that_are_possible(
    server: Server, encoding: str, path: str
) -> None:
    answer = post(server, BODY, encoding, path)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert encoding in answer.json()["error"]["message"]


def test_zstd_with_a_window_of_gigabytes_is_refused(server: Server) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    answer = post(server, packer.compress(BODY) + packer.flush(), "zstd")
    assert answer.status_code == 400 and "too much memory" in answer.text


def test_a_body_is_decoded_off_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def watched(*args: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return decode(*args)

    monkeypatch.setattr("cluster.api.runner.decode", watched)
    assert post(server, gzip.compress(BODY), "gzip").status_code == 200
    [name] = threads
    assert name.startswith("reading")


def test_decoded_bytes_count_among_those_of_all_bodies() -> None:
    limits = ApiLimits(max_total_body_bytes=50_000, max_small_body_bytes=10_000)
    with serve(limits=limits) as server:
        refused = post(server, gzip.compress(BODY.ljust(60_000)), "gzip")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert post(server, gzip.compress(BODY.ljust(9_000)), "gzip").status_code == 200


GET_PATHS = ("/", "/page.js", "/live", "/health", "/version", "/metrics", "/openapi.json",
             "/v1/models", "/v1/models/tiny", "/debug/trace")  # fmt: skip


@pytest.mark.parametrize("path", GET_PATHS)
def test_head_has_the_headers_of_get_and_no_body(server: Server, path: str) -> None:
    got, headed = httpx.get(server.url + path), httpx.head(server.url + path)
    assert headed.status_code == 200 and headed.content == b""
    varying = {"date", "x-request-id"} | ({"content-length"} if path == "/metrics" else set())
    kept = [
        {name: value for name, value in answer.headers.items() if name not in varying}
        for answer in (got, headed)
    ]
    assert kept[0] == kept[1]
    assert int(headed.headers["content-length"]) > 0


def test_head_sends_no_body_to_whatever_serves_the_application() -> None:
    """Not every server drops it."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "HEAD", "headers": [], "query_string": b""}
    engine = ScriptedEngine(echo_number, 0.0)
    api = make_api(engine)
    for path in ("/version", "/nothing"):
        asyncio.run(api({**scope, "path": path}, receive, send))
    engine.close()
    assert [message["status"] for message in sent[::2]] == [200, 404]
    assert [message["body"] for message in sent[1::2]] == [b"", b""]


@pytest.mark.parametrize(
    ("path", "methods"),
    [*((path, "GET, HEAD, OPTIONS") for path in GET_PATHS),
     ("/v1/chat/completions", "POST, OPTIONS"), ("/v1/messages", "POST, OPTIONS")],
)  # fmt: skip
def test_options_and_405_say_which_methods_are_allowed(
    server: Server, path: str, methods: str
) -> None:
    options = httpx.options(server.url + path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, methods, b"")
    assert not [name for name in options.headers if name.startswith("access-control")]
    for method in ("PUT", "DELETE", "POST" if "GET" in methods else "HEAD"):
        refused = httpx.request(method, server.url + path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)
    error = httpx.put(server.url + path).json()["error"]
    assert f"{path} takes {methods.partition(',')[0]}, not PUT" in error["message"]


def test_methods_are_named_to_clients_with_the_key_only() -> None:
    with serve(api_key="secret") as server:
        for method in ("OPTIONS", "PUT", "HEAD"):
            answer = httpx.request(method, f"{server.url}/v1/models")
            assert answer.status_code == 401 and "allow" not in answer.headers
            assert answer.headers["www-authenticate"] == "Bearer"


def test_answers_are_counted_by_path_and_other_paths_together() -> None:
    with serve(api_key="secret") as server:
        key = {"authorization": "Bearer secret"}
        httpx.get(f"{server.url}/v1/models")
        for path in ("/v1/models/tiny", "/v1/models/other", "/nothing", "/v1/models"):
            httpx.get(server.url + path, headers=key)
        httpx.options(f"{server.url}/v1/completions", headers=key)
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counted = {line for line in lines if line.startswith("eagleray_http_requests_total")}
    assert counted == {
        f'eagleray_http_requests_total{{path="{path}",status="{status}"}} 1.0'
        for path, status in (
            ("/v1/models", 401),
            ("/v1/models", 200),
            ("/v1/models/{name}", 200),
            ("/v1/models/{name}", 404),
            ("other", 404),
            ("/v1/completions", 204),
        )
    }


def test_a_path_below_a_prefix_is_found(server: Server) -> None:
    """As Ray Serve passes it on: the whole path, and the prefix as `root_path`."""
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    engine = ScriptedEngine(echo_number, 0.0)
    api = make_api(engine)
    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b""}
    for root, path in (
        ("/llm", "/llm/live"),
        ("/llm/", "/llm/live"),
        ("/llm", "/live"),
        ("", "/x"),
    ):
        asyncio.run(api({**scope, "root_path": root, "path": path}, receive, send))
    engine.close()
    assert statuses[::2] == [200, 200, 200, 404]


def exchange(server: Server, head: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of an answer that ends with the connection."""
    with connect(server) as connection:
        length = b"Content-Length: %d\r\n" % len(body) if body else b""
        connection.sendall(head + length + b"\r\n" + body)
        answered, _, rest = answer_of(connection).partition(b"\r\n\r\n")
    return answered.lower(), rest


@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n"])
def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(
    server: Server, keeps: bytes
) -> None:
    head, body = exchange(server, b"POST /v1/completions HTTP/1.0\r\n" + keeps, STREAM)
    assert b"chunked" not in head and b"content-length" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    assert len(body.split(b"\n\n")) > 4


def test_a_whole_answer_to_a_client_of_http_1_0_has_its_length(server: Server) -> None:
    head, body = exchange(server, b"POST /v1/completions HTTP/1.0\r\n", BODY)
    assert b"content-length: %d\r\n" % len(body) in head and b"chunked" not in head
    assert json.loads(body)["object"] == "text_completion"
    head, body = exchange(server, b"HEAD /version HTTP/1.0\r\n")
    assert b"content-length" in head and body == b""
    head, body = exchange(server, b"OPTIONS /version HTTP/1.0\r\n")
    assert head.startswith(b"http/1.1 204") and body == b""


def test_a_client_of_http_1_0_is_not_told_to_continue(server: Server) -> None:
    head, body = exchange(
        server, b"POST /v1/completions HTTP/1.0\r\nExpect: 100-continue\r\n", BODY
    )
    assert head.startswith(b"http/1.1 200") and json.loads(body)["usage"]


def test_a_stream_to_a_client_of_http_1_1_has_chunks_and_the_connection_stays(
    server: Server,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(STREAM)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(head + STREAM)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += connection.recv(65_536)
            assert b"transfer-encoding: chunked" in answer and b"connection: close" not in answer


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET /live HTTP/1.1\r\nHost x\r\n\r\n"])
def test_what_is_no_http_is_refused_in_json(server: Server, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        head, _, body = answer_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as listening:
            listening.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
@pytest.mark.parametrize("bound", ["::1", "[::1]"])
def test_a_server_on_the_ipv6_loopback_address_is_reached_by_it(bound: str) -> None:
    with serve(access=Access(bound_host=bound), address="::1") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        rebound = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"})
        assert rebound.status_code == 403


def test_headers_that_are_added_go_with_every_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Exchange.body

    async def body(exchange: Exchange) -> bytes:
        exchange.answer_headers["x-added"] = "a, b"
        return await original(exchange)

    monkeypatch.setattr(Exchange, "body", body)
    for sent in (BODY, STREAM, b"{"):
        assert post(server, sent, "identity").headers["x-added"] == "a, b"
