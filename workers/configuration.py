"""Options, checkpoint and kernels put together: the configuration that the driver and the workers
run.

Used by clients before anything starts, so it loads no kernels, and torch only if the question is
about a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from configs.engine import EngineConfig, ResolvedConfig, resolve
from configs.model import ModelConfig
from kernels.interface import Kernels
from kernels.select import choose, select_backend
from scheduler.errors import ConfigError


def resolve_config(
    engine: EngineConfig, model: ModelConfig, model_dir: Path, device: str
) -> ResolvedConfig:
    """`configs.engine.resolve` with the backend chosen for `device` ("cpu" or "cuda").

    "auto" depends on what is installed where this is called; the ranks run what was chosen here.
    Raises `ConfigError`.
    """
    dtype = model.dtype if engine.dtype == "auto" else engine.dtype
    try:
        backend = choose(
            device,
            engine.attention_backend,
            dtype=dtype,
            head_dim=model.head_dim,
            block_size=engine.block_size,
            kv_cache_dtype=engine.kv_cache_dtype,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return resolve(engine, model, model_dir, device, backend)


def foresee_config(engine: EngineConfig, model: ModelConfig, model_dir: Path) -> ResolvedConfig:
    """What the engine will run, as far as that is known before Ray is started.

    With device "auto", a configuration that only one device can run is accepted. Raises
    `ConfigError` for one that neither can.
    """
    errors: list[ConfigError] = []
    for device in ("cpu", "cuda") if engine.device == "auto" else (engine.device,):
        foreseen = engine
        needs_package = engine.attention_backend in ("flash_attn", "hybrid")
        if device == "cuda" and needs_package and not has_cuda():
            # The ranks may have what is missing here.
            foreseen = dataclasses.replace(engine, attention_backend="auto")
        try:
            return resolve_config(foreseen, model, model_dir, device)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def find_kernels(config: ResolvedConfig) -> Kernels:
    """The backend that was chosen. Raises `ConfigError` if this machine lacks what it needs."""
    try:
        return select_backend(
            config.device,
            config.attention_backend,
            head_dim=config.model.head_dim,
            block_size=config.block_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def has_cuda() -> bool:
    """Whether torch can use a GPU here. Imports torch, which takes a second."""
    import torch

    return torch.cuda.is_available()
