"""How much load one API process can handle: `python -m tests.cluster.api.capacity`.

A server process over a scripted engine, and this process as the clients, on one machine. Prints
one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from cluster.api.admission import ApiLimits
from cluster.api.app import SWITCH_INTERVAL_S
from cluster.client.allocator import return_large_allocations
from configs.paths import SOURCE_ROOT
from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, echo_number, serve

NUM_SHORT, AT_ONCE = 3000, 32
NUM_STREAMS = 1000
NUM_IDLE = 1000
# Of a load that one process cannot keep up with, and of streams that are open for long.
BUSY_STEP_S, OPEN_STEP_S = 0.05, 1.0
OPEN_S = 10.0


def script(request: Request) -> str:
    prompt = TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens])
    return "word " * 40 if "long" in prompt else echo_number(request)


def run_server(step_s: float) -> None:
    """Serve until standard input ends. All streams advance in each step."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a replica
    return_large_allocations()
    with serve(script, step_s=step_s, limits=ApiLimits(max_open_outputs=4096)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


async def request(port: int, path: str, body: dict[str, Any] | None) -> tuple[bytes, float]:
    """The answer to a request on a connection of its own, and the seconds it took."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    return answer, time.perf_counter() - began


async def short_requests(port: int) -> float:
    """Requests per second."""
    left = iter(range(NUM_SHORT))

    async def client() -> None:
        for _ in left:
            answer, _ = await request(port, "/v1/completions", {"prompt": "a", "max_tokens": 2})
            assert answer.startswith(b"HTTP/1.1 200"), answer

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return NUM_SHORT / (time.perf_counter() - began)


async def streams(port: int) -> dict[str, Any]:
    """All streams at once; meanwhile another process asks `/health`."""
    began = time.perf_counter()
    body = {"prompt": "long", "max_tokens": 60, "stream": True}
    async with health_asked(port) as health:
        ends = await asyncio.gather(
            *(request(port, "/v1/completions", body) for _ in range(NUM_STREAMS))
        )
    return {
        "streams": NUM_STREAMS,
        "complete": sum(b"[DONE]" in answer for answer, _ in ends),
        "seconds": round(time.perf_counter() - began, 1),
        **health,
    }


async def open_connections(port: int, pid: int) -> dict[str, Any]:
    """KiB of server memory per idle connection and per stream; while all are open and each stream
    gets a token per second, another process asks `/health`.
    """
    with contextlib.ExitStack() as connections:
        warm = [await connected(port, connections) for _ in range(50)]
        await asyncio.gather(*(stream_begins(*each) for each in warm))
        memory = [memory_of(pid)]
        idle = [await connected(port, connections) for _ in range(NUM_IDLE)]
        await asyncio.gather(*(is_alive(*each) for each in idle))
        memory.append(memory_of(pid))
        streaming = [await connected(port, connections) for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(stream_begins(*each) for each in streaming))
        async with health_asked(port) as health:
            await asyncio.sleep(OPEN_S)
        memory.append(memory_of(pid))
    return {
        "idle": NUM_IDLE,
        "open_streams": NUM_STREAMS,
        "kib_per_idle_connection": round((memory[1] - memory[0]) / NUM_IDLE, 1),
        "kib_per_stream": round((memory[2] - memory[1]) / NUM_STREAMS, 1),
        **health,
    }


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(port: int, connections: contextlib.ExitStack) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connections.callback(writer.close)
    return reader, writer


async def is_alive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request; the connection stays open."""
    writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")


async def stream_begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A stream, until its first token."""
    body = json.dumps({"prompt": "long", "max_tokens": 60, "stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Accept: */*"]
    lines += ["User-Agent: capacity", "Connection: keep-alive", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    writer.write(head.encode() + body)
    assert (await reader.readuntil(b"data: ")).startswith(b"HTTP/1.1 200")


@contextlib.asynccontextmanager
async def health_asked(port: int) -> AsyncGenerator[dict[str, Any], None]:
    """Another process asks `/health` during the block. Its figures are in what this yields."""
    context = multiprocessing.get_context("spawn")
    done, answers = context.Event(), context.Queue()
    asking = context.Process(target=ask_health, args=(port, done, answers))
    asking.start()
    await asyncio.to_thread(answers.get)
    figures: dict[str, Any] = {}
    yield figures
    done.set()
    seconds = sorted(await asyncio.to_thread(answers.get))
    asking.join()
    figures["health_ms_p50"] = round(1e3 * seconds[len(seconds) // 2])
    figures["health_ms_p99"] = round(1e3 * seconds[int(0.99 * len(seconds))])
    figures["health_asked"] = len(seconds)


def ask_health(port: int, done: Any, answers: Any) -> None:
    """Ask until `done` is set, then put the seconds of every answer into the queue."""
    seconds: list[float] = []
    answers.put(None)
    while not done.is_set():
        answer, taken = asyncio.run(request(port, "/health", None))
        assert answer.startswith(b"HTTP/1.1 200"), answer
        seconds.append(taken)
        time.sleep(0.02)
    answers.put(seconds)


def memory_of(pid: int) -> int:
    """Resident memory in KiB."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4


@contextlib.contextmanager
def server_of(step_s: float) -> Iterator[tuple[int, int]]:
    """(port, pid) of a server process."""
    code = f"from tests.cluster.api.capacity import run_server; run_server({step_s})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=SOURCE_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        yield int(server.stdout.readline().rsplit(":", 1)[1]), server.pid
        server.stdin.close()


def measure() -> dict[str, Any]:
    """Measure all figures."""
    figures: dict[str, Any] = {}
    with server_of(BUSY_STEP_S) as (port, _):
        figures["short_requests_per_s"] = round(asyncio.run(short_requests(port)))
        figures["busy"] = asyncio.run(streams(port))
    with server_of(OPEN_STEP_S) as (port, pid):
        figures["open"] = asyncio.run(open_connections(port, pid))
    return figures


if __name__ == "__main__":
    print(json.dumps(measure()))
