"""Tests that start engines run in two processes of pytest-xdist beside each other, each file in one
of them. A test marked `alone`, which measures time, waits until no other runs, and others wait
for it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that share an engine, and those of nodes, which
    mostly wait.
    """
    if item.get_closest_marker("nodes"):
        return "nodes"
    return "served" if "served" in getattr(item, "fixturenames", ()) else item.path.stem


@contextmanager
def turn(config: pytest.Config, is_alone: bool) -> Iterator[None]:
    """While this is held, no test that is alone runs elsewhere, and no other if `is_alone`."""
    assert config.cache is not None
    folder = config.cache.mkdir("lanes")
    with (folder / "turn").open("w") as turn_file:
        # Whoever waits for its turn keeps others from taking theirs again and again.
        with (folder / "queue").open("w") as queue_file:
            fcntl.flock(queue_file, fcntl.LOCK_EX)
            fcntl.flock(turn_file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
