"""How much load one API process can handle: `python -m tests.cluster.api.capacity`.

A server process over a scripted engine, and this process as the clients, on one machine. Prints
one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.api.app import SWITCH_INTERVAL_S
from cluster.api.limits import ApiLimits
from configs.paths import CHECKOUT
from scheduler.messages import Request
from tests.cluster.api.scripted import TOKENIZER, echo_number, serve

NUM_SHORT, AT_ONCE = 3000, 32
NUM_STREAMS = 1000
NUM_IDLE = 500
STEP_S = 0.05


def script(request: Request) -> str:
    prompt = TOKENIZER.decode(request.token_ids[: request.num_prompt_tokens])
    return "word " * 40 if "long" in prompt else echo_number(request)


def run_server() -> None:
    """Serve until standard input ends. All streams advance in each step."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a replica
    with serve(script, step_s=STEP_S, limits=ApiLimits(max_open=4096)) as server:
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


async def streams(port: int, pid: int) -> dict[str, Any]:
    """All streams at once; meanwhile another process asks `/health`."""
    context = multiprocessing.get_context("spawn")
    done, answers = context.Event(), context.Queue()
    asking = context.Process(target=ask_health, args=(port, done, answers))
    asking.start()
    await asyncio.to_thread(answers.get)  # the stream has begun
    before = memory_of(pid)
    began = time.perf_counter()
    body = {"prompt": "long", "max_tokens": 60, "stream": True}
    running = [
        asyncio.ensure_future(request(port, "/v1/completions", body)) for _ in range(NUM_STREAMS)
    ]
    most = 0
    while not all(stream.done() for stream in running):
        most = max(most, memory_of(pid))
        await asyncio.sleep(0.05)
    seconds = time.perf_counter() - began
    done.set()
    health_s = await asyncio.to_thread(answers.get)
    asking.join()
    complete = sum(b"[DONE]" in stream.result()[0] for stream in running)
    return {
        "streams": NUM_STREAMS,
        "complete": complete,
        "seconds": round(seconds, 1),
        "kib_per_stream": round((most - before) / NUM_STREAMS),
        "health_ms_p99": round(1e3 * sorted(health_s)[int(0.99 * len(health_s))]),
        "health_asked": len(health_s),
    }


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


async def idle(port: int, pid: int) -> float:
    """KiB of server memory per idle connection."""
    before = memory_of(pid)
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_IDLE)]
    await asyncio.sleep(0.5)
    used = memory_of(pid) - before
    for _, writer in connections:
        writer.close()
    return used / NUM_IDLE


def memory_of(pid: int) -> int:
    """Resident memory in KiB."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4


def measure() -> dict[str, Any]:
    """Measure all figures."""
    code = "from tests.cluster.api.capacity import run_server; run_server()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        figures: dict[str, Any] = {}
        figures["short_requests_per_s"] = round(asyncio.run(short_requests(port)))
        figures |= asyncio.run(streams(port, server.pid))
        figures["kib_per_idle_connection"] = round(asyncio.run(idle(port, server.pid)), 1)
        server.stdin.close()
    return figures


if __name__ == "__main__":
    print(json.dumps(measure()))
