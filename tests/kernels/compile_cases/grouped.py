"""Products with codes in groups, of the matrices of Qwen3-8B (4,096 wide, 12,288 features) and of
Qwen3-0.6B split over ranks.
"""

from __future__ import annotations

from typing import Any

from kernels.gpu import grouped
from tests.kernels.compile_cases import CompileCase, compile_case

_ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
_WORDS = {"int4": "*i16", "fp8": "*i32"}
_TYPES = {
    "scale_and_zero_GY": "*i32",
    "sums_PTY": "*fp32",
    "size_in": "i32:16",
    "size_out": "i32:16",
}
_INTEGERS = ("num_rows", "num_input_blocks", "blocks_per_part", "blocks_per_group")
_TYPES |= dict.fromkeys(_INTEGERS, "i32")
_TYPES |= dict.fromkeys(("num_parts", "first_feature", "num_features"), "i32")


def _multiply(
    num_rows: int, group_size: int, dtype: str = "bf16", is_part: bool = False, form: str = "int4"
) -> CompileCase:
    tiles = grouped.choose_tile_config(num_rows, _ITEMSIZES[dtype])
    constants: dict[str, Any] = {
        "bias_Y": None,
        "GROUPS_PER_BLOCK": 128 // group_size,
        "HAS_WHOLE_BLOCKS": True,
        "ROWS": tiles.rows,
        "FEATURES": tiles.features,
        "WIDENING": "singly" if dtype == "fp32" else "pairs",
    }
    types = _TYPES | {"words_YW": _WORDS[form]}
    types |= {"out_PTY": "*fp32"} if is_part else {}
    return compile_case(
        f"{form}-{num_rows}-{group_size}-{dtype}{'-part' * is_part}",
        grouped._multiply_codes,
        types,
        constants,
        default=f"*{dtype}",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _add_parts(dtype: str) -> CompileCase:
    constants = {"bias_Y": None, "FEATURES": grouped._FEATURES_PER_PROGRAM}
    name = f"grouped-add_parts-{dtype}"
    return compile_case(
        name, grouped._add_parts, _TYPES, constants, default=f"*{dtype}", num_warps=2
    )


def _widen(group_size: int, dtype: str = "bf16", form: str = "int4") -> CompileCase:
    constants = {
        "GROUP_SIZE": min(group_size, 128),
        "BLOCKS_PER_GROUP": max(1, group_size // 128),
        "FEATURES": grouped._FEATURES_PER_WIDENING,
    }
    types, name = _TYPES | {"words_YW": _WORDS[form]}, f"{form}-widen-{group_size}-{dtype}"
    return compile_case(name, grouped._widen_codes, types, constants, default=f"*{dtype}")


CASES = [
    _multiply(1, 128),
    _multiply(1, 128, is_part=True),
    _multiply(1, 32),
    _multiply(1, 64, "fp16"),
    _multiply(1, 128, "fp32"),
    _multiply(128, 128),
    _multiply(128, 32, "fp16", is_part=True),
    _add_parts("bf16"),
    _add_parts("fp32"),
    _widen(128),
    _widen(4096, "fp16"),
    _widen(16, "fp32"),
    _multiply(1, 128, form="fp8"),
    _multiply(1, 128, "fp16", is_part=True, form="fp8"),
    _multiply(128, 128, form="fp8"),
    _multiply(128, 32, "fp16", form="fp8"),
    _multiply(1, 128, "fp32", form="fp8"),
    _widen(128, form="fp8"),
]
