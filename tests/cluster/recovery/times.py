"""How long a recovery takes: `python -m tests.cluster.recovery.times [--kills 10] [--model DIR]`.

Kills a rank (or the driver) of an engine under load, again and again, and prints one JSON line per
kind: seconds until the engine no longer reports that it is ready, until the group is back, and
until the next token of any stream; median and worst.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from typing import Any

import ray

from benchmarks.common import machine
from cluster import LLM
from scheduler.params import SamplingParams


def measure(
    llm: LLM, name: str, number: int, spares_ready: bool, limit_s: float
) -> dict[str, float]:
    """The seconds of one recovery."""
    driver = llm._engine_processes.driver
    while True:
        found = ray.get(driver.processes.remote(), timeout=10)
        if llm.stats().is_ready and (not spares_ready or "spare 0" in found):
            break
        time.sleep(0.1)
    last_s = 0.0
    stopping = False

    def follow() -> None:
        nonlocal last_s
        for _ in llm.stream("Count on from 17.", SamplingParams(max_tokens=900, ignore_eos=True)):
            last_s = time.monotonic()
            if stopping:
                return

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    while not last_s:
        time.sleep(0.01)
    time.sleep(0.2)
    before = llm.stats().num_recoveries
    os.kill(found[name].pid, number)
    killed_s = time.monotonic()
    noticed = back = 0.0
    while time.monotonic() - killed_s < limit_s:
        now_s = time.monotonic() - killed_s
        try:
            stats = ray.get(driver.stats.remote(), timeout=5)
        except ray.exceptions.RayError:
            noticed = noticed or now_s
            driver = llm._engine_processes.driver
            before = -1
            time.sleep(0.01)
            continue
        if not noticed and not stats.is_ready:
            noticed = time.monotonic() - killed_s
        if noticed and not back and stats.state == "serving" and stats.num_recoveries > before:
            back = time.monotonic() - killed_s
        if back and last_s > killed_s + noticed:
            break
        time.sleep(0.005)
    first = last_s - killed_s
    while last_s - killed_s < noticed:
        time.sleep(0.005)
        first = last_s - killed_s
    stopping = True
    for thread in threads:
        thread.join(20)
    return {"noticed_s": noticed, "group_back_s": back, "next_token_s": first}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a recovery takes.")
    parser.add_argument("--model")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--spares", default="warm")
    parser.add_argument("--stuck-after-s", type=float, default=5.0)
    parser.add_argument("--kinds", default="kill,stop,driver")
    args = parser.parse_args()
    options: dict[str, Any] = {"tensor_parallel_size": 2, "spares": args.spares}
    options["stuck_after_s"] = args.stuck_after_s
    kinds = {
        "kill": ("rank 1", signal.SIGKILL),
        "stop": ("rank 0", signal.SIGSTOP),
        "driver": ("driver", signal.SIGKILL),
    }
    print(json.dumps({"machine": machine(), "model": args.model, "spares": args.spares}))
    with LLM(args.model, device="cpu", **options) as llm:
        for kind in args.kinds.split(","):
            name, number = kinds[kind]
            count = args.kills if kind == "kill" else max(3, args.kills // 3)
            seen = [measure(llm, name, number, args.spares != "off", 60.0) for _ in range(count)]
            line: dict[str, Any] = {"kind": kind, "kills": count}
            for key in seen[0]:
                values = [one[key] for one in seen]
                line[key] = [round(statistics.median(values), 3), round(max(values), 3)]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
