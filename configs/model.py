"""The shape of a Qwen3 checkpoint, read from its `config.json` without transformers.

The keys of transformers 5 are read (`rope_parameters`, `dtype`) and those of the versions before it
(`rope_theta`, `rope_scaling`, `torch_dtype`). What the engine cannot run is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.experts import MOE_MODEL_TYPE as MODEL_TYPE_WITH_EXPERTS
from configs.experts import ExpertsConfig, read_experts
from configs.formats.stored import StoredFormat
from configs.formats.table import read_format
from scheduler.errors import ConfigError, UnreadableError

ROPE_TYPES = ("default", "linear", "yarn", "dynamic")
DTYPES = ("float32", "bfloat16", "float16")
MAX_TENSOR_PARALLEL_SIZE = 64  # that is proposed; a larger one is not refused


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: type, base `theta`, and the parameters of the scaling
    (`workers/models/rope.py`). With type yarn, cosines and sines are multiplied by
    `attention_factor`; if that is None, by a factor from `mscale` and `mscale_all_dim` where both
    are given, and otherwise from `factor`.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0 without scaling
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Qwen3 model: sizes in elements; `dtype` that of the checkpoint, `stored_format` how it
    stores the matrices of the layers, None for plain numbers. Without `experts` it is dense;
    `intermediate_size` is that of the layers without experts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    stored_format: StoredFormat | None = None
    experts: ExpertsConfig | None = None

    @classmethod
    def from_dict(
        cls, raw_config: Mapping[str, Any], source_name: str = "config.json"
    ) -> ModelConfig:
        """Read a `config.json`. Raises `ConfigError` naming what is missing or not supported."""
        _check_supported(raw_config, source_name)
        try:
            num_heads = int(raw_config["num_attention_heads"])
            hidden_size = int(raw_config["hidden_size"])
            config = cls(
                vocab_size=int(raw_config["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw_config["intermediate_size"]),
                num_hidden_layers=int(raw_config["num_hidden_layers"]),
                num_attention_heads=num_heads,
                num_key_value_heads=int(raw_config.get("num_key_value_heads") or num_heads),
                # Where the key is absent, transformers takes 128.
                head_dim=int(raw_config.get("head_dim", 128) or hidden_size // num_heads),
                max_position_embeddings=int(raw_config.get("max_position_embeddings", 32768)),
                rms_norm_eps=float(raw_config.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(raw_config.get("tie_word_embeddings", False)),
                attention_bias=bool(raw_config.get("attention_bias", False)),
                rope=_read_rope(raw_config, source_name),
                dtype=_read_dtype(raw_config, source_name),
                eos_token_ids=_as_ids(raw_config.get("eos_token_id")),
                experts=read_experts(raw_config, source_name),
                stored_format=read_format(raw_config, source_name),
            )
        except KeyError as error:
            raise ConfigError(
                f"{source_name} has no {error.args[0]!r}: is this a Qwen3 checkpoint?"
            ) from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{source_name} cannot be read: {error}") from None
        config._check(source_name)
        return config

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`; the end-of-sequence ids are those of `generation_config.json` too."""
        path = model_dir / "config.json"
        raw_config = read_json(path)
        generation_config = read_generation_config(model_dir)
        config = cls.from_dict(raw_config, str(path))
        try:
            eos_token_ids = _as_ids(generation_config.get("eos_token_id"))
        except (TypeError, ValueError) as error:
            generation_config_path = model_dir / "generation_config.json"
            raise ConfigError(
                f"{generation_config_path}: eos_token_id cannot be read: {error}"
            ) from None
        return config.with_eos_token_ids(eos_token_ids)

    def with_eos_token_ids(self, token_ids: Iterable[int]) -> ModelConfig:
        """The same model, whose outputs end at these tokens too, as far as it has them."""
        ids_in_vocabulary = {token_id for token_id in token_ids if 0 <= token_id < self.vocab_size}
        added_ids = tuple(sorted(ids_in_vocabulary.difference(self.eos_token_ids)))
        return dataclasses.replace(self, eos_token_ids=self.eos_token_ids + added_ids)

    def possible_tensor_parallel_sizes(self) -> list[int]:
        """Numbers of ranks that split heads, KV heads (or replicate them evenly) and every MLP."""
        sizes = range(1, min(self.num_attention_heads, MAX_TENSOR_PARALLEL_SIZE) + 1)
        return [size for size in sizes if self._splits_into(size)]

    def check_tensor_parallel_size(self, num_ranks: int) -> None:
        if not self._splits_into(num_ranks):
            possible_sizes = ", ".join(map(str, self.possible_tensor_parallel_sizes()))
            mlps = ", ".join(f"{name} {width}" for name, width in self._mlp_sizes().items())
            raise ConfigError(
                f"tensor_parallel_size {num_ranks} does not split this model"
                f" ({self.num_attention_heads} query heads, {self.num_key_value_heads} KV heads,"
                f" {mlps}); possible are {possible_sizes}"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, has experts."""
        return self.experts is not None and self.experts.is_moe_layer(layer)

    def input_sizes(self, num_ranks: int) -> tuple[int, ...]:
        """Inputs of the matrices of a layer without experts on one of `num_ranks` ranks."""
        attention_size = self.num_attention_heads * self.head_dim
        return self.hidden_size, attention_size // num_ranks, self.intermediate_size // num_ranks

    def _mlp_sizes(self) -> dict[str, int]:
        """The features of the MLPs that the layers have."""
        has_experts_values = {self.has_experts(layer) for layer in range(self.num_hidden_layers)}
        sizes = {"intermediate size": self.intermediate_size} if False in has_experts_values else {}
        if self.experts is not None and True in has_experts_values:
            sizes["intermediate size of an expert"] = self.experts.intermediate_size
        return sizes

    def _splits_into(self, num_ranks: int) -> bool:
        num_kv_heads = self.num_key_value_heads
        return (
            self.num_attention_heads % num_ranks == 0
            and all(width % num_ranks == 0 for width in self._mlp_sizes().values())
            and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
        )

    def _check(self, source_name: str) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"{source_name}: {field.name} must be at least 1, got {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{source_name}: num_attention_heads ({self.num_attention_heads}) must be a"
                f" multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        stored_format = self.stored_format
        if self.experts is not None and stored_format is not None and stored_format.is_int8:
            raise ConfigError(
                f"{source_name}: {stored_format.name} is not possible for a model with experts"
                f" (model_type {MODEL_TYPE_WITH_EXPERTS!r}). Use its version in bfloat16 or FP8"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"{source_name}: head_dim must be even for rotary embeddings, got {self.head_dim}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` when it is absent or holds none,
    `UnreadableError` when the system cannot read it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: a model directory holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def read_generation_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's `generation_config.json`, empty when it has none."""
    path = model_dir / "generation_config.json"
    return read_json(path) if path.exists() else {}


def _check_supported(raw_config: Mapping[str, Any], source_name: str) -> None:
    model_type = raw_config.get("model_type")
    if model_type not in ("qwen3", MODEL_TYPE_WITH_EXPERTS):
        raise ConfigError(
            f"{source_name} is of model_type {model_type!r}; this engine runs 'qwen3' (dense Qwen3)"
            f" and {MODEL_TYPE_WITH_EXPERTS!r} (Qwen3 with experts)"
        )
    if raw_config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{source_name}: hidden_act {raw_config['hidden_act']!r} is not supported, only 'silu'"
        )
    if raw_config.get("use_sliding_window"):
        raise ConfigError(f"{source_name}: use_sliding_window is not supported")


def _read_rope(raw_config: Mapping[str, Any], source_name: str) -> RopeConfig:
    parameters = dict(raw_config.get("rope_parameters") or {})
    # Where a file has both, the old key was added to it, and transformers goes by that too.
    scaling = dict(raw_config.get("rope_scaling") or parameters)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"{source_name}: rope scaling {rope_type!r} is not supported; possible are"
            f" {', '.join(ROPE_TYPES)}"
        )
    rotary_share = scaling.get("partial_rotary_factor", raw_config.get("partial_rotary_factor"))
    if rotary_share not in (None, 1):
        raise ConfigError(f"{source_name}: partial_rotary_factor is not supported, only 1")
    thetas = (scaling.get("rope_theta"), raw_config.get("rope_theta"), parameters.get("rope_theta"))
    theta = float(next((candidate for candidate in thetas if candidate), 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if "factor" not in scaling:
        raise ConfigError(f"{source_name}: rope scaling {rope_type!r} has no factor")
    if not float(scaling["factor"]) > 0:
        raise ConfigError(
            f"{source_name}: the factor of rope scaling must be above 0, got {scaling['factor']!r}"
        )
    original_length = scaling.get("original_max_position_embeddings") or raw_config.get(
        "max_position_embeddings", 32768
    )
    optional_floats = {
        key: float(scaling[key])
        for key in ("attention_factor", "mscale", "mscale_all_dim")
        if scaling.get(key)
    }
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=float(scaling["factor"]),
        original_max_position_embeddings=int(original_length),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        **optional_floats,
    )


def _read_dtype(raw_config: Mapping[str, Any], source_name: str) -> str:
    dtype = raw_config.get("dtype") or raw_config.get("torch_dtype") or "float32"
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"{source_name}: dtype {dtype!r} is not supported; possible are {', '.join(DTYPES)}"
        )
    return dtype


def _as_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [str(value)]
    return tuple(int(token_id) for token_id in values)


def rope_max_length(model: ModelConfig) -> int:
    """The largest number of positions the rotary embedding supports. Beyond the original length,
    `dynamic` scaling depends on the longest row of a batch, so it is supported only up to that
    length.
    """
    if model.rope.rope_type == "dynamic":
        return model.rope.original_max_position_embeddings
    scaled_length = math.floor(model.rope.factor * model.rope.original_max_position_embeddings)
    return max(model.max_position_embeddings, scaled_length)
