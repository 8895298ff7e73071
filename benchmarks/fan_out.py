"""The driver's processor time per step for each rank: `python -m benchmarks.fan_out`.

Actors that echo bytes stand for ranks. One process sends each of them a plan of 256 sequences and
waits for all answers, again and again, as the executor does. Its processor time per round is what
bounds the number of ranks and of steps per second of one driver. Prints one JSON line per number of
ranks.
"""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import ray

from benchmarks.common import machine

PLAN_BYTES, RESULT_BYTES = 2502, 1200  # of 256 sequences, see results/scheduler_scaling.json
NUM_WARMUP, NUM_TIMED = 50, 500


class Echo:
    """Answers a plan."""

    def step(self, plan: bytes) -> bytes:
        """As many bytes as a result has."""
        return plan[:RESULT_BYTES]


def main() -> None:
    ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False)
    print(json.dumps(machine()))
    plan = bytes(PLAN_BYTES)
    for num_ranks in (1, 2, 4, 8, 16):
        ranks: list[Any] = [
            ray.remote(Echo).options(num_cpus=1, enable_task_events=False).remote()
            for _ in range(num_ranks)
        ]
        for count in (NUM_WARMUP, NUM_TIMED):
            began, used = time.perf_counter(), processor_s()
            for _ in range(count):
                ray.get([rank.step.remote(plan) for rank in ranks], timeout=60)
        line = {
            "ranks": num_ranks,
            "processor_ms_per_step": round(1e3 * (processor_s() - used) / NUM_TIMED, 3),
            "ms_per_step": round(1e3 * (time.perf_counter() - began) / NUM_TIMED, 3),
        }
        print(json.dumps(line), flush=True)
        for rank in ranks:
            ray.kill(rank)
    ray.shutdown()


def processor_s() -> float:
    """Processor seconds of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
