"""Mixtures of experts: what the `config.json` of a Qwen3-MoE checkpoint says of them.

In a layer that has experts, a router chooses `num_per_token` of them for each token, and the token
gets the sum of their MLPs, weighted. Keys are those of transformers' `Qwen3MoeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import ConfigError

MODEL_TYPE = "qwen3_moe"
# Choosing among them, a kernel holds a number for each; Qwen's models have 128 and 160.
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`num_experts` MLPs of `intermediate_size` features, in each layer that has them.

    normalizes: the weights of a token's experts are divided by their sum. Every `sparse_step`-th
    layer has experts, except those of `dense_layers`.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalizes: bool
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def has_layer(self, index: int) -> bool:
        """Whether the layer with this index, from 0, has experts."""
        return index not in self.dense_layers and (index + 1) % self.sparse_step == 0


def read_experts(raw: Mapping[str, Any], where: str) -> Experts | None:
    """The experts in a decoded `config.json`, None if it is of another model type. Raises
    `ConfigError` for numbers that cannot be, `KeyError` with the name of what is missing.
    """
    if raw.get("model_type") != MODEL_TYPE:
        return None
    name = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    experts = Experts(
        num_experts=int(raw[name]),
        num_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalizes=bool(raw.get("norm_topk_prob", False)),
        sparse_step=int(raw.get("decoder_sparse_step", 1)),
        dense_layers=tuple(sorted(int(index) for index in raw.get("mlp_only_layers") or ())),
    )
    for key, value, most in (
        (name, experts.num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", experts.num_per_token, experts.num_experts),
        ("moe_intermediate_size", experts.intermediate_size, None),
        ("decoder_sparse_step", experts.sparse_step, None),
    ):
        if value < 1 or (most is not None and value > most):
            possible = "at least 1" if most is None else f"between 1 and {most}"
            raise ConfigError(f"{where}: {key} must be {possible}, got {value}")
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{where}: the checkpoint is quantized, which is not supported for a model with experts"
            " (model_type 'qwen3_moe'). Use its version in bfloat16"
        )
    return experts
