"""What is refused before the cluster is known, and what must wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.engine import EngineConfig
from configs.model import ModelConfig
from scheduler.errors import ConfigError
from workers.configuration import foresee_config


def test_with_device_auto_a_dtype_of_gpus_alone_is_no_mistake_yet(small_checkpoint: Path) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    assert foresee_config(EngineConfig(dtype="float16"), model, small_checkpoint).dtype == "float16"
    with pytest.raises(ConfigError, match="'float16' is not possible on device 'cpu'"):
        foresee_config(EngineConfig(dtype="float16", device="cpu"), model, small_checkpoint)


def test_what_no_device_can_run_is_refused_with_device_auto(small_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 100000 is beyond"):
        foresee_config(EngineConfig(max_model_len=100000), ModelConfig.from_dir(small_checkpoint), small_checkpoint)
