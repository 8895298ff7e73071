"""Mixtures of experts: what the `config.json` of a Qwen3-MoE checkpoint says of them.

In a layer that has experts, a router chooses `num_experts_per_token` of them for each token, and
the token gets the sum of their MLPs, weighted. Keys are those of transformers' `Qwen3MoeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import ConfigError

MOE_MODEL_TYPE = "qwen3_moe"
# Choosing among them, a kernel holds a number for each; Qwen's models have 128 and 160.
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """`num_experts` MLPs of `intermediate_size` features, in each layer that has them.

    normalizes_weights: the weights of a token's experts are divided by their sum. Every
    `sparse_step`-th layer has experts, except those of `dense_layers`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def is_moe_layer(self, index: int) -> bool:
        """Whether the layer with this index, from 0, has experts."""
        return index not in self.dense_layers and (index + 1) % self.sparse_step == 0


def read_experts(raw_config: Mapping[str, Any], source_name: str) -> ExpertsConfig | None:
    """The experts in a decoded `config.json`, None if it is of another model type or no layer has
    them. Raises `ConfigError` for values that cannot be, `KeyError` with the missing key.
    """
    if raw_config.get("model_type") != MOE_MODEL_TYPE:
        return None

    def integer(key: str, default: int | None = None) -> int:
        value = raw_config[key] if default is None else raw_config.get(key, default)
        return _integer(value, key, source_name)

    normalizes_weights = raw_config.get("norm_topk_prob", False)
    if type(normalizes_weights) is not bool:
        raise ConfigError(
            f"{source_name}: norm_topk_prob must be true or false, got {normalizes_weights!r}"
        )
    dense_layers = raw_config.get("mlp_only_layers") or ()
    name = "num_local_experts" if "num_local_experts" in raw_config else "num_experts"
    experts = ExpertsConfig(
        num_experts=integer(name),
        num_experts_per_token=integer("num_experts_per_tok"),
        intermediate_size=integer("moe_intermediate_size"),
        normalizes_weights=normalizes_weights,
        sparse_step=integer("decoder_sparse_step", 1),
        dense_layers=tuple(
            sorted(
                _integer(index, "each of mlp_only_layers", source_name) for index in dense_layers
            )
        ),
    )
    for key, value, maximum in (
        (name, experts.num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", experts.num_experts_per_token, experts.num_experts),
        ("moe_intermediate_size", experts.intermediate_size, None),
        ("decoder_sparse_step", experts.sparse_step, None),
    ):
        if value < 1 or (maximum is not None and value > maximum):
            possible_range = "at least 1" if maximum is None else f"between 1 and {maximum}"
            raise ConfigError(f"{source_name}: {key} must be {possible_range}, got {value}")
    has_moe_layers = any(map(experts.is_moe_layer, range(integer("num_hidden_layers"))))
    return experts if has_moe_layers else None


def _integer(value: object, name: str, source_name: str) -> int:
    if type(value) is not int:
        raise ConfigError(f"{source_name}: {name} must be a whole number, got {value!r}")
    return value
