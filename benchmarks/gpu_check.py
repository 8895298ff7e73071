"""What only a machine with a GPU can show: `make gpu-check`, or `python -m benchmarks.gpu_check
[--out FILE] [--sections NAME ...] [--within SECONDS] [--triton-cache DIR] [--small]`.

    machine      the GPU, versions, what its memory and its matrix units sustain
    numerics     every kernel against its reference
    answers      the default model, real weights, with both kinds of cache
    speed        every kernel, the whole sampler and the products against their lower bounds
    decode       steps of the 0.6B and 8B shapes, eager and through graphs, and what they consist of
    prefill      steps of whole prompts, with each attention backend
    mixed        steps in which a prompt comes in beside rows that decode
    throughput   output tokens per second of the engine, with each attention backend
    tokens       outputs of all backends are equal; launching a step never waits for the GPU
    ranks        two ranks, where there are two GPUs: sums, tokens, steps of the 0.6B shape

and, only if asked for:

    8B, 8B-int4, 8B-fp8, 30B-A3B    steps of these models, and outputs per second of 8B
    grouped      products with codes of 4 bits and of FP8 against their lower bounds
    sanitizer    CUDA's checkers over small shapes, where they are installed

Needs torch and triton; nothing is downloaded or built. Every row runs in the process of its
section, those of `ranks` in two, those of `numerics` in one for each family of kernels, all without
Ray, whose part `benchmarks.dispatch` measures on any machine. Under nine minutes, as long again for
`--sections sanitizer`: each section has its own process and time limit, and its results so far are
kept if it crashes, hangs or runs out of time. Results are written after every section, and one
table is printed at the end. Exit code 1 if anything has not passed.

`--triton-cache DIR`: begin with the compiled kernels in `DIR/triton_cache.tar.xz`, if it is there,
and if there are new ones, write all of them to that name beside FILE; see `gpu_check_cache`.
`--small`: tiny shapes on any device, including a CPU with TRITON_INTERPRET=1; their times mean
nothing. Triton before 3.7 cannot interpret kernels with numpy 2.4 or later.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton

from benchmarks.common import RESULTS, commit
from benchmarks.common import machine as describe_machine
from benchmarks.gpu_check_cache import KernelCache, kernel_cache
from benchmarks.gpu_check_common import Check, Row, median_us, rounded
from benchmarks.gpu_check_engine import throughput
from benchmarks.gpu_check_grouped import grouped_speed
from benchmarks.gpu_check_mixed import mixed_steps
from benchmarks.gpu_check_model import answers
from benchmarks.gpu_check_numerics import families, numerics
from benchmarks.gpu_check_process import (
    Section,
    run_process,
    run_processes,
    run_section,
    write_json,
)
from benchmarks.gpu_check_ranks import two_ranks
from benchmarks.gpu_check_sanitizer import sanitizer
from benchmarks.gpu_check_speed import speed
from benchmarks.gpu_check_steps import decode_steps, prefill_steps
from benchmarks.gpu_check_tokens import tokens
from benchmarks.gpu_check_weights import mixture, weights
from configs.quantization import FP8, INT4
from kernels.interface import Kernels
from kernels.select import select_backend
from workers.device import CudaDevice
from workers.parallel.backend import TorchTransport, open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.roofline import Machine


def machine(check: Check) -> None:
    """The machine's hardware, and the ceilings from which the floors of the other sections are
    computed.
    """
    check.add("device", lambda: _describe(check))
    check.add("ceilings", lambda: _ceilings(check))
    check.add("process group", lambda: _process_group(check))
    for name in ("triton", "flash_attn", "hybrid"):
        found = check.backends[name].capabilities.description if name in check.backends else "no"
        check.add(name, partial(dict, found=found))


def _describe(check: Check) -> Row:
    row: Row = {
        "name_of": describe_machine()["cpu"],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if check.on_gpu:
        properties = torch.cuda.get_device_properties(check.device)
        row |= {
            "name_of": properties.name,
            "cuda": torch.version.cuda,
            "sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "gib": rounded(properties.total_memory / 2**30),
            "l2_mib": rounded(properties.L2_cache_size / 2**20),
        }
    return row


def _ceilings(check: Check) -> Row:
    """Memory speed: the faster of a copy (bytes read and written) and a sum (bytes read). Computing
    speed: a square product in bfloat16.
    """
    num_bytes, size = (2**20, 64) if check.small else (4 * 2**30, 8192)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=check.device).random_()
    target = torch.empty_like(source)
    copied = 2 * num_bytes / median_us(check, [lambda: target.copy_(source)]) / 1e6
    numbers = target.view(torch.float32)
    summed = num_bytes / median_us(check, [lambda: numbers.sum()]) / 1e6
    left, right = (check.normal(size, size, dtype=torch.bfloat16) for _ in range(2))
    product_us = median_us(check, [lambda: left @ right] * 4)
    return {
        "tb_per_s": rounded(max(copied, summed)),
        "copied_tb_per_s": rounded(copied),
        "summed_tb_per_s": rounded(summed),
        "tflop_per_s": rounded(2 * size**3 / product_us / 1e6),
    }


def _process_group(check: Check) -> Row:
    """The collective operations of ranks, called by a single rank: sums, a maximum and a gather; on
    a GPU within a graph.
    """
    rendezvous = open_rendezvous("127.0.0.1", _GROUP_TIMEOUT_S)
    backend = TorchTransport.connect(
        [0], 0, rendezvous.address, check.device, _GROUP_TIMEOUT_S, "rank 0"
    )
    # It claims to be one of two ranks, because a group of one does nothing.
    group = TensorParallelGroup(0, 2, check.device)
    with mock.patch.object(TorchTransport, "connect", return_value=backend):
        group.join(rendezvous.address, _GROUP_TIMEOUT_S)
    summed, largest = (
        check.normal(64, 1024),
        torch.arange(64, dtype=torch.int64, device=check.device),
    )
    gathered = torch.empty(1, *summed.shape, dtype=summed.dtype, device=check.device)

    def run() -> None:
        gathered.copy_(group.all_gather(group.all_reduce(summed)))
        group.all_reduce_max(largest)
        group.all_reduce(largest)

    graph = None
    try:
        group.barrier()
        graph = CudaDevice(check.device).capture(run) if check.on_gpu else None
        for _ in range(2):
            want_summed, want_largest = check.normal(64, 1024), largest + 1
            summed.copy_(want_summed)
            largest.copy_(want_largest)
            graph.replay() if graph is not None else run()
            if not (torch.equal(gathered[0], want_summed) and torch.equal(largest, want_largest)):
                return {"passed": False}
        row: Row = {"backend": group.transport, "passed": True}
        return row | (
            {"us": rounded(median_us(check, [lambda: group.all_reduce(summed)] * 20))}
            if check.on_gpu
            else {}
        )
    finally:
        graph = None  # before the group, as in `Worker.close`
        group.close()


# By name, in order of importance: the section, and its limit in seconds including its processes.
# Time that one does not use is left to the later ones. `--within` shortens all limits alike.
SECTIONS: dict[str, tuple[Callable[[Check], None], float]] = {
    "machine": (machine, 30.0),
    "numerics": (numerics, 85.0),
    "answers": (answers, 25.0),
    "speed": (speed, 95.0),
    "decode": (decode_steps, 80.0),
    "prefill": (prefill_steps, 35.0),
    "mixed": (mixed_steps, 60.0),
    "throughput": (throughput, 50.0),
    "tokens": (tokens, 45.0),
    "ranks": (two_ranks, 20.0),
}
# Those that run unless others are named, 525 seconds altogether.
DEFAULT_SECTIONS = list(SECTIONS)
# The others. 8B in 16 bits is among them to be compared with in the same run.
SECTIONS |= {
    "8B": (partial(weights, None), 80.0),
    "8B-int4": (partial(weights, INT4), 95.0),
    "8B-fp8": (partial(weights, FP8), 95.0),
    "30B-A3B": (mixture, 95.0),
    "grouped": (grouped_speed, 60.0),
    "sanitizer": (sanitizer, 535.0),
}
# How long a section may take to stop by itself before its process is killed.
_MARGIN_S = 5.0
_GROUP_TIMEOUT_S = 20.0
# Runs a section, given its name, the family of kernels (None for all), the file for its part, and
# the time at which it must stop.
Command = Callable[[str, str | None, Path, float], list[str]]


def limits_of(names: Sequence[str], within_s: float | None = None) -> dict[str, float]:
    """Seconds of each section, all shortened in proportion if there are fewer than they sum up
    to.
    """
    limits_s = {name: SECTIONS[name][1] for name in names}
    factor = min(1.0, within_s / sum(limits_s.values())) if within_s is not None else 1.0
    return {name: factor * limit_s for name, limit_s in limits_s.items()}


def run_sections(
    record: dict[str, Any],
    limits_s: dict[str, float],
    out: Path,
    command: Command,
    family_names: Sequence[str] = (),
    cache: KernelCache | None = None,
) -> None:
    """Run the sections one after another, each in its own process, `numerics` in one for each of
    the families. `record` is written to `out`, and what was compiled is packed, after every
    section.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.stem}_part.json")
    due_s = time.monotonic()
    for name, limit_s in limits_s.items():
        due_s += limit_s
        until_s = due_s - _MARGIN_S
        if name == "numerics" and family_names:
            parts = [part.with_stem(f"{part.stem}_{place}") for place in range(len(family_names))]
            commands = {
                family: (command(name, family, of_family, until_s), of_family)
                for family, of_family in zip(family_names, parts, strict=True)
            }
            section = run_processes(commands, due_s)
        else:
            section = run_process(command(name, None, part, until_s), part, due_s)
        record["sections"][name] = section
        if cache is not None:
            cache.pack()
            record["compiled_kernels"] = cache.num_kernels
        write_json(out, record)
        print(table({name: section}), flush=True)
    part.unlink(missing_ok=True)


def command_of(
    record: dict[str, Any], name: str, family: str | None, part: Path, until_s: float
) -> list[str]:
    """The command that runs one section, or one family of kernels; its floors follow from the
    measured ceilings in `record`.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--sections", name]
    command += [
        "--part",
        str(part),
        "--until",
        str(until_s),
        *(["--small"] if record["small"] else []),
        *(["--family", family] if family is not None else []),
    ]
    rows = record["sections"].get("machine", {"rows": []})["rows"]
    for ceilings in (row for row in rows if "tb_per_s" in row):
        command += [
            "--tb-per-s",
            str(ceilings["tb_per_s"]),
            "--tflop-per-s",
            str(ceilings["tflop_per_s"]),
        ]
    return command


def table(sections: dict[str, Section], brief: bool = False) -> str:
    """One line per row, under the names of its section's columns. `brief` leaves out rows that are
    within their limits.
    """
    lines = []
    for name, section in sections.items():
        early = f", {section['ended_early']}" if section["ended_early"] else ""
        lines += ["", f"{name}: {section['seconds']} s, {len(section['failed'])} not passed{early}"]
        rows = [row for row in section["rows"] if not (brief and "limit" in row and row["passed"])]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        padded = (
            [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells
        )
        lines += ["  ".join(line).rstrip() for line in padded]
    return "\n".join(lines[1:])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else str(value)


def find_backends(device: torch.device) -> dict[str, Kernels]:
    """Triton's, and those with flash-attn where it can be imported. Raises `ValueError` where
    Triton's cannot run.
    """
    backends = {"triton": select_backend(device.type, "triton")}
    if device.type == "cuda":
        for name in ("flash_attn", "hybrid"):
            with suppress(ValueError):
                backends[name] = select_backend(device.type, name)
    return backends


def interpreter_problem(triton_version: str, numpy_version: str) -> str | None:
    """Why this Triton cannot interpret kernels with this numpy, None if it can. Compiled kernels
    run with any numpy.
    """
    too_old, too_new = (
        tuple(map(int, version.split(".")[:2])) for version in (triton_version, numpy_version)
    )
    if too_old < (3, 7) and too_new >= (2, 4):
        return (
            f"the interpreter of Triton {triton_version} takes arrays of one number for numbers,"
            f" which numpy {numpy_version} refuses; install numpy<2.4 or triton>=3.7, or use a GPU"
        )
    return None


def main() -> None:
    """Run, write, print; or run the one section of a process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_check.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    parser.add_argument(
        "--sections", nargs="+", choices=list(SECTIONS), default=DEFAULT_SECTIONS, metavar="NAME"
    )
    parser.add_argument("--within", type=float, metavar="S", help="seconds for all sections")
    parser.add_argument("--triton-cache", type=Path, metavar="DIR")
    for name, kind in (
        ("--part", Path),
        ("--family", str),
        ("--until", float),
        ("--tb-per-s", float),
        ("--tflop-per-s", float),
    ):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # for a section's process
    args = parser.parse_args()
    if args.part is not None:
        run_part(args)
        return
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU, with TRITON_INTERPRET=1")
    if not on_gpu and (problem := interpreter_problem(triton.__version__, np.__version__)):
        parser.error(problem)
    try:
        backends = find_backends(torch.device("cuda" if on_gpu else "cpu"))
    except ValueError as error:
        parser.error(str(error))
    record: dict[str, Any] = {
        "benchmark": "gpu_check",
        "small": args.small,
        "commit": commit(),
        "machine": describe_machine(),
        "limit": (
            "floor: each byte moved once, or the operations done, at the measured speeds of"
            " `ceilings`"
        ),
        "times_are_real": on_gpu,
        "sections": {},
    }
    limits_s = limits_of(args.sections, args.within)
    carried = kernel_cache(args.triton_cache, args.out.parent) if args.triton_cache else None
    with carried or nullcontext() as cache:
        command = partial(command_of, record)
        run_sections(record, limits_s, args.out, command, list(families(backends)), cache)
    print("\nall of it without Ray: `numerics` and `ranks` in several processes, the others in one")
    print()
    print(table(record["sections"], brief=True))
    if not on_gpu:
        print("\nno GPU: the times above are those of an interpreter and say nothing")
    sys.exit(
        any(section["failed"] or section["ended_early"] for section in record["sections"].values())
    )


def run_part(args: argparse.Namespace) -> None:
    """What `command_of` asks for."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    check = Check(
        device=device, small=args.small, backends=find_backends(device), family=args.family
    )
    if args.tb_per_s is not None:
        check.ceilings = Machine(
            memory_bytes_per_s=1e12 * args.tb_per_s, flops_per_s=1e12 * args.tflop_per_s
        )
    torch.manual_seed(0)
    run_section(check, SECTIONS[args.sections[0]][0], args.part, args.until)


if __name__ == "__main__":
    main()
