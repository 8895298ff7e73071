"""Shapes of published Qwen3 models by name, to measure them without their weights: what their
`config.json` says.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}
_SMALL = _COMMON | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_MIDDLE = _SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_WITH_EXPERTS = _MIDDLE | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    # No published model: small, for measuring what does not depend on the size.
    "qwen3-60m": _COMMON
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "qwen3-0.6b": _SMALL,
    "qwen3-8b": _MIDDLE,
    "qwen3-32b": _MIDDLE
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": _WITH_EXPERTS,
    "qwen3-235b-a22b": _WITH_EXPERTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "qwen3-coder-480b-a35b": _WITH_EXPERTS
    | {
        "hidden_size": 6144,
        "intermediate_size": 8192,
        "num_hidden_layers": 62,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "num_experts": 160,
        "moe_intermediate_size": 2560,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
    },
}
