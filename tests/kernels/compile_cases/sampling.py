"""The sampling kernels: over bfloat16 logits, from which float32 ones differ only in how they are
loaded, and one width of lists for all shards up to 2**18 columns.
"""

from __future__ import annotations

from typing import Any

from kernels.gpu import sampling
from kernels.reference.sampling import MAX_LISTED_TOP_K
from tests.kernels.compile_cases import CHIPS_NOT_RUN_ON, CompileCase, compile_case

_TILE = {"TILE": sampling._BLOCKS_PER_TILE}
_PADDED_BLOCKS = {"PADDED_BLOCKS": sampling._MIN_PADDED_SIZE}
_PADDED_ENTRIES = {"PADDED_ENTRIES": sampling._MIN_PADDED_SIZE}
_ROWS = {"ROWS": sampling._ROWS_PER_PROGRAM}
_LISTED = _PADDED_BLOCKS | {"PADDED_TOP_K": MAX_LISTED_TOP_K}
# The Triton type of each parameter of these kernels, by its name.
_TYPES = {
    "logits_BV": "*bf16",
    "num_columns": "i32:16",
    **dict.fromkeys(("block_max_BX", "max_B", "max_R", "temperature_R", "gap_limit_R"), "*fp32"),
    **dict.fromkeys(("gaps_RC", "min_p_gap_limit_R", "nearest_gaps_RK", "values"), "*fp32"),
    **dict.fromkeys(("rows_R", "column_B", "column_R", "near_blocks_RX", "sums_RX"), "*i64"),
    **dict.fromkeys(
        ("target_weight_R", "histogram_RSX", "lists_NRK", "lists_RC", "lists_RK"), "*i64"
    ),
    **dict.fromkeys(("top_k_R", "top_p_R", "kept_weight_NR", "seeds_R", "positions_R"), "*i64"),
    **dict.fromkeys(("counts_RX", "ids", "packed"), "*i64"),
    "prefix_R": "*i32",
}


def _case(name: str, constexprs: dict[str, Any], num_warps: int = 4) -> CompileCase:
    kernel: Any = getattr(sampling, f"_{name}")
    name += "-weights" if constexprs.get("BY_WEIGHT") else ""
    return compile_case(
        name, kernel, _TYPES, constexprs, num_warps=num_warps, chips=CHIPS_NOT_RUN_ON
    )


CASES = [
    _case("block_maxima", _TILE),
    _case("row_best", _PADDED_BLOCKS),
    _case("near_gaps", _TILE),
    _case("pick_column", _PADDED_BLOCKS),
    *(
        _case(name, {"BY_WEIGHT": by_weight} | _TILE)
        for name in ("block_sums", "gap_histogram")
        for by_weight in (False, True)
    ),
    _case("gap_limits_from_lists", _PADDED_ENTRIES, num_warps=8),
    _case("target_weight", _ROWS, num_warps=1),
    _case("pack_value_and_id", _ROWS, num_warps=1),
    _case("unpack_value_and_id", _ROWS, num_warps=1),
    _case("make_list", _LISTED),
]
