"""Streams against an OpenAI server, with as little work in the client as possible.

Raw connections and a search for line ends, so that the client takes little of the cores it shares
with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from configs.paths import SOURCE_ROOT

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
SPARES_S = 20.0  # an engine makes its spares when it has been idle for a while; that costs time


@dataclass(slots=True)
class Timings:
    """Seconds of every stream: to its first event, and between events."""

    total_s: float = 0.0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def line(self) -> dict[str, Any]:
        """Figures for a table: tokens per second, and milliseconds. Raises `RuntimeError` if all
        tokens of a stream came at once, as those do that have no text.
        """
        if self.num_tokens > len(self.first_s) and not self.between_s:
            raise RuntimeError("every stream was a single event: its tokens have no text")
        return {
            "tokens_per_s": round(self.num_tokens / self.total_s, 1),
            "ttft_ms_p50": round(1e3 * quantile(self.first_s, 0.5), 1),
            "inter_token_ms_p50": round(1e3 * quantile(self.between_s, 0.5), 2),
            "inter_token_ms_p99": round(1e3 * quantile(self.between_s, 0.99), 2),
            "failed": self.num_failed,
        }


@contextmanager
def running(
    command: list[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A server for the block, ready when it answers `/v1/models`; its process, which leads a
    session.
    """
    log = Path(tempfile.mkdtemp()) / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command,
            cwd=SOURCE_ROOT,
            env=os.environ | (environment or {}),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(
                    f"{shlex.join(command)} does not serve:\n{log.read_text()[-3000:]}"
                )
            time.sleep(0.5)
        yield server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # whatever it has left behind
            os.killpg(server.pid, signal.SIGKILL)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def quantile(values: list[float], q: float) -> float:
    """The `q`-quantile of the values, q from 0 to 1; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def processor_s(session: int) -> dict[str, float]:
    """Seconds of processor time so far of the processes of a session, by name."""
    ticks = os.sysconf("SC_CLK_TCK")
    used_s: dict[str, float] = defaultdict(float)
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getsid(int(path.name)) != session:
                    continue
                fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
                name = (path / "cmdline").read_bytes().split(b"\0")[0].decode().split("/")[-1]
            except OSError:
                continue
            used_s[name[:40]] += (int(fields[11]) + int(fields[12])) / ticks
    return used_s


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def request_bytes(body: dict[str, Any], *, closes: bool = True) -> bytes:
    """A request to `/v1/completions`, after which the server closes the connection, or not."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Connection: {'close' if closes else 'keep-alive'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def run_streams(url: str, bodies: list[dict[str, Any]]) -> Timings:
    """Send all bodies at once, as streams of `/v1/completions`."""
    timings = Timings()
    began = time.perf_counter()
    await asyncio.gather(*(_stream(url, body, timings) for body in bodies))
    timings.total_s = time.perf_counter() - began
    return timings


async def _stream(url: str, body: dict[str, Any], timings: Timings) -> None:
    where = urlsplit(url)
    request = request_bytes(body | {"stream": True})
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(request)
    last_s, tail, is_complete = 0.0, b"", False
    while part := await reader.read(65536):
        now_s = time.perf_counter()
        num_events = (tail[-5:] + part).count(b"data: {")
        is_complete = is_complete or b"[DONE]" in tail[-8:] + part
        tail = part[-8:]
        if not num_events:
            continue
        if last_s:
            timings.between_s += [(now_s - last_s) / num_events] * num_events
        else:
            timings.first_s.append(now_s - sent_s)
        last_s = now_s
    writer.close()
    timings.num_tokens += body["max_tokens"] if is_complete else 0
    timings.num_failed += not is_complete


class _Chat(asyncio.Protocol):
    """One streamed chat: counts the events with text, and looks at nothing else."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._done = request, done
        self._num_events, self._tail = 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._num_events += (self._tail[-10:] + data).count(b'"content":"')
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done.done():
            return
        if b"[DONE]" in self._tail:
            self._done.set_result(self._num_events)
        else:
            self._done.set_exception(ConnectionError(f"a chat ended with {self._tail!r}"))


def run_chats(port: int, prompt: str, num_chats: int, num_tokens: int, model: str = "model") -> int:
    """Stream chats, all at once, with less work per event than `run_streams`. Returns how many
    events came. Raises `ConnectionError` if a chat did not end well.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"

    async def run() -> int:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(num_chats)]
        for done in ends:
            make = partial(_Chat, head.encode() + data, done)
            await loop.create_connection(make, "127.0.0.1", port)
        return sum(await asyncio.gather(*ends))

    return asyncio.run(run())
