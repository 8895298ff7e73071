"""Many seeds of the scheduler simulation: `python -m tests.scheduler.simulate --seeds 20000`.

Prints totals; the first violation ends the run with exit code 1, the seed, the law it broke, and
the command to replay it alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields

from tests.scheduler.simulator import SimulationReport, run_seed

SEEDS_PER_CHUNK = 50


def run_seeds(first: int, count: int) -> SimulationReport:
    """Play consecutive seeds in this process; the first violation raises AssertionError."""
    total = SimulationReport()
    for seed in range(first, first + count):
        total.add(run_seed(seed))
    return total


def run_parallel(first: int, count: int, processes: int) -> SimulationReport:
    """Play consecutive seeds in several processes; with one process, play them in this one."""
    if processes == 1:
        return run_seeds(first, count)
    total = SimulationReport()
    end = first + count
    with ProcessPoolExecutor(processes) as pool:
        chunks = [
            pool.submit(run_seeds, start, min(SEEDS_PER_CHUNK, end - start))
            for start in range(first, end, SEEDS_PER_CHUNK)
        ]
        for chunk in as_completed(chunks):
            try:
                total.add(chunk.result())
            except AssertionError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate the scheduler with random worlds.")
    parser.add_argument("--seeds", type=int, default=20000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    started_s = time.monotonic()
    try:
        total = run_parallel(options.first, options.seeds, options.processes)
    except AssertionError as error:
        seed = str(error).removeprefix("seed ").split(":")[0]
        print(
            f"FAILED {error}\nalone: python -m tests.scheduler.simulate --processes 1 --seeds 1"
            f" --first {seed}"
        )
        return 1
    seconds = time.monotonic() - started_s
    for field in fields(total):
        print(f"{field.name.replace('_', ' '):>24} {getattr(total, field.name):>12,}")
    print(
        f"violations 0, stuck 0; {seconds:.1f} s, {1000 * seconds / max(1, total.seeds):.1f} ms a"
        " seed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
