"""Commands one after another within a time budget, each with a limit; what is done is kept.

`run_steps` starts every command in its own session. When a command ends, or at its limit, all
processes that descend from it are killed, those that were orphaned too. After every step the record
is written, so it is complete up to the last step that ended, whatever happens then. A step is left
out when too little of the budget remains for it, or when a step that it needs has not succeeded.
Does not import torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_process import write_json

Result = dict[str, Any]  # "name", "status", "seconds", "lines", and what `after` adds
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
# How long processes that were killed may take to end; those that wait for a device take longest.
_KILLED_S = 10.0
# Of the output of one step, this much of its beginning and as much of its end are kept.
_KEPT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command. `limit_s`: when it is killed. `least_s`: with less than this left of the budget
    it is not started. `needs`: steps without whose success it is not started, where they are part
    of the run. `margin_s`: if given, `--within` and the time until it is killed, less this, are
    appended to the command. `expected`: what its output must contain. `skipped`: why it cannot run
    here at all, if so.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    least_s: float
    needs: tuple[str, ...] = ()
    margin_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    skipped: str | None = None


def run_steps(
    steps: Sequence[Step],
    record: dict[str, Any],
    out: Path,
    budget_s: float,
    after: Callable[[Step], Result] = lambda _: {},
) -> None:
    """Run the steps in their order. Their results are appended to `record["steps"]`, which is
    written to `out/summary.json` after each; their output goes to `out/log.txt`. `after` is called
    when a step has ended and none of its processes is left; what it returns is added to the result.
    """
    out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    until_s = time.monotonic() + budget_s
    results: list[Result] = record.setdefault("steps", [])
    for step in steps:
        left_s = until_s - time.monotonic()
        failed = [r["name"] for r in results if r["name"] in step.needs and r["status"] != "ok"]
        result: Result = {"name": step.name, "seconds": 0.0, "lines": []}
        if step.skipped is not None:
            result["status"] = f"skipped: {step.skipped}"
        elif failed:
            result["status"] = f"dropped: {failed[0]} has not succeeded"
        elif left_s < step.least_s:
            result["status"] = f"dropped: {left_s:.0f} s left, it needs {step.least_s:.0f}"
        else:
            result |= run_step(step, out / "log.txt", min(step.limit_s, left_s))
            result |= after(step)
        results.append(result)
        write_json(out / "summary.json", record)
        print(f"{step.name}: {result['status']}, {result['seconds']} s", flush=True)


def run_step(step: Step, log: Path, limit_s: float) -> Result:
    """Run one command for at most `limit_s`. "lines": the JSON objects that it printed, one on a
    line. "left": commands of the processes that it left behind, which have been killed.
    """
    began_s = time.monotonic()
    command = [*step.command]
    if step.margin_s is not None:
        command += ["--within", f"{limit_s - step.margin_s:.1f}"]
    with log.open("ab") as output:
        output.write(f"\n===== {step.name}: {' '.join(command)}\n".encode())
        output.flush()
        starts_at = output.tell()
        process = subprocess.Popen(
            command,
            env=os.environ | dict(step.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _ending(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            status = f"killed after {limit_s:.0f} s"
        finally:
            left = kill_descendants()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
    said = _shortened(log, starts_at)
    missing = [text for text in step.expected if text not in said]
    if status == "ok" and missing:
        status = f"its output lacks {missing[0]}"
    result = {"status": status, "seconds": round(time.monotonic() - began_s, 1)}
    if status.startswith("killed"):
        left = []
    return result | {"lines": list(_objects(said))} | ({"left": left} if left else {})


def _ending(code: int) -> str:
    if code == 0:
        return "ok"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _shortened(log: Path, starts_at: int) -> str:
    """The output of the last step, without its middle if it is long; the file is cut likewise."""
    with log.open("r+b") as file:
        file.seek(starts_at)
        said = file.read()
        if len(said) > 2 * _KEPT_BYTES:
            cut = f"\n... {len(said) - 2 * _KEPT_BYTES} bytes left out ...\n".encode()
            said = said[:_KEPT_BYTES] + cut + said[-_KEPT_BYTES:]
            file.seek(starts_at)
            file.write(said)
            file.truncate()
    return said.decode(errors="replace")


def _objects(said: str) -> Iterator[dict[str, Any]]:
    for line in said.splitlines():
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


# Processes


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes a child of this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def kill_descendants() -> list[str]:
    """Kill everything below this process, again and again until nothing is left or it takes too
    long; returns the command lines of what was there at first.
    """
    first = living_descendants()
    until_s = time.monotonic() + _KILLED_S
    left = first
    while left and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap(left)
        left = living_descendants()
    return [command for command in first.values() if command]


def living_descendants() -> dict[int, str]:
    """The processes below this one that have not ended, with their command lines."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state not in "ZX":
                parents[int(path.name)] = int(parent)
    below, new = {os.getpid()}, {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - below
        below |= new
    return {pid: _command_of(pid) for pid in below - {os.getpid()}}


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100].strip()
    return ""


def _reap(pids: Mapping[int, str]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
