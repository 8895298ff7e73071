"""The simulation of the control plane finds every planted fault, and none in the unchanged code."""

from __future__ import annotations

import pytest

from tests.cluster.recovery.planted_bugs import PLANTED
from tests.cluster.recovery.simulator import run_seed

NUM_SEEDS = 100
BATCH = 25
MAX_SEEDS = 60


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_random_recoveries_keep_every_law(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name: str) -> None:
    for seed in range(MAX_SEEDS):
        try:
            run_seed(seed, PLANTED[name])
        except AssertionError:
            return
    raise AssertionError(f"{name} survives {MAX_SEEDS} seeds")
