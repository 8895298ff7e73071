"""Hostile requests beside good streams: `python -m tests.cluster.serve.hostile [--seconds 300]`.

Starts `launch.py serve --tp 2` and keeps good streams going, first alone, then while hostile
requests of every kind come in turn. Prints one JSON line: the time between tokens of the good
streams in both phases, what they lost, how the hostile requests were answered, how far the memory
of the processes that serve rose above idle and from the third minute to the last, and recoveries.
Exit code 1 if a good stream lost anything, if the 99th percentile between tokens rose to more than
1.5 times, memory by more than 150 MiB or still by 10 after the third minute, or anything recovered.
Talks to loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http_load import SPARES_S, Timings, free_port, quantile, run_streams, running
from cluster.commands.top import read_metrics

MOST_SLOWER = 1.5
MOST_MIB = 150
MOST_TREND_MIB = 10
ANSWER_LIMIT_S = 60.0
CHAT = [{"role": "user", "content": "What is 47 + 38?"}]

Body = dict[str, Any]


def _chat(**fields: Any) -> tuple[str, Body]:
    return "/v1/chat/completions", {"messages": CHAT, "max_tokens": 100} | fields


def _schema(schema: Any, **fields: Any) -> tuple[str, Body]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return _chat(response_format=form, **fields)


# One function per kind, since some bodies take megabytes as objects: (path, body).
HOSTILE: dict[str, Callable[[], tuple[str, Body]]] = {
    "prompt of empty objects": lambda: ("/v1/completions", {"prompt": [{}] * 2_000_000}),
    "messages of empty objects": lambda: (
        "/v1/chat/completions",
        {"messages": [{}] * 2_000_000},
    ),
    "parts of empty objects": lambda: (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{}] * 2_000_000}]},
    ),
    "input of empty lists": lambda: ("/v1/responses", {"input": [[]] * 2_000_000}),
    "deep lists": lambda: ("/v1/completions", {"prompt": _deep(900)}),
    "many stop strings": lambda: _chat(stop=[f"stop {n}" for n in range(400_000)]),
    "long stop strings": lambda: _chat(stop=["a" * 1_500_000 + str(n) for n in range(4)]),
    "many biases, many outputs": lambda: _chat(
        logit_bias={str(n): 1.0 for n in range(152_000)}, n=128
    ),
    "a slow expression": lambda: _chat(
        structured_outputs={"regex": "((a|b|c){1,400}(d|e){0,400}){1,400}"}, n=8
    ),
    "an expression that explodes": lambda: _chat(
        structured_outputs={"regex": "(.*a){20}.{500}"}, n=2
    ),
    "optional properties": lambda: _schema(
        {
            "type": "object",
            "properties": {f"key{n}": {"type": "string"} for n in range(1500)},
            "additionalProperties": False,
        }
    ),
    "references in a circle": lambda: _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "an open call": lambda: _chat(
        structured_outputs={"regex": "<tool_call>[a-z ]{700}"},
        max_tokens=800,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    ),
}


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Attack(threading.Thread):
    """Sends hostile requests in turn, one at a time, until stopped.

    Their bytes are made before: what it costs the attacker to write two million empty objects must
    not count as what they do to a server on the same cores.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._stopped = threading.Event()
        self._requests: dict[str, tuple[str, bytes]] = {}
        for name, make in HOSTILE.items():
            path, body = make()
            self._requests[name] = path, json.dumps(body).encode()
        self.answers: dict[str, Counter[str]] = {name: Counter() for name in HOSTILE}

    def run(self) -> None:
        for name in itertools.cycle(self._requests):
            if self._stopped.is_set():
                return
            self.answers[name][self._send(*self._requests[name])] += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join(2 * ANSWER_LIMIT_S)

    def _send(self, path: str, body: bytes) -> str:
        """The status of the answer, or what happened to the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, body, headers)
            return str(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def good_streams(port: int, num_streams: int, seconds: float) -> Timings:
    """Streams of 150 tokens, one round after another."""
    timings, until = Timings(), time.monotonic() + seconds
    while time.monotonic() < until:
        bodies = [
            {"prompt": [1 + stream % 200, 7, 9], "max_tokens": 150, "ignore_eos": True}
            | {"seed": stream, "logprobs": 0}
            for stream in range(num_streams)
        ]
        done = asyncio.run(run_streams(f"http://127.0.0.1:{port}", bodies))
        timings.between_s += done.between_s
        timings.num_failed += done.num_failed
        timings.num_tokens += done.num_tokens
    return timings


class Memory(threading.Thread):
    """Resident memory, in MiB, of each process of a session that serves: when idle, and in each
    minute from the start of this thread.

    Processes are told apart by their ids. Ray adds the method that an actor runs to its title, and
    an actor under another title than when idle would count with its whole memory, not its rise.
    Shared pages count too: they do not grow, so the private memory rises by the same.
    """

    _SERVING = ("ray::Driver", "ray::ServeReplica", "ray::ProxyActor")

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self._session = session
        self.idle_mib = self.now()
        self._minutes: defaultdict[str, list[list[float]]] = defaultdict(list)  # by name

    def run(self) -> None:
        began_s = time.monotonic()
        while True:
            minute = int((time.monotonic() - began_s) / 60)
            for name, mib in self.now().items():
                minutes = self._minutes[name]
                minutes += [[] for _ in range(minute + 1 - len(minutes))]
                minutes[minute].append(mib)
            time.sleep(0.2)

    def now(self) -> dict[str, float]:
        """By the title without a method, and the id of the process."""
        mib: dict[str, float] = {}
        for path in Path("/proc").iterdir():
            try:
                if not path.name.isdigit() or os.getsid(int(path.name)) != self._session:
                    continue
                title = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
                pages = int((path / "statm").read_text().split()[1])
            except OSError:  # it has ended
                continue
            if title.startswith(self._SERVING):
                name = f"{title.partition('.')[0]} {path.name}"
                mib[name] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return mib

    def peaks_mib(self) -> dict[str, list[float]]:
        """The largest memory of each process in each minute; 0 when it was not there."""
        return {
            name: [max(minute, default=0.0) for minute in minutes]
            for name, minutes in self._minutes.items()
        }

    def rise_mib(self) -> float:
        """The largest rise of any process, or its whole memory if it was not there when idle."""
        return max(
            max(peaks) - self.idle_mib.get(name, 0.0) for name, peaks in self.peaks_mib().items()
        )

    def trend_mib(self) -> float:
        """By how much any process rose most from the third minute to the last; 0 if there are no
        more than four. By medians, since the peaks depend on which bodies are read when.
        """
        rises = [
            median(minutes[-1]) - median(minutes[2])
            for minutes in self._minutes.values()
            if len(minutes) > 4 and minutes[2]
        ]
        return max(rises, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile requests beside good streams.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=16)
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "launch.py", "serve", "--tp", "2", "--port", str(port)]
    with running(command, port) as session:
        attack = Attack(port)
        good_streams(port, args.streams, 1.0)
        time.sleep(SPARES_S)
        memory = Memory(session)
        alone = good_streams(port, args.streams, max(5.0, args.seconds / 5))
        memory.start()
        attack.start()
        beside = good_streams(port, args.streams, args.seconds)
        attack.stop()
        recoveries = read_metrics(f"http://127.0.0.1:{port}").totals["eagleray_recoveries_total"]
        p99_ms = [1e3 * quantile(each.between_s, 0.99) for each in (alone, beside)]
        row = {
            "p99_ms_alone": round(p99_ms[0], 1),
            "p99_ms_beside": round(p99_ms[1], 1),
            "worst_ms_beside": round(1e3 * max(beside.between_s)),
            "tokens_beside": beside.num_tokens,
            "failed": alone.num_failed + beside.num_failed,
            "rise_mib": round(memory.rise_mib()),
            "trend_mib": round(memory.trend_mib(), 1),
            "idle_mib": {name: round(mib) for name, mib in memory.idle_mib.items()},
            "mib_of_minutes": {
                name: [round(mib) for mib in peaks] for name, peaks in memory.peaks_mib().items()
            },
            "recoveries": recoveries,
            "answers": {name: dict(count) for name, count in attack.answers.items()},
        }
        print(json.dumps(row))
    is_slower = p99_ms[1] > MOST_SLOWER * p99_ms[0]
    is_larger = memory.rise_mib() > MOST_MIB or memory.trend_mib() > MOST_TREND_MIB
    sys.exit(bool(row["failed"] or is_slower or is_larger or recoveries))


if __name__ == "__main__":
    main()
