"""A rank is killed while streams run over HTTP: `python -m benchmarks.serving_kill --model DIR`.

`launch.py serve` answers the same streams twice, undisturbed and with a kill in their middle. No
stream may fail. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.http_load import SPARES_S, Timings, free_port, run_streams, running
from benchmarks.serving import bodies
from cluster.resources.local_ray import LOCAL_RAY_SETTINGS

# Ray names a process after the class of its actor.
_RANK = "ray::RankActor"


def rank_of(session: int) -> int:
    """The process of the rank: of those of its class, spares among them, the one that has computed
    the longest.
    """
    seconds: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getsid(int(path.name)) == session and _RANK in (path / "cmdline").read_text():
                    fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
                    seconds[int(path.name)] = int(fields[11]) + int(fields[12])
            except OSError:  # it has ended
                continue
    if not seconds:
        raise RuntimeError(f"the server has no process {_RANK}")
    return max(seconds, key=lambda pid: seconds[pid])


async def run_with_kill(url: str, each: list[dict[str, Any]], session: int, at_s: float) -> Timings:
    """The streams, while `at_s` seconds after their start the rank is killed."""
    streams = asyncio.create_task(run_streams(url, each))
    await asyncio.sleep(at_s)
    if streams.done():
        raise RuntimeError(f"the streams ended within {at_s:.2f} s, before the kill")
    os.kill(rank_of(session), signal.SIGKILL)
    return await streams


def line(timings: Timings) -> dict[str, Any]:
    return timings.line() | {
        "total_s": round(timings.total_s, 2),
        "longest_wait_s": round(max(timings.between_s, default=0.0), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A kill under load.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="output tokens per stream")
    parser.add_argument("--spares-s", type=float, default=SPARES_S, help="wait for the spares")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "launch.py", "serve", "--port", str(port), "--model", args.model]
    with running([*command, "--max-model-len", "1024"], port, LOCAL_RAY_SETTINGS) as session:
        url, each = f"http://127.0.0.1:{port}", bodies(args.streams, args.tokens, seed=0)
        asyncio.run(run_streams(url, bodies(args.streams, 8, seed=1)))  # warm-up
        time.sleep(args.spares_s)
        undisturbed = asyncio.run(run_streams(url, each))
        at_s, each = undisturbed.total_s / 2, bodies(args.streams, args.tokens, seed=2)
        killed = asyncio.run(run_with_kill(url, each, session, at_s))
    failed = undisturbed.num_failed + killed.num_failed
    lines = {"undisturbed": line(undisturbed), "killed": line(killed)}
    wait_s = lines["killed"]["longest_wait_s"]
    print(
        json.dumps({"streams": args.streams, "failed": failed, "longest_wait_s": wait_s, **lines})
    )
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
