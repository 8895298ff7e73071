"""A section of the GPU check, which runs only if asked for: CUDA's own checkers run the kernels.

Each family of kernels of `numerics` runs under each checker, with its small shapes, in a process
and with a time limit of its own. torch takes memory for each tensor from CUDA then, so that what is
beyond a tensor belongs to nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_numerics import families

_TOOLS = ("memcheck", "racecheck", "initcheck")
# Importing torch under a checker takes about 15 seconds.
_LIMIT_S = 90.0
_TOOL_ENDS_S = 10.0
_AT_ONCE = 4


def sanitizer(check: Check) -> None:
    """A row for each checker and family. A checker may run out of time before it has seen all
    shapes.
    """
    path = shutil.which("compute-sanitizer")
    if path is None or not check.on_gpu:
        for tool in _TOOLS:
            check.add(tool, lambda: {"note": "needs a GPU and compute-sanitizer"})
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = [
            (f"{tool} {family}", pool.submit(run_tool, path, tool, family, _LIMIT_S))
            for tool in _TOOLS
            for family in families(check.backends)
        ]
        for name, row in rows:
            check.add(name, row.result)


def run_tool(path: str, tool: str, family: str, limit_s: float) -> Row:
    """Any error that the tool reports is exit code 99."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [path, "--tool", tool, "--error-exitcode", "99", sys.executable]
        command += ["-m", "benchmarks.gpu_check", "--small", "--sections", "numerics"]
        command += ["--family", family, "--part", str(part)]
        done = subprocess.run(
            [*command, "--until", str(time.monotonic() + limit_s)],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s + _TOOL_ENDS_S,
            check=False,
        )
        section = json.loads(part.read_text()) if part.exists() else {"rows": []}
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    row: Row = {"said": (summary or ["nothing"])[-1][-60:], "rows": len(section["rows"])}
    if early := section.get("ended_early"):
        row["ended_early"] = early
    return row | {"passed": done.returncode == 0 and row["rows"] > 0}
