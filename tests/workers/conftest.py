"""What the tests of `workers/` share: one pool of rank processes, and configurations of checkpoints
on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rank_pool import WorkerPool
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from workers.configuration import resolve_config


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


def config_of(model_dir: Path, **options: Any) -> ResolvedConfig:
    """A configuration with small limits by default."""
    defaults: dict[str, Any] = {
        "model": str(model_dir),
        "device": "cpu",
        "block_size": 4,
        "num_kv_blocks": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "step_timeout_s": 20.0,
        "start_timeout_s": 30.0,
    }
    engine = EngineConfig.from_dict(defaults | options)
    return resolve_config(engine, ModelConfig.from_dir(model_dir), model_dir, "cpu")


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small checkpoint for tests that do not care about its shape."""
    from tests.checkpoints import Shape, make_checkpoint

    model_dir = tmp_path_factory.mktemp("small")
    make_checkpoint(model_dir, Shape(name="small"))
    return model_dir


ConfigMaker = Callable[..., ResolvedConfig]
