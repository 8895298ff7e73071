"""Offers a server ten times the load that it can handle: does its throughput stay what it was?

    python -m benchmarks.overload --model DIR [--tp 2] [--times 10] [--rounds 3] [--seconds 40]
        [--tokens 64] [--open 64]

First `--open` clients send one request after another: the saturated rate. Then requests come at
`--times` that rate, at random moments, and those that do not fit among `--open` outputs are
refused. The two take turns, since a machine's speed changes meanwhile; the share of a round is
that of the mean of the saturated rates before and after it. Prints one JSON line: output tokens per
second, the median of the rounds' shares, the time that a refusal takes, and the share of one core
that this client takes from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.common import machine
from benchmarks.http_load import SPARES_S, free_port, quantile, request_bytes, running
from benchmarks.serving import bodies
from benchmarks.serving_load import OURS

RAMP = 0.2  # share of the time that is not counted, while the batch fills up
LENGTH = re.compile(rb"content-length: (\d+)")


@dataclass
class Seen:
    """When each request was sent and answered, and how long a refusal took."""

    finished: list[tuple[float, float]] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def tokens_per_s(self, begin: float, end: float, tokens: int) -> float:
        """Between two moments, as if the tokens of a request came evenly: requests of one length
        end in waves, and a wave more or less would be a tenth of the rate.
        """
        shares = (
            max(0.0, min(answered, end) - max(sent, begin)) / (answered - sent)
            for sent, answered in self.finished
        )
        return tokens * sum(shares) / (end - begin)


class Connection(asyncio.Protocol):
    """A connection that sends one request after another, none of them streamed. The client shares
    the cores of the server, so it does as little as possible.
    """

    def __init__(self) -> None:
        self._answered: asyncio.Future[bytes]
        self._transport: asyncio.WriteTransport
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if length and len(body) == int(length[1]):
            self._answered.set_result(head)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_result(repr(error).encode())

    async def send(self, data: bytes) -> bytes:
        """Send a request; returns the head of its answer, once all of the answer is there."""
        self._answered, self._answer = asyncio.get_running_loop().create_future(), b""
        self._transport.write(data)
        return await self._answered


class Connections:
    """Connections that are used again, as every HTTP client for many requests does."""

    def __init__(self, port: int) -> None:
        self._port, self._idle = port, list[Connection]()

    async def send(self, data: bytes, seen: Seen) -> None:
        """Send a request and wait for the whole answer."""
        began = time.perf_counter()
        connection = self._idle.pop() if self._idle else await self._open()
        head, now = await connection.send(data), time.perf_counter()
        if head.startswith(b"HTTP/1.1 200"):
            seen.finished.append((began, now))
        elif head.startswith(b"HTTP/1.1 503"):
            seen.refused_s.append(now - began)
        else:
            seen.other.append(head[:200].decode(errors="replace"))
            return
        self._idle.append(connection)

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection


def random_request(tokens: int, seed: int) -> bytes:
    """A request for a random prompt."""
    [body] = bodies(1, tokens, seed)
    return request_bytes(body, closes=False)


async def saturate(port: int, args: argparse.Namespace, seeds: Iterator[int]) -> float:
    """Output tokens per second while `--open` clients send one request after another."""
    seen, connections, begin = Seen(), Connections(port), time.perf_counter()
    end = begin + args.seconds

    async def client() -> None:
        while time.perf_counter() < end:
            await connections.send(random_request(args.tokens, next(seeds)), seen)

    await asyncio.gather(*(client() for _ in range(args.open)))
    assert not seen.other and not seen.refused_s, seen.other[:1]
    return seen.tokens_per_s(begin + RAMP * args.seconds, end, args.tokens)


async def overload(
    port: int, rate: float, args: argparse.Namespace, seeds: Iterator[int], seen: Seen
) -> tuple[float, float]:
    """(output tokens per second while requests come at `rate` per second, seconds of processor time
    of this client per second).
    """
    rng, due_s, at = random.Random(next(seeds)), [], 0.0
    while (at := at + rng.expovariate(rate)) < args.seconds:
        due_s.append(at)
    requests = [random_request(args.tokens, next(seeds)) for _ in due_s]
    sent, connections = [], Connections(port)
    begin, used = time.perf_counter(), time.process_time()
    for at, data in zip(due_s, requests, strict=True):
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        sent.append(asyncio.ensure_future(connections.send(data, seen)))
    end, used = begin + args.seconds, time.process_time() - used
    await asyncio.gather(*sent)
    return seen.tokens_per_s(begin + RAMP * args.seconds, end, args.tokens), used / args.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="A server that is offered too much.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each half of a round")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--open", type=int, default=64, help="outputs that may run or wait")
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0 or args.times <= 0:
        parser.error("--rounds, --seconds and --times must be greater than 0")
    port = free_port()
    command = OURS.format(python=sys.executable, model=args.model, port=port, tp=args.tp)
    seen, kept, used = Seen(), [], []
    seeds = itertools.count()  # no prompt comes twice
    with running([*shlex.split(command), "--max-open-requests", str(args.open)], port):
        time.sleep(SPARES_S)
        saturated = [asyncio.run(saturate(port, args, seeds))]
        for _ in range(args.rounds):
            rate = args.times * saturated[-1] / args.tokens
            tokens_per_s, cores = asyncio.run(overload(port, rate, args, seeds, seen))
            kept.append(tokens_per_s)
            used.append(cores)
            saturated.append(asyncio.run(saturate(port, args, seeds)))
    around = [(before + after) / 2 for before, after in itertools.pairwise(saturated)]
    shares = [have / full for have, full in zip(kept, around, strict=True)]
    line = {
        "machine": machine(),
        "saturated_tokens_per_s": [round(each, 1) for each in saturated],
        "offered": f"{args.times:g} times the saturated rate before",
        "tokens_per_s": [round(each, 1) for each in kept],
        "shares": [round(each, 3) for each in shares],
        "share": round(statistics.median(shares), 3),
        "client_cores": round(statistics.mean(used), 2),
        "refused": len(seen.refused_s),
        "refusal_ms_p50": round(1e3 * quantile(seen.refused_s, 0.5), 1),
        "refusal_ms_p99": round(1e3 * quantile(seen.refused_s, 0.99), 1),
        "other_answers": seen.other[:3],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
