"""Streams against an OpenAI server, with as little work in the client as possible.

Raw connections and a search for line ends, so that the client takes little of the cores it shares
with the server.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Timings:
    """Seconds of every stream: to its first event, and between events."""

    total_s: float = 0.0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def line(self) -> dict[str, Any]:
        """Figures for a table: tokens per second, and milliseconds."""
        return {
            "tokens_per_s": round(self.num_tokens / self.total_s, 1),
            "ttft_ms_p50": round(1e3 * quantile(self.first_s, 0.5), 1),
            "inter_token_ms_p50": round(1e3 * quantile(self.between_s, 0.5), 2),
            "inter_token_ms_p99": round(1e3 * quantile(self.between_s, 0.99), 2),
            "failed": self.num_failed,
        }


def quantile(values: list[float], q: float) -> float:
    """The value that a share `q` of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def run_streams(url: str, bodies: list[dict[str, Any]]) -> Timings:
    """All bodies at once as streams of `/v1/completions`."""
    timings = Timings()
    began = time.perf_counter()
    await asyncio.gather(*(_stream(url, body, timings) for body in bodies))
    timings.total_s = time.perf_counter() - began
    return timings


async def _stream(url: str, body: dict[str, Any], timings: Timings) -> None:
    where = urlsplit(url)
    data = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.encode() + data)
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
