"""Load beside a program that takes all cores must not look like a fault: `python -m
tests.cluster.recovery.false_alarm [--minutes 10]`. Prints one JSON line; fails on the first
recovery.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time

from benchmarks.common import machine
from cluster import LLM
from tests.cluster.recovery.load import Load, cases, compare

STUCK_AFTER_S = 2.0
ROUND_LIMIT_S = 300.0


def busy() -> None:
    while True:
        sum(range(10**6))


def main() -> None:
    parser = argparse.ArgumentParser(description="Load on a machine that others use.")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    of = cases(32, tokens=160)
    with LLM(
        tensor_parallel_size=2, device="cpu", dtype="float32", stuck_after_s=STUCK_AFTER_S
    ) as llm:
        expected = Load(llm, of).wait(ROUND_LIMIT_S)
        others = [
            multiprocessing.Process(target=busy, daemon=True) for _ in range(os.cpu_count() or 1)
        ]
        for process in others:
            process.start()
        until, rounds, slowest_s = time.monotonic() + 60 * args.minutes, 0, 0.0
        while time.monotonic() < until:
            began = time.monotonic()
            assert compare(of, Load(llm, of).wait(ROUND_LIMIT_S), expected) == []
            slowest_s = max(slowest_s, time.monotonic() - began)
            rounds += 1
        recoveries = llm.stats().num_recoveries
        for process in others:
            process.kill()
    line = {
        "machine": machine(),
        "minutes": args.minutes,
        "stuck_after_s": STUCK_AFTER_S,
        "requests": rounds * len(of),
        "slowest_round_s": round(slowest_s, 1),
        "recoveries": recoveries,
    }
    print(json.dumps(line))
    assert recoveries == 0


if __name__ == "__main__":
    main()
