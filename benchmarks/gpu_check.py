"""What only a machine with a GPU can show: `make gpu-check`, or `python -m benchmarks.gpu_check [--out FILE]`.

    machine      the GPU, versions, what its memory and its matrix units sustain
    numerics     every kernel against its reference
    speed        every kernel against the least time it can take
    decode       steps of the 0.6B and 8B shapes, eager and through graphs
    throughput   output tokens a second of the engine, with each attention backend
    tokens       greedy outputs of all backends are equal; launching a step never waits for the GPU

Needs torch, triton and one process; nothing is downloaded or built, and Ray is not used. Under nine minutes: each
section has a limit, and what a section has found by then is kept. Results are written after every section, and one
table is printed at the end. Exit code 1 if anything has not passed. `--small`: tiny shapes on any device, a CPU with
TRITON_INTERPRET=1 included, whose times say nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.common import RESULTS
from benchmarks.common import machine as describe_machine
from benchmarks.gpu_check_common import Check, Row, TimeUp, median_us, rounded
from benchmarks.gpu_check_engine import decode_steps, throughput, tokens
from benchmarks.gpu_check_numerics import numerics
from benchmarks.gpu_check_speed import speed
from kernels.backend import Kernels, select_backend
from workers.roofline import Machine


def machine(check: Check) -> None:
    """What is here, and the ceilings that floors are computed from."""
    check.add("device", lambda: _describe(check))
    check.add("ceilings", lambda: _ceilings(check))
    for name in ("triton", "flash_attn"):
        found = check.backends[name].description if name in check.backends else "no"
        check.add(name, partial(dict, found=found))


def _describe(check: Check) -> Row:
    row: Row = {"name_of": describe_machine()["cpu"], "torch": torch.__version__, "triton": triton.__version__}
    if check.on_gpu:
        properties = torch.cuda.get_device_properties(check.device)
        row |= {
            "name_of": properties.name, "cuda": torch.version.cuda, "sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}", "gib": rounded(properties.total_memory / 2**30),
            "l2_mib": rounded(properties.L2_cache_size / 2**20),
        }  # fmt: skip
    return row


def _ceilings(check: Check) -> Row:
    """A copy, counting bytes read and written, and a square product of random numbers in bfloat16."""
    num_bytes, size = (2**20, 64) if check.small else (4 * 2**30, 8192)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=check.device).random_()
    target = torch.empty_like(source)
    copy_us = median_us(check, [lambda: target.copy_(source)])
    left, right = (check.normal(size, size, dtype=torch.bfloat16) for _ in range(2))
    product_us = median_us(check, [lambda: left @ right] * 4)
    check.ceilings = Machine(
        memory_bytes_per_s=2 * num_bytes / (copy_us / 1e6), flops_per_s=2 * size**3 / (product_us / 1e6)
    )
    return {
        "tb_per_s": rounded(check.ceilings.memory_bytes_per_s / 1e12),
        "tflop_per_s": rounded(check.ceilings.flops_per_s / 1e12),
    }


# By name, in order of importance: what runs, and its seconds. What one does not use is for those after it.
SECTIONS: dict[str, tuple[Callable[[Check], None], float]] = {
    "machine": (machine, 20.0),
    "numerics": (numerics, 150.0),
    "speed": (speed, 130.0),
    "decode": (decode_steps, 100.0),
    "throughput": (throughput, 70.0),
    "tokens": (tokens, 60.0),
}


def run_section(check: Check, run: Callable[[Check], None], limit_s: float) -> dict[str, Any]:
    """Rows, seconds, and why it ended early if it did."""

    def time_up(*_: object) -> None:
        raise TimeUp

    check.rows = []
    reason: str | None = None
    began = time.perf_counter()
    before = signal.signal(signal.SIGALRM, time_up)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, limit_s))
    try:
        run(check)
    except TimeUp:
        reason = f"stopped after {limit_s:.0f} s"
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    failed = [row["name"] for row in check.rows if not row.get("passed", True)]
    return {
        "seconds": round(time.perf_counter() - began, 1), "ended_early": reason, "failed": failed, "rows": check.rows,
    }  # fmt: skip


def table(sections: dict[str, dict[str, Any]], brief: bool = False) -> str:
    """A line a row, under the names of its section's columns. `brief` leaves out what is within its limit."""
    lines = []
    for name, section in sections.items():
        early = f", {section['ended_early']}" if section["ended_early"] else ""
        lines += ["", f"{name}: {section['seconds']} s, {len(section['failed'])} not passed{early}"]
        rows = [row for row in section["rows"] if not (brief and "limit" in row and row["passed"])]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
        lines += ["  ".join(line).rstrip() for line in padded]
    return "\n".join(lines[1:])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else str(value)


def find_backends(device: torch.device) -> dict[str, Kernels]:
    """Triton's, and flash-attn's where it can be imported."""
    backends = {"triton": select_backend(device.type, "triton")}
    if device.type == "cuda":
        try:
            backends["flash_attn"] = select_backend(device.type, "flash_attn")
        except ValueError as error:
            print(error, file=sys.stderr)
    return backends


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_check.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU, with TRITON_INTERPRET=1")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        check = Check(device=device, small=args.small, backends=find_backends(device))
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    due = time.perf_counter()
    record: dict[str, Any] = {
        "benchmark": "gpu_check", "small": args.small, "machine": describe_machine(),
        "limit": "floor: each byte moved once at the speed of a copy, or the operations at that of a large product",
        "times_are_real": check.on_gpu, "sections": {},
    }  # fmt: skip
    for name in args.sections:
        run, limit_s = SECTIONS[name]
        due += limit_s
        section = run_section(check, run, due - time.perf_counter())
        record["sections"][name] = section
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(table({name: section}), flush=True)
    print(f"\nall of it\n\n{table(record['sections'], brief=True)}")
    if not check.on_gpu:
        print("\nno GPU: the times above are those of an interpreter and say nothing")
    sys.exit(any(section["failed"] or section["ended_early"] for section in record["sections"].values()))


if __name__ == "__main__":
    main()
