"""Engines on Ray clusters of several nodes. Each cluster belongs to a program of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from configs.paths import CHECKOUT

pytestmark = pytest.mark.engine


def run(program: str, limit_s: float) -> str:
    command = [sys.executable, "-m", f"tests.cluster.nodes.{program}"]
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_engine_over_two_nodes_outlives_the_loss_of_either() -> None:
    assert "the driver's node" in run("losing_nodes", 300.0)
