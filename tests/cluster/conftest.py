"""What the tests with real actors share: a Ray that the "user" has started and a small
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Shape, make_checkpoint

SHAPE = Shape(
    name="cluster",
    heads=8,
    kv_heads=2,
    head_dim=16,
    vocab=1003,
    tied=True,
    extra={"eos_token_id": 2},
)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_kv_blocks": 512,
    "max_num_seqs": 16,
    "spares": "off",
}


@dataclass(frozen=True)
class SmallModel:
    """A random checkpoint without a tokenizer, and its transformers model."""

    path: Path
    model: Any


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    path = tmp_path_factory.mktemp("cluster")
    return SmallModel(path, make_checkpoint(path, SHAPE))


@pytest.fixture(scope="session")
def users_ray() -> Iterator[None]:
    """Ray as started by a program that also uses it for other things. Its GPUs do not exist: Ray
    only hands out their numbers.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Ray Serve looks at its proxy every 10 s otherwise, and replaces it after three looks.
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
        ray.init(
            address="local",
            num_cpus=12,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()
