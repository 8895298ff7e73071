"""Clients that disconnect from a served application: `python -m tests.cluster.serve.disconnects
[--each N]`.

Starts `launch.py serve`, then disconnects while requests are queued, in prefill and in decode,
streamed and not, and each time waits until the engine holds what it held before. Prints one JSON
line per kind: how long that took, and what was left over at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.http_load import SPARES_S
from cluster.commands.top import read_metrics
from configs.paths import SOURCE_ROOT

LIMIT_S = 5.0
KINDS = ("queued", "prefill", "decode")
NUM_SEQS = 4


class Leaver:
    """A request from which the client can disconnect at any time."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def leave(self) -> None:
        self.socket.close()


def held(url: str) -> tuple[float, ...]:
    """What the engine and the API hold: open outputs, sequences that run or wait, free blocks."""
    numbers = read_metrics(url).totals
    return (
        numbers["eagleray_http_outputs_open"],
        numbers["eagleray_num_requests_running"] + numbers["eagleray_num_requests_waiting"],
    )


def run_kind(url: str, port: int, kind: str, each: int, *, stream: bool) -> dict[str, Any]:
    """Disconnect from `each` requests; the seconds until the engine holds what it held before."""
    long: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True, "logprobs": 0}
    kept = []
    if kind == "queued":
        kept = [Leaver(port, long | {"prompt": "a", "stream": True}) for _ in range(NUM_SEQS)]
        time.sleep(0.3)
    before = (len(kept), len(kept))
    seconds = []
    for number in range(each):
        if kind == "queued" and held(url) != before:
            for leaver in kept:
                leaver.leave()
            wait_for(url, (0, 0))
            kept = [Leaver(port, long | {"prompt": "a", "stream": True}) for _ in range(NUM_SEQS)]
            time.sleep(0.3)
        prompt = "a" if kind != "prefill" else [(number + i) % 250 for i in range(900)]
        leaver = Leaver(port, long | {"prompt": prompt, "stream": stream})
        if kind == "decode" and stream:
            leaver.socket.recv(1)
        time.sleep({"queued": 0.03, "prefill": 0.02, "decode": 0.05}[kind])
        leaver.leave()
        seconds.append(wait_for(url, before))
    for leaver in kept:
        leaver.leave()
    wait_for(url, (0, 0))
    seconds.sort()
    return {
        "kind": kind,
        "stream": stream,
        "left": each,
        "ms_p50": round(1e3 * seconds[each // 2]),
        "ms_worst": round(1e3 * seconds[-1]),
    }


def wait_for(url: str, want: tuple[float, ...]) -> float:
    """The seconds until the engine holds no more than this; requests that keep others waiting may
    end.
    """
    began = time.perf_counter()
    while True:
        now = held(url)
        if all(a <= b for a, b in zip(now, want, strict=True)):
            return time.perf_counter() - began
        if time.perf_counter() - began > LIMIT_S:
            raise AssertionError(f"still held after {LIMIT_S} s: {now}, wanted {want}")
        time.sleep(0.02)


def descriptors(session: int) -> dict[str, int]:
    """Open descriptors of the processes of a session that serve, by name and process."""
    import os

    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                name = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
                if os.getsid(int(path.name)) == session and "ray::" in name:
                    found[f"{name} {path.name}"] = len(list((path / "fd").iterdir()))
            except OSError:
                continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Leave requests of a served application.")
    parser.add_argument("--each", type=int, default=200)
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    command = [sys.executable, "launch.py", "serve", "--tp", "2", "--port", str(args.port)]
    command += ["--max-num-seqs", str(NUM_SEQS)]
    server = subprocess.Popen(
        command, cwd=SOURCE_ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    url = f"http://127.0.0.1:{args.port}"
    try:
        assert server.stderr is not None
        assert any(line.startswith("ready on") for line in server.stderr), "it did not start"
        run_kind(url, args.port, "decode", 5, stream=True)
        time.sleep(SPARES_S)
        blocks, before = (
            read_metrics(url).totals["eagleray_kv_blocks_free"],
            descriptors(server.pid),
        )
        for kind in KINDS:
            for stream in (True, False):
                print(json.dumps(run_kind(url, args.port, kind, args.each, stream=stream)))
        time.sleep(2)
        after = descriptors(server.pid)
        grown = {n: after[n] - before.get(n, 0) for n in after if after[n] > before.get(n, 0)}
        free = read_metrics(url).totals["eagleray_kv_blocks_free"]
        print(json.dumps({"blocks_left_over": blocks - free, "descriptors_grown": grown}))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
