"""Large numbers of wrong requests: `python -m tests.cluster.api.fuzz [--requests N] [--seed S]`.

Raw bytes on real connections: fields of wrong types and values, bad UTF-8, NULs, deep JSON, lengths
that are huge or wrong, clients that leave at any byte. Every answer must be complete, in JSON, and
below 500 (or 503); nothing may hang or be left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from cluster.api.admission import ApiLimits
from cluster.api.messages.schema import CountTokensRequest, MessagesRequest
from cluster.api.responses.schema import ResponsesRequest
from cluster.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)
from tests.cluster.api.scripted import Server, echo_number, serve, wait_until

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 200_000
LAST_EVENTS: dict[str, bytes | tuple[bytes, ...]] = {
    "/v1/messages": b"event: message_stop\n",
    "/v1/responses": (b"event: response.completed\n", b"event: response.incomplete\n"),
}
MODELS: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PATHS = [*MODELS]
FIELDS = sorted(
    {
        n
        for m in MODELS.values()
        for n in (*m.model_fields, *m.FIELDS_WITHOUT_EFFECT, *m.REFUSED_FIELDS)
    }
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**9, 2**63, -(2**70), 10**400, 0.5, -1e308, 1e-320, "", "a",
    "tiny", "\x00", "ü🦅" * 50, "x" * 5000, [], [[]], [None], ["a", 1], [0], [[1, 2], []], [-1],
    [10**12], {}, {"a": 1}, {"1": 1}, {"include_usage": True}, {"type": "text"},
    [{"role": "user", "content": "Hi"}], [{"role": "user"}], [{"role": "tool", "content": []}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "reasoning"}],
    [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}],
    "auto", "none", "required",
)  # fmt: skip


def sane(path: str) -> dict[str, Any]:
    """A valid request."""
    known: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [65]},
    }
    return known.get(path, {"prompt": "Hi"})


def body(rng: random.Random, path: str) -> bytes:
    """A body that is invalid in some way, or valid."""
    kind = rng.randrange(10)
    if kind < 6:
        fields = sane(path) | {
            rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(1, 4))
        }
        return json.dumps(fields).encode()
    data = bytearray(json.dumps(sane(path)).encode())
    if kind == 6:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 7:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 8:
        deep = rng.choice([b"[", b'{"a":', b'{"messages":[']) * rng.choice([50, 5000, 50_000])
        return bytes(deep)
    return rng.randbytes(rng.randrange(200))


def exchange(rng: random.Random, server: Server) -> str:
    """Use one connection. Returns the status, or what the client did instead of reading it."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    path = rng.choice(PATHS) if rng.random() < 0.95 else "/" + rng.randbytes(4).hex()
    data = body(rng, path)
    length = str(len(data))
    if rng.random() < 0.03:
        length = rng.choice(["-1", "x", "99999999999999999999", "0", "1" * 100])
    method = rng.choice(["POST"] * 20 + ["GET", "PUT", "HEAD", "BREW"])
    extra = rng.choice(
        [""] * 5 + ["Authorization: \x7f\r\n", "X-Request-Id: " + "a" * 500 + "\r\n"]
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{extra}"
    raw = f"{head}Content-Length: {length}\r\n\r\n".encode() + data
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        leaves, left_after = rng.random(), rng.randrange(1, 400)
        answer = b""
        try:
            if leaves < 0.1:
                connection.sendall(raw[: rng.randrange(len(raw))])
                return "left while sending"
            connection.sendall(raw)
            if leaves < 0.2:
                connection.recv(left_after)
                return "left while reading"
            if length != str(len(data)):
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except TimeoutError:
            raise
        except OSError:  # refused and closed before the whole body had arrived
            is_refused_unread = (
                method != "POST"
                or path not in MODELS
                or "\x7f" in extra  # not HTTP, so uvicorn answers and closes at once
                or len(data) > MAX_BODY_BYTES
                or length != str(len(data))
            )
            assert is_refused_unread, raw[:500]
            return "closed"
    if not answer and length != str(len(data)):
        return "closed"  # the body never came
    status = answer.split(b" ", 2)[1].decode()
    assert status.isdigit() and (int(status) < 500 or status == "503"), (raw[:500], answer[:500])
    header, _, content = answer.partition(b"\r\n\r\n")
    if method != "HEAD" and b"application/json" in header:
        json.loads(content)
    elif b"text/event-stream" in header:
        last_event = content.rstrip(b"\r\n0").rpartition(b"\n\n")[2]
        assert last_event.startswith(LAST_EVENTS.get(path, b"data: [DONE]")), content[-200:]
    return status


def run(num_requests: int, seed: int) -> Counter[str]:
    """Send requests and count the outcomes. Raises for a wrong answer, a hang, or anything left
    over.
    """
    outcomes: Counter[str] = Counter()
    with serve(echo_number, limits=ApiLimits(max_body_bytes=MAX_BODY_BYTES)) as server:
        exchange(random.Random(seed), server)
        descriptors = len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))
        for number in range(num_requests):
            outcomes[exchange(random.Random(f"{seed}/{number}"), server)] += 1
        wait_until(lambda: server.api.admission.num_open_outputs == 0)
        wait_until(lambda: server.engine.num_active == 0)
        wait_until(lambda: len(list(Path(f"/proc/{os.getpid()}/fd").iterdir())) <= descriptors + 1)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description="Send wrong requests.")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(dict(run(args.requests, args.seed).most_common()))


if __name__ == "__main__":
    main()
