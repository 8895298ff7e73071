"""What is refused before the cluster is known, and what can only be refused later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import EngineConfig
from configs.experts import ExpertsConfig
from configs.model import ModelConfig
from scheduler.errors import ConfigError
from tests.kernels.test_flash_attn import WHEEL, install
from workers.configuration import preview_config, resolve_config


def test_with_device_auto_a_dtype_of_gpus_alone_is_no_mistake_yet(small_checkpoint: Path) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    assert preview_config(EngineConfig(dtype="float16"), model, small_checkpoint).dtype == "float16"
    with pytest.raises(ConfigError, match="'float16' is not possible on device 'cpu'"):
        preview_config(EngineConfig(dtype="float16", device="cpu"), model, small_checkpoint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["flash_attn", "hybrid"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_flash_attn_may_be_where_the_ranks_run(
    small_checkpoint: Path, device: str, backend: str
) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    engine = EngineConfig(device=device, attention_backend=backend, dtype="float16")
    assert preview_config(engine, model, small_checkpoint).device == "cuda"
    with pytest.raises(ConfigError, match=f"backend '{backend}' cannot run on device 'cpu'"):
        preview_config(replace(engine, device="cpu"), model, small_checkpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            r"'fp8_e4m3' is .* kernel backend 'hybrid'; possible are auto\. Choose .* another",
        ),
        ({"block_size": 16}, "block_size 16 is not possible .* multiples of 128"),
        ({"dtype": "float32"}, "'float32' is not possible .* possible are bfloat16"),
    ],
)
def test_what_the_hybrid_backend_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, small_checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    install(monkeypatch, WHEEL)
    model = replace(ModelConfig.from_dir(small_checkpoint), head_dim=64, dtype="bfloat16")
    engine = EngineConfig(attention_backend="hybrid", device="cuda")
    assert resolve_config(engine, model, small_checkpoint, "cuda").block_size == 128
    with pytest.raises(ConfigError, match=message):
        resolve_config(replace(engine, **options), model, small_checkpoint, "cuda")


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_what_no_device_can_run_is_refused_with_device_auto_as_the_cpu_does(
    small_checkpoint: Path, backend: str
) -> None:
    engine = EngineConfig(max_model_len=100000, attention_backend=backend)
    with pytest.raises(ConfigError, match="max_model_len 100000 is beyond"):
        preview_config(engine, ModelConfig.from_dir(small_checkpoint), small_checkpoint)


def with_experts(model: ModelConfig) -> ModelConfig:
    experts = ExpertsConfig(
        num_experts=8, num_experts_per_token=2, intermediate_size=32, normalizes_weights=True
    )
    return replace(model, experts=experts)


def test_int8_is_refused_for_models_with_experts(small_checkpoint: Path) -> None:
    model = with_experts(ModelConfig.from_dir(small_checkpoint))
    with pytest.raises(ConfigError, match="'int8' is not possible for a model with experts"):
        resolve_config(EngineConfig(quantization="int8"), model, small_checkpoint, "cpu")


@pytest.mark.parametrize("has_experts", [False, True])
def test_the_reference_runs_on_a_gpu_only_without_graphs(
    small_checkpoint: Path, has_experts: bool
) -> None:
    model = ModelConfig.from_dir(small_checkpoint)
    if has_experts:
        model = with_experts(model)
    engine = EngineConfig(device="cuda", attention_backend="reference")
    with pytest.raises(ConfigError, match="only without graphs: set enforce_eager"):
        resolve_config(engine, model, small_checkpoint, "cuda")
    eager = replace(engine, enforce_eager=True)
    assert resolve_config(eager, model, small_checkpoint, "cuda").device == "cuda"
