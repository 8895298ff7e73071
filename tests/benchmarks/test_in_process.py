"""The executor over one rank in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.in_process import InProcessExecutor
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of
from tests.workers.planner import Planner, Row


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("small")
    make_checkpoint(model_dir, Shape(name="small"))
    return model_dir


def test_it_runs_plans(small_checkpoint: Path) -> None:
    executor = InProcessExecutor(config_of(small_checkpoint))
    assert executor.num_kv_blocks == 128
    planner, row = Planner(4), Row([1, 2, 3], 3)
    planner.admit(row, slot=0)
    for step_id in range(3):
        executor.launch(planner.step([(row, 3)]))
        assert len(executor.result(step_id).token_ids) == 1
    executor.close()


def test_it_is_one_rank(small_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="one process runs one rank"):
        InProcessExecutor(config_of(small_checkpoint, tensor_parallel_size=2))
