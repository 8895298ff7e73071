"""A section of the GPU check in its own process, which may crash or hang without affecting the
others.

The process writes its part, a JSON file, after every row (`run_section`). The process that started
it reads that file when it has ended or was killed (`run_process`). A section may also be divided
into several processes (`run_processes`). Does not import torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_check_common import Check

Section = dict[
    str, Any
]  # "seconds", "ended_early" (why, None if it did not), "failed" (names of rows), "rows"
# If a signal arrives where Python drops exceptions (in a destructor), it is sent again after this
# time.
_REPEAT_S = 1.0
# A killed process that waits for its device ends only when the driver lets it.
_KILLED_S = 10.0


class TimeUp(BaseException):
    """The time of a section is over. Not an `Exception`, so that no error handler catches it."""


def run_section(check: Check, run: Callable[[Check], None], part: Path, until_s: float) -> None:
    """Run the section until it ends or `time.monotonic` reaches `until_s`. `part` holds the rows so
    far.
    """

    def time_up(*_: object) -> None:
        raise TimeUp

    def save(ended_early: str | None = "has not ended") -> None:
        failed = [row["name"] for row in check.rows if not row.get("passed", True)]
        seconds = round(time.monotonic() - began_s, 1)
        write_json(
            part,
            {"seconds": seconds, "ended_early": ended_early, "failed": failed, "rows": check.rows},
        )

    began_s = time.monotonic()
    reason: str | None = None
    check.rows, check.on_row = [], save
    save()
    before = signal.signal(signal.SIGALRM, time_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, until_s - began_s), _REPEAT_S)
        run(check)
    except TimeUp:
        reason = f"out of time after {time.monotonic() - began_s:.0f} s"
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    save(reason)


def run_process(command: list[str], part: Path, due_s: float) -> Section:
    """What `command` has left in `part` when it has ended; it is killed when `time.monotonic`
    reaches `due_s`.
    """
    began_s = time.monotonic()
    part.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stderr=errors)
        try:
            code: int | None = process.wait(max(0.0, due_s - began_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            print(f"process {process.pid} does not end", file=sys.stderr)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    sys.stderr.write(said)
    section: Section = {"ended_early": "left nothing", "failed": [], "rows": []}
    if part.exists():
        section = json.loads(part.read_text())
    section["seconds"] = round(time.monotonic() - began_s, 1)
    if code != 0:
        section["ended_early"] = ": ".join((_ending(code), *said.strip().splitlines()[-1:]))
    return section


def run_processes(commands: dict[str, tuple[list[str], Path]], due_s: float) -> Section:
    """`run_process` for several commands at the same time, each with its own part, as one section.
    The keys say which process has ended early. The parts are removed.
    """
    with ThreadPoolExecutor(len(commands)) as pool:
        running = [pool.submit(run_process, *pair, due_s) for pair in commands.values()]
        sections = [process.result() for process in running]
    for _, part in commands.values():
        part.unlink(missing_ok=True)
    reasons = [
        f"{key}: {section['ended_early']}"
        for key, section in zip(commands, sections, strict=True)
        if section["ended_early"] is not None
    ]
    return {
        "seconds": max(section["seconds"] for section in sections),
        "ended_early": "; ".join(reasons) or None,
        "failed": [name for section in sections for name in section["failed"]],
        "rows": [row for section in sections for row in section["rows"]],
    }


def _ending(code: int | None) -> str:
    if code is None:
        return "hung and was killed"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def write_json(path: Path, value: object) -> None:
    """Write all or nothing: a concurrent reader, or one after this process dies, sees the previous
    content.
    """
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(path)
