"""The step profile: every part of a step has a time, and experts are counted."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rank_pool import WorkerPool
from benchmarks.step_profile import floors, measure
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def one_process() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("extra", [{}, EXPERTS], ids=["dense", "experts"])
def test_parts_of_a_step_have_times_and_floors(
    one_process: WorkerPool, tmp_path: Path, extra: dict[str, int]
) -> None:
    make_checkpoint(tmp_path, Shape(name="profile", vocab=50_000, extra=extra))
    config = config_of(tmp_path, dtype="float32")
    args = argparse.Namespace(tp=1, batch_size=3, context=12, steps=2)
    ms, machines, experts_per_layer = measure(one_process, config, args)
    assert {"products", "vocabulary head", "sampling", "paged_attention"} <= set(ms)
    assert sum(ms.values()) == pytest.approx(2 * ms["step"])
    limits = floors(config, args.batch_size, args.context, machines[0], experts_per_layer)
    if extra:
        assert ms["experts"] > 0 and 2 <= experts_per_layer <= 6 and limits["experts"] > 0
    else:
        assert "experts" not in ms and experts_per_layer == 0 and limits["experts"] == 0
