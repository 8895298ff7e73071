"""Experts of Qwen3-30B-A3B (2,048 wide, 128 experts of 768 features): each kind of tile; sums of
235B-A22B (4,096 wide).
"""

from __future__ import annotations

from typing import Any

from kernels.gpu import experts
from tests.kernels.compile_cases import CHIPS, CompileCase, compile_case

_TYPES = dict.fromkeys(("num_live_tokens_1", "ids_TK", "ids_P", "order_P", "tiles_M3"), "*i32")
_TYPES |= {"weights_TK": "*fp32"}


def _route(
    num_experts: int, num_experts_per_token: int, dtype: str = "bf16", padded: bool = False
) -> CompileCase:
    """padded: in a graph."""
    num_live: dict[str, Any] = {} if padded else {"num_live_tokens_1": None}
    constants: dict[str, Any] = num_live | {
        "X": num_experts,
        "K": num_experts_per_token,
        "NORMALIZES": True,
        "PADDED_EXPERTS": num_experts,
        "PADDED_CHOSEN": num_experts_per_token,
    }
    name = f"route-{num_experts}-{num_experts_per_token}-{dtype}{'-padded' * padded}"
    return compile_case(name, experts._route, _TYPES, constants, default=f"*{dtype}", num_warps=1)


def _sort_pairs(num_experts: int, chunk: int) -> CompileCase:
    constants = {"X": num_experts, "BINS": num_experts, "CHUNK": chunk}
    name = f"sort_pairs-{num_experts}-{chunk}"
    return compile_case(name, experts._sort_pairs, _TYPES, constants)


def _products(
    rows_per_expert: int, size: int, features: int, dtype: str = "bf16"
) -> list[CompileCase]:
    """Gate and up, then down."""
    tiles = experts.choose_tile_config(rows_per_expert, 4 if dtype == "fp32" else 2)
    cases = []
    for gated, size_in, size_out in ((True, size, features), (False, features, size)):
        constants: dict[str, Any] = {
            "K": 8,
            "SIZE_IN": size_in,
            "SIZE_OUT": size_out,
            "GATED": gated,
            "ROWS": tiles.rows,
            "FEATURES": tiles.features,
            "STEP": tiles.step,
        }
        name = "gate_up" if gated else "down"
        cases.append(
            compile_case(
                f"{name}-{tiles.rows}-{size}-{features}-{dtype}",
                experts._multiply_tile,
                _TYPES,
                constants,
                default=f"*{dtype}",
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                # float32 has no matrix products, and the same tiles on all chips.
                chips=CHIPS if dtype != "fp32" else CHIPS[:1],
            )
        )
    return cases


def _combine_products(size: int, dtype: str = "bf16") -> CompileCase:
    constants = {"K": 8, "E": size, "FEATURES": experts._FEATURES_PER_PROGRAM}
    name = f"combine_products-{size}-{dtype}"
    return compile_case(name, experts._combine_products, _TYPES, constants, default=f"*{dtype}")


CASES = [
    _route(128, 8, padded=True),
    _route(1024, 16, "fp32"),
    _sort_pairs(128, experts._CHUNK_PAIRS[0]),
    _sort_pairs(1024, experts._CHUNK_PAIRS[1]),
    *_products(1, 2048, 768),
    *_products(512, 2048, 768),
    *_products(1, 2048, 768, "fp32"),
    _combine_products(4096, "fp32"),
]
