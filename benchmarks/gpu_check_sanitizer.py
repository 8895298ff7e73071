"""A section of the GPU check, which runs only if asked for: CUDA's own checkers run the kernels.

Each family of kernels of `numerics` runs under each checker, with its small shapes, in a process
and with a time limit of its own. torch takes memory for each tensor from CUDA then, so that what is
beyond a tensor belongs to nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_numerics import families
from benchmarks.gpu_check_verdicts import UNPOISONED

_TOOLS = ("memcheck", "racecheck", "initcheck")
# Importing torch under a checker takes about 15 seconds. With nine families, all of it is 480.
_LIMIT_S = 150.0
_TOOL_ENDS_S = 10.0
_AT_ONCE = 9
# Its lines begin so. The first is its name; the kernel of a report is in the first lines of it.
_PREFIX, _OWN_NAME = "=========", "COMPUTE-SANITIZER"
_NUM_KEPT_LINES = 4
_MOST_CHARACTERS = 400
# The last line that a checker prints, ERROR SUMMARY or RACECHECK SUMMARY.
_SUMMARY = " SUMMARY: "


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
        names = {
            pool.submit(run_tool, path, tool, family, _LIMIT_S): f"{tool} {family}"
            for tool in _TOOLS
            for family in families(check.backends)
        }
        for row in as_completed(names):
            check.add(names[row], row.result)


def run_tool(path: str, tool: str, family: str, limit_s: float) -> Row:
    """Any error that the tool reports is exit code 99. "verdict": "passed" if there was none and
    every shape was seen and right, "partial" if not all were seen, else "failed".
    """
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [path, "--tool", tool, "--error-exitcode", "99", sys.executable]
        command += ["-m", "benchmarks.gpu_check", "--small", "--sections", "numerics"]
        command += ["--family", family, "--part", str(part)]
        command += ["--until", str(time.monotonic() + limit_s)]
        code, said = _run(command, _environment(tool), limit_s + _TOOL_ENDS_S)
        section = {"rows": [], "failed": [], "ended_early": "left nothing"}
        if part.exists():
            section = json.loads(part.read_text())
    summaries = [line for line in said.splitlines() if _SUMMARY in line]
    verdict = "passed"
    if code not in (0, None) or section["failed"]:
        verdict = "failed"
    elif code is None or section["ended_early"] or not section["rows"] or not summaries:
        verdict = "partial"
    row: Row = {"said": (summaries or ["nothing"])[-1][-60:], "rows": len(section["rows"])}
    if verdict == "failed":  # the first that it reports, to judge whether it is right
        reported = (
            line.removeprefix(_PREFIX).strip()
            for line in said.splitlines()
            if line.startswith(_PREFIX) and _OWN_NAME not in line
        )
        row["first"] = "; ".join([*filter(None, reported)][:_NUM_KEPT_LINES])[:_MOST_CHARACTERS]
    row |= {"wrong": section["failed"]} if section["failed"] else {}
    row |= {"ended_early": section["ended_early"]} if section["ended_early"] else {}
    return row | {"verdict": verdict, "passed": verdict == "passed"}


def _environment(tool: str) -> dict[str, str]:
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return environment | ({UNPOISONED: "1"} if tool == "initcheck" else {})


def _run(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """(exit code, what it printed). At the limit the command is killed with the processes that it
    has started, and its code is None.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
