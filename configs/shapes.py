"""Shapes of published Qwen3 models by name, to measure without weights: their `config.json`."""

from __future__ import annotations

from typing import Any


def _shape(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **overrides: Any
) -> dict[str, Any]:
    """A large dense model, unless `overrides` says something else."""
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "dtype": "bfloat16",
    } | overrides


def _experts(
    intermediate_size: int, num_experts: int = 128, num_kv_heads: int = 4
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_key_value_heads": num_kv_heads,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": intermediate_size,
        "norm_topk_prob": True,
    }


_LONG_CONTEXT = {"max_position_embeddings": 262144, "rope_theta": 10000000.0}
SHAPES: dict[str, dict[str, Any]] = {
    # No published model: for measuring what does not depend on the size.
    "qwen3-60m": _shape(
        256, 768, 8, 8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True
    ),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _shape(4096, 12288, 36, 32),
    "qwen3-32b": _shape(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _shape(2048, 6144, 48, 32, **_experts(768)),
    "qwen3-235b-a22b": _shape(4096, 12288, 94, 64, **_experts(1536)),
    "qwen3-coder-480b-a35b": _shape(6144, 8192, 62, 96, **_experts(2560, 160, 8), **_LONG_CONTEXT),
}
