"""Points at which tests make a rank fail. They do nothing unless `EAGLERAY_FAULTS` names a folder.

A test arms a point by writing the file `POINT.RANK` into that folder, with an action as content:
`kill`, `stop` (SIGSTOP), `raise` or `loop`. With a number after the action, the rank passes the
point that many times before it acts. The rank that reaches the point renames the file to
`POINT.RANK.fired` and acts, so each file acts once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

FAULTS_VARIABLE = "EAGLERAY_FAULTS"
_START_PHASES = ("rendezvous", "compile", "load", "kv_cache", "wait_for_peers", "allocate_cache")
POINTS = (*_START_PHASES, "step", "forward", "collective", "sample", "reply")
_folder = Path(os.environ[FAULTS_VARIABLE]) if os.environ.get(FAULTS_VARIABLE) else None
_num_passes: dict[str, int] = {}


def reach(point: str, rank: int) -> None:
    """Called by the rank where it passes the point."""
    if _folder is not None:
        _act(_folder / f"{point}.{rank}")


def _act(armed_file: Path) -> None:
    try:
        action, _, num_passes_before = armed_file.read_text().partition(" ")
    except OSError:
        return
    num_passes = _num_passes[armed_file.name] = _num_passes.get(armed_file.name, 0) + 1
    if num_passes <= int(num_passes_before or 0):
        return
    _num_passes[armed_file.name] = 0
    try:
        armed_file.rename(f"{armed_file}.fired")
    except OSError:
        return  # another process was first
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise RuntimeError(f"made to fail at {armed_file.name}")
    else:
        while True:
            time.sleep(0.01)
