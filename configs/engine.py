"""Engine options: `EngineConfig` as the user gives them, `ResolvedConfig` as the engine runs them.

Everything that can be known to be wrong is refused here, before any actor starts: `EngineConfig` checks each field and
how they go together, `resolve` checks them against the checkpoint and the device. Unknown keys are refused by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.model import DTYPES, ModelConfig, rope_max_length
from scheduler.errors import ConfigError

DEFAULT_MODEL_DIR = Path(__file__).parent / "default_model"
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "flash_attn", "reference")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Tokens in one step. On a CPU products gain nothing from more rows, and every running sequence waits for the step. On a
# GPU fewer would take less time than the host needs to launch the step of a small model.
DEFAULT_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 8192}
DEFAULT_MAX_MODEL_LEN = 40960
MAX_TIMEOUT_S = 86400  # a day


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. None means: chosen from the checkpoint, the backend or the device.

    model: a checkpoint directory or a hub id. `kv_cache_bytes` is the KV cache of the whole engine on CPU, split over
    the ranks; on a GPU its size follows from `gpu_memory_utilization`. `num_kv_blocks` overrides both.
    `num_steps_ahead` is how many steps are submitted beyond the last unread result. Times are seconds.
    """

    model: str = str(DEFAULT_MODEL_DIR)
    tokenizer: str | None = None
    revision: str | None = None
    tensor_parallel_size: int = 1
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_bytes: int = 2**30
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool = False
    num_steps_ahead: int = 1
    seed: int | None = None
    ray_address: str | None = None
    start_timeout_s: float = 300.0
    step_timeout_s: float = 120.0
    frontend_timeout_s: float = 60.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in _WHOLE_AT_LEAST:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _check_whole(name, value, _WHOLE_AT_LEAST[name], _WHOLE_AT_MOST.get(name))
        for name in ("start_timeout_s", "step_timeout_s", "frontend_timeout_s"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= MAX_TIMEOUT_S:
                raise ConfigError(f"{name} must be above 0 and at most {MAX_TIMEOUT_S} seconds, got {value!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("model", "tokenizer", "revision", "ray_address"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "model"):
                raise ConfigError(f"{name} must be text, got {value!r}")
        utilization = self.gpu_memory_utilization
        if not _is_number(utilization) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization!r}")
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running sequence needs one token a step; raise the first or lower the second"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from decoded JSON or keyword arguments. An unknown key raises `ConfigError` and names the known."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ConfigError(f"unknown engine option {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What driver and workers run: options and checkpoint with every choice made. `model_dir` is a local directory."""

    engine: EngineConfig
    model: ModelConfig
    model_dir: str
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def blocks_per_sequence(self) -> int:
        """Width of a block table."""
        return math.ceil(self.max_model_len / self.block_size)


def resolve(
    engine: EngineConfig,
    model: ModelConfig,
    model_dir: Path,
    device: str,
    *,
    attention_backend: str,
    block_size: int,
    dtypes: tuple[str, ...],
    fast_dtypes: tuple[str, ...],
) -> ResolvedConfig:
    """Check the options against the checkpoint and the backend, and fill in what was left open.

    `device` is "cpu" or "cuda". `attention_backend` is the one that was chosen, `block_size` its best, `dtypes` are
    those it computes in and `fast_dtypes` those that a checkpoint's own dtype must be one of to be taken; float32 takes
    its place.
    """
    model.check_tensor_parallel_size(engine.tensor_parallel_size)
    longest = rope_max_length(model)
    max_model_len = engine.max_model_len or min(longest, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > longest:
        scaling = model.rope.rope_type
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the {longest} positions this checkpoint serves"
            + ("" if scaling == "default" else f" (rope scaling {scaling!r})")
        )
    own_dtype = model.dtype if model.dtype in fast_dtypes else "float32"
    dtype = own_dtype if engine.dtype == "auto" else engine.dtype
    if dtype not in dtypes:
        raise ConfigError(
            f"dtype {dtype!r} is not possible on device {device!r} with these kernels; possible are "
            f"{', '.join(dtypes)}. Choose one of them, or another attention_backend"
        )
    tokens = engine.max_num_batched_tokens or max(DEFAULT_NUM_BATCHED_TOKENS[device], engine.max_num_seqs)
    return ResolvedConfig(
        engine=engine,
        model=model,
        model_dir=str(model_dir),
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        block_size=engine.block_size or block_size,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
    )


_WHOLE_AT_LEAST = {
    "tensor_parallel_size": 1, "block_size": 1, "num_kv_blocks": 1, "kv_cache_bytes": 1, "max_num_seqs": 1,
    "max_num_batched_tokens": 1, "max_model_len": 2, "num_steps_ahead": 0, "seed": 0,
}  # fmt: skip
# A step ahead is a thread of every rank; a sequence a row of tables; block ids are 32-bit numbers.
_WHOLE_AT_MOST = {"num_steps_ahead": 8, "max_num_seqs": 65536, "block_size": 2**20, "num_kv_blocks": 2**31 - 1}
_MAY_BE_NONE = ("block_size", "num_kv_blocks", "max_num_batched_tokens", "max_model_len", "seed")


def _check_whole(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"at least {least}" + (f" and at most {most}" if most is not None else "")
        raise ConfigError(f"{name} must be a whole number of {limits}, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
