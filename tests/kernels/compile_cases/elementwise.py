"""Norms, rotary embedding, KV store and gate, with the feature sizes of Qwen3 models that need most
registers; heads that are a power of two and others.
"""

from __future__ import annotations

from typing import Any

from triton import next_power_of_2

from kernels.gpu import elementwise
from tests.kernels.compile_cases import CHIPS_NOT_RUN_ON, CompileCase


def _rms_norm(features: int, dtype: str = "bf16") -> CompileCase:
    block = next_power_of_2(features)
    pointers = dict.fromkeys(("x_TE", "weight_E", "out_TE"), f"*{dtype}")
    return CompileCase(
        name=f"rms_norm-{features}-{dtype}",
        kernel=elementwise._rms_norm,
        num_warps=elementwise._num_warps(block),
        signature=pointers
        | {"row_stride": "i32:16", "eps": "fp32", "E": "constexpr", "TILE_FEATURES": "constexpr"},
        constexprs={"E": features, "TILE_FEATURES": block},
        chips=CHIPS_NOT_RUN_ON,
    )


def _add_rms_norm(features: int, dtype: str = "bf16") -> CompileCase:
    block = next_power_of_2(features)
    pointers = dict.fromkeys(("x_TE", "residual_TE", "weight_E", "out_TE", "total_TE"), f"*{dtype}")
    strides = {"x_stride": "i32:16", "residual_stride": "i32:16"}
    return CompileCase(
        name=f"add_rms_norm-{features}-{dtype}",
        kernel=elementwise._add_rms_norm,
        num_warps=elementwise._num_warps(block),
        signature=pointers
        | strides
        | {"eps": "fp32", "E": "constexpr", "TILE_FEATURES": "constexpr"},
        constexprs={"E": features, "TILE_FEATURES": block},
        chips=CHIPS_NOT_RUN_ON,
    )


def _silu_and_mul(features: int, dtype: str = "bf16") -> CompileCase:
    pointers = {"gate_up_T2F": f"*{dtype}", "out_TF": f"*{dtype}"}
    return CompileCase(
        name=f"silu_and_mul-{features}-{dtype}",
        kernel=elementwise._silu_and_mul,
        num_warps=elementwise._num_warps(elementwise._FEATURES_PER_PROGRAM),
        signature=pointers
        | {"row_stride": "i32:16", "F": "constexpr", "TILE_FEATURES": "constexpr"},
        constexprs={"F": features, "TILE_FEATURES": elementwise._FEATURES_PER_PROGRAM},
        chips=CHIPS_NOT_RUN_ON,
    )


def _heads(head_dim: int, **counts: int) -> tuple[dict[str, str], dict[str, Any]]:
    """(signature, values) of the constants of a kernel over heads."""
    values = counts | {
        "D": head_dim,
        "HALF_DIM": next_power_of_2(head_dim // 2),
        "HEADS": elementwise._HEADS_PER_PROGRAM,
    }
    return dict.fromkeys(values, "constexpr"), values


def _qk_norm_rope_store(
    heads: int, kv_heads: int, head_dim: int, dtype: str = "bf16", cache: str | None = None
) -> CompileCase:
    constants, values = _heads(head_dim, H=heads, K=kv_heads)
    signature = {
        "qkv_TXD": f"*{dtype}",
        "q_weight_D": f"*{dtype}",
        "k_weight_D": f"*{dtype}",
        "cos_sin_LD": "*fp32",
        "positions_T": "*i32",
        "k_cache": f"*{cache or dtype}",
        "v_cache": f"*{cache or dtype}",
        "kv_places_T": "*i64",
        "q_THD": f"*{dtype}",
        "row_stride": "i32:16",
        "eps": "fp32",
    }
    return CompileCase(
        name=f"qk_norm_rope_store-{heads}-{kv_heads}-{head_dim}-{dtype}-{cache or dtype}",
        kernel=elementwise._qk_norm_rope_store,
        num_warps=2,
        signature=signature | constants,
        constexprs=values,
        chips=CHIPS_NOT_RUN_ON,
    )


CASES = [
    _rms_norm(5120),
    _add_rms_norm(5120, "fp32"),
    _silu_and_mul(9728, "fp32"),
    _qk_norm_rope_store(16, 8, 128),
    _qk_norm_rope_store(8, 1, 128, "fp32"),
    _qk_norm_rope_store(4, 4, 80, "fp16", "u8"),
]
