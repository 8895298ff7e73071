"""Options, checkpoint and kernels put together: the configuration that driver and workers run."""

from __future__ import annotations

from pathlib import Path

from configs.engine import EngineConfig, ResolvedConfig, resolve
from configs.model import ModelConfig
from kernels.backend import Kernels, select_backend
from scheduler.errors import ConfigError


def resolve_config(engine: EngineConfig, model: ModelConfig, model_dir: Path, device: str) -> ResolvedConfig:
    """See `configs.engine.resolve`; what the kernels of `device` ("cpu" or "cuda") leave open is theirs to say."""
    kernels = find_kernels(engine, device)
    return resolve(
        engine, model, model_dir, device, block_size=kernels.default_block_size, dtypes=kernels.dtypes,
        fast_dtypes=kernels.fast_dtypes,
    )  # fmt: skip


def foresee_config(engine: EngineConfig, model: ModelConfig, model_dir: Path) -> ResolvedConfig:
    """What the engine will run as far as that is known before the cluster is: with device "auto", a configuration that
    only one device can run is no mistake yet. Raises `ConfigError` for one that none can."""
    if engine.device != "auto":
        return resolve_config(engine, model, model_dir, engine.device)
    try:
        return resolve_config(engine, model, model_dir, "cpu")
    except ConfigError as error:
        try:
            return resolve_config(engine, model, model_dir, "cuda")
        except ConfigError:
            raise error from None


def find_kernels(engine: EngineConfig, device: str) -> Kernels:
    """The backend that the options ask for. Raises `ConfigError` if it does not run on `device`."""
    try:
        return select_backend(device, engine.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from None
