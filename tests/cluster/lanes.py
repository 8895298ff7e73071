"""Tests of programs and nodes run in two processes of pytest-xdist beside each other. A test marked
`alone`, which measures time, waits until no other runs, and others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those of a file, those that share a server, and those
    of nodes, which mostly wait.
    """
    if item.get_closest_marker("nodes"):
        return "nodes"
    return "served" if "served" in getattr(item, "fixturenames", ()) else item.path.stem


@contextmanager
def turn(config: pytest.Config, is_alone: bool) -> Iterator[None]:
    """While this is held, no test that is alone runs elsewhere, and no other if `is_alone`."""
    name = f"eagleray-lanes-{os.getuid()}-{hashlib.sha256(bytes(config.rootpath)).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    with (folder / "turn").open("w") as turn_file:
        # Whoever waits for its turn keeps others from taking theirs again and again.
        with (folder / "queue").open("w") as queue_file:
            fcntl.flock(queue_file, fcntl.LOCK_EX)
            fcntl.flock(turn_file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
