"""What is refused before the cluster is known, and what can only be refused later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.engine import EngineConfig
from configs.model import ModelConfig
from scheduler.errors import ConfigError
from workers.configuration import foresee_config


def test_with_device_auto_a_dtype_of_gpus_alone_is_no_mistake_yet(small_checkpoint: Path) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    assert foresee_config(EngineConfig(dtype="float16"), model, small_checkpoint).dtype == "float16"
    with pytest.raises(ConfigError, match="'float16' is not possible on device 'cpu'"):
        foresee_config(EngineConfig(dtype="float16", device="cpu"), model, small_checkpoint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_flash_attn_may_be_where_the_ranks_run(small_checkpoint: Path, device: str) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    engine = EngineConfig(device=device, attention_backend="flash_attn", dtype="float16")
    assert foresee_config(engine, model, small_checkpoint).device == "cuda"
    with pytest.raises(ConfigError, match="kernel backend 'flash_attn' cannot run on device 'cpu'"):
        foresee_config(
            EngineConfig(device="cpu", attention_backend="flash_attn"), model, small_checkpoint
        )


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_what_no_device_can_run_is_refused_with_device_auto_as_the_cpu_does(
    small_checkpoint: Path, backend: str
) -> None:
    engine = EngineConfig(max_model_len=100000, attention_backend=backend)
    with pytest.raises(ConfigError, match="max_model_len 100000 is beyond"):
        foresee_config(engine, ModelConfig.from_dir(small_checkpoint), small_checkpoint)
