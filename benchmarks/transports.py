"""The time of an all-reduce by transport and size: `python -m benchmarks.transports`.

Ranks on one host through shared memory and through gloo, on hosts of their own (made of network
namespaces, see `tests.cluster.nodes.hosts`) through gloo, and four on two hosts, through gloo and
hierarchically. Between hosts, the packets and bytes that leave rank 0's host are counted. Prints
one JSON line per transport and number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from configs.paths import SOURCE_ROOT
from tests.cluster.nodes.hosts import hosts, why_not
from workers.parallel.backend import open_rendezvous
from workers.parallel.group import TensorParallelGroup

SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)  # bytes
NUM_WARMUP, NUM_TIMED = 20, 200
TIMEOUT_S = 60.0
Start = Callable[..., subprocess.Popen[str]]


def run_rank(rank: int, size: int, host: str, port: int, *, share: bool) -> None:
    """Reduce tensors of each size; rank 0 prints microseconds, and what left the host."""
    meeting = None
    if rank == 0:
        meeting = open_rendezvous(host, TIMEOUT_S)
        port = meeting.port
        print(port, flush=True)
    torch.set_num_threads(1)
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    group.join((host, port), TIMEOUT_S)
    if share:
        group.share_memory(TIMEOUT_S)
        assert group.transport.startswith("shared memory")
    found = {}
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 4)
        for _ in range(NUM_WARMUP):
            group.all_reduce(tensor)
        group.barrier()
        before, seconds = sent(), []
        for _ in range(NUM_TIMED):
            began = time.perf_counter()
            group.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
        after = sent()
        found[num_bytes] = {
            "microseconds": round(1e6 * statistics.median(seconds), 1),
            "packets": round((after[0] - before[0]) / NUM_TIMED, 1),
            "bytes": round((after[1] - before[1]) / NUM_TIMED),
        }
        group.barrier()
    if rank == 0:
        print(json.dumps(found), flush=True)
    group.close()


def sent() -> tuple[int, int]:
    """Packets and bytes that have left this host."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0" and is_host():
            fields = numbers.split()  # eight numbers about received packets, then sent ones
            return int(fields[9]), int(fields[8])
    return 0, 0


def is_host() -> bool:
    """Whether this process runs in a host of its own."""
    return socket.gethostname().startswith("host1")


def measure(starts: list[Start], address: str, *, share: bool) -> dict[str, Any]:
    """`starts`: for each rank, how to start its process."""
    command = [sys.executable, "-m", "benchmarks.transports", "--size", str(len(starts))]
    command += ["--host", address, *(["--share"] if share else [])]

    def begin(rank: int, port: int) -> subprocess.Popen[str]:
        own = [*command, "--rank", str(rank), "--port", str(port)]
        environment = os.environ | {"PYTHONPATH": str(SOURCE_ROOT)}
        return starts[rank](*own, env=environment, stdout=subprocess.PIPE)

    first = begin(0, 0)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    others = [begin(rank, port) for rank in range(1, len(starts))]
    found: dict[str, Any] = json.loads(first.stdout.readline())
    for process in (first, *others):
        assert process.wait(TIMEOUT_S) == 0
    return found


def here(*command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, text=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time all-reduces by transport.")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--share", action="store_true")
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.size, args.host, args.port, share=args.share)
        return
    print(json.dumps(machine()))
    for size in (2, 4):
        for name, share in (("shared memory", True), ("gloo on one host", False)):
            found = measure([here] * size, "127.0.0.1", share=share)
            print(json.dumps({"ranks": size, "transport": name, "by_bytes": found}), flush=True)
        if (reason := why_not()) is not None:
            print(json.dumps({"ranks": size, "transport": "gloo between hosts", "skipped": reason}))
            continue
        with hosts(size) as made:
            found = measure([host.start for host in made], made[0].address, share=False)
        line = {"ranks": size, "transport": "gloo between hosts", "by_bytes": found}
        print(json.dumps(line), flush=True)
    if why_not() is None:
        with hosts(2) as (one, two):
            starts = [one.start, one.start, two.start, two.start]
            for name, share in (("gloo", False), ("shared memory within hosts", True)):
                found = measure(starts, one.address, share=share)
                line = {"ranks": 4, "transport": f"{name}, two hosts", "by_bytes": found}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
