"""Norms, rotary embedding, KV store and gate, with the feature sizes of Qwen3 models that need most
registers; heads that are a power of two and others.
"""

from __future__ import annotations

from typing import Any

from triton import next_power_of_2

from kernels.gpu import elementwise
from tests.kernels.compile_cases import CHIPS_NOT_RUN_ON, CompileCase, compile_case

_TYPES = {"cos_sin_LD": "*fp32", "positions_T": "*i32", "kv_places_T": "*i64", "eps": "fp32"}
_TYPES |= dict.fromkeys(("row_stride", "x_stride", "residual_stride"), "i32:16")


def _case(
    name: str, constexprs: dict[str, Any], dtype: str, num_warps: int, **types: str
) -> CompileCase:
    return compile_case(
        "-".join((name, *map(str, constexprs.values()), dtype, *types.values())),
        getattr(elementwise, f"_{name}"),
        _TYPES | types,
        constexprs,
        default=f"*{dtype}",
        num_warps=num_warps,
        chips=CHIPS_NOT_RUN_ON,
    )


def _features(name: str, letter: str, features: int, dtype: str) -> CompileCase:
    is_gate = name == "silu_and_mul"
    tile = elementwise._FEATURES_PER_PROGRAM if is_gate else next_power_of_2(features)
    constants = {letter: features, "TILE_FEATURES": tile}
    return _case(name, constants, dtype, elementwise._num_warps(tile))


def _heads(heads: int, kv_heads: int, head_dim: int, dtype: str, **caches: str) -> CompileCase:
    constants = {"H": heads, "K": kv_heads, "D": head_dim}
    constants |= {"PADDED_HALF_DIM": next_power_of_2(head_dim // 2)}
    constants |= {"TILE_HEADS": elementwise._HEADS_PER_PROGRAM}
    return _case("qk_norm_rope_store", constants, dtype, 2, **caches)


CASES = [
    _features("rms_norm", "E", 5120, "bf16"),
    _features("add_rms_norm", "E", 5120, "fp32"),
    _features("silu_and_mul", "F", 9728, "fp32"),
    _heads(16, 8, 128, "bf16"),
    _heads(8, 1, 128, "fp32"),
    _heads(4, 4, 80, "fp16", k_cache="*u8", v_cache="*u8"),
]
