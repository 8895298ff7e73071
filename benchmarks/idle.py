"""Processor time of an idle engine: `python -m benchmarks.idle [--tp 2]`.

After a generation and some seconds of rest, the share of one core that the driver and each rank
use, and, side by side, that of an empty Ray actor in the same cluster. The limit: half a percentage
point above the empty actor.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.common import write_result
from cluster import LLM, SamplingParams


class Empty:
    """An actor that does nothing."""

    def process_id(self) -> int:
        return os.getpid()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rest", type=float, default=10.0, help="idle seconds before")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with LLM(tensor_parallel_size=args.tp, device="cpu") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
        remote: Any = ray.remote(num_cpus=0)
        empty = remote(Empty).remote()
        processes: dict[str, list[int]] = {"empty actor": [ray.get(empty.process_id.remote())]}
        processes |= {
            name: find(f"ray::{kind}")
            for name, kind in (("driver", "Driver"), ("rank", "RankActor"))
        }
        time.sleep(args.rest)
        before = {pid: cpu_seconds(pid) for pids in processes.values() for pid in pids}
        time.sleep(args.seconds)
        used = {
            pid: round(100 * (cpu_seconds(pid) - start) / args.seconds, 2)
            for pid, start in before.items()
        }
    percent = {name: [used[pid] for pid in pids] for name, pids in processes.items()}
    limit = "percent of a core: at most 0.5 beyond the empty actor"
    write_result(
        "idle",
        limit,
        {"tp": args.tp, "rest_s": args.rest, "seconds": args.seconds, "percent": percent},
    )


def find(title: str) -> list[int]:
    """Processes whose title, which Ray sets, starts with this."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_text().startswith(title):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
