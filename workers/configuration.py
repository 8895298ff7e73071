"""Options, checkpoint and kernels put together: the configuration that driver and workers run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from configs.engine import EngineConfig, ResolvedConfig, resolve
from configs.model import ModelConfig
from kernels.backend import Kernels, select_backend
from scheduler.errors import ConfigError


def resolve_config(engine: EngineConfig, model: ModelConfig, model_dir: Path, device: str) -> ResolvedConfig:
    """See `configs.engine.resolve`; what the kernels of `device` ("cpu" or "cuda") leave open is theirs to say.

    "auto" looks at what is installed where this is called; the ranks take what was chosen. Raises `ConfigError`.
    """
    dtype = model.dtype if engine.dtype == "auto" else engine.dtype
    try:
        kernels = select_backend(
            device, engine.attention_backend, dtype=dtype, head_dim=model.head_dim, block_size=engine.block_size
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return resolve(
        engine, model, model_dir, device, attention_backend=kernels.name, block_size=kernels.default_block_size,
        dtypes=kernels.dtypes, fast_dtypes=kernels.fast_dtypes,
    )  # fmt: skip


def foresee_config(engine: EngineConfig, model: ModelConfig, model_dir: Path) -> ResolvedConfig:
    """What the engine will run as far as that is known before the cluster is: with device "auto", a configuration that
    only one device can run is no mistake yet. Raises `ConfigError` for one that none can."""
    refused: list[ConfigError] = []
    for device in ("cpu", "cuda") if engine.device == "auto" else (engine.device,):
        known = engine
        if device == "cuda" and engine.attention_backend == "flash_attn" and not torch.cuda.is_available():
            known = dataclasses.replace(engine, attention_backend="auto")  # the ranks may have what is missing here
        try:
            return resolve_config(known, model, model_dir, device)
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


def find_kernels(config: ResolvedConfig) -> Kernels:
    """The backend that was chosen. Raises `ConfigError` if this machine has not what it needs."""
    try:
        return select_backend(
            config.device, config.attention_backend, head_dim=config.model.head_dim, block_size=config.block_size
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
