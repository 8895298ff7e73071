"""What the benchmarks share: the machine, models with random weights, alternating runs, and where
results go.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from configs.shapes import SHAPES
from workers.models.random_checkpoint import write_random_checkpoint

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
_X86 = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8")
_ARM = ("asimd", "bf16", "i8mm")
QWEN3_0_6B, QWEN3_60M = SHAPES["qwen3-0.6b"], SHAPES["qwen3-60m"]


def machine() -> dict[str, Any]:
    """The processor, its instructions that matter for speed, the cores this process may use, and
    versions.
    """
    info = Path("/proc/cpuinfo")
    told = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", told, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", told, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "cpu": name[1] if name else platform.processor(),
        "instructions": [each for each in _X86 + _ARM if each in has],
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Commit of the checkout, with a + if files have changed since; None outside of a checkout."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def model_or_random(model: str | None, raw_config: Mapping[str, Any] = QWEN3_60M) -> Iterator[str]:
    """The directory or hub id given, or else a temporary checkpoint of this shape with random
    weights.
    """
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as directory:
        write_random_checkpoint(Path(directory), raw_config, torch.bfloat16)
        yield directory


def alternate(runs: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call each of `runs` in turn, `repeats` times over, so that a slow minute of the machine
    affects all of them alike.
    """
    values: dict[str, list[T]] = {name: [] for name in runs}
    for i in range(repeats):
        for name, run in runs.items():
            values[name].append(run())
            print(f"{i + 1}/{repeats} {name}: {values[name][-1]}", file=sys.stderr, flush=True)
    return values


def median(values: list[float]) -> float:
    """To five significant digits."""
    return float(f"{statistics.median(values):.5g}")


def write_result(
    name: str, limit: str, measured: Mapping[str, Any], module: str | None = None
) -> None:
    """Write benchmarks/results/NAME.json and print it. `limit` says what the numbers should be
    compared with.

    `module` is the benchmark's module, if its name differs from the result's.
    """
    record = {
        "benchmark": name,
        "command": _command(module or name),
        "commit": commit(),
        "machine": machine(),
        "limit": limit,
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def _command(name: str) -> str:
    """The command as it was typed, with absolute paths shortened to their last part."""
    words = [re.sub(r"(?<!\S)/\S*/", "", word) for word in sys.argv[1:]]
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words])
