"""The sampling kernels: over bfloat16 and float32 logits, and one width of lists for all shards up
to 2**18 columns.
"""

from __future__ import annotations

from kernels.gpu import sampling
from kernels.reference.sampling import MAX_LISTED_TOP_K
from tests.kernels.compile_cases import CompileCase

_ROWS = {"rows_R": "*i64", "max_R": "*fp32", "temperature_R": "*fp32"}
_TILE = {"TILE": sampling._BLOCKS_PER_TILE}
_WIDTH = {"WIDTH": sampling._MIN_WIDTH}


def _cases_over(logits: str) -> list[CompileCase]:
    logits_BV = {"logits_BV": f"*{logits}"}
    cases = [
        CompileCase(
            name=f"block_maxima-{logits}",
            kernel=sampling._block_maxima,
            signature=logits_BV
            | {"block_max_BX": "*fp32", "num_columns": "i32:16", "TILE": "constexpr"},
            constexprs=_TILE,
        ),
        CompileCase(
            name=f"row_best-{logits}",
            kernel=sampling._row_best,
            signature=logits_BV
            | {"block_max_BX": "*fp32", "max_B": "*fp32", "column_B": "*i64"}
            | {"num_columns": "i32:16", "WIDTH": "constexpr"},
            constexprs=_WIDTH,
        ),
        CompileCase(
            name=f"near_gaps-{logits}",
            kernel=sampling._near_gaps,
            signature=logits_BV
            | _ROWS
            | {
                "near_RX": "*i64",
                "gaps_RC": "*fp32",
                "num_columns": "i32:16",
                "num_near": "i32",
                "TILE": "constexpr",
            },
            constexprs=_TILE,
        ),
        CompileCase(
            name=f"pick_column-{logits}",
            kernel=sampling._pick_column,
            signature=logits_BV
            | _ROWS
            | {"limit_R": "*fp32", "sums_RX": "*i64", "target_weight_R": "*i64", "column_R": "*i64"}
            | {"num_columns": "i32:16", "WIDTH": "constexpr"},
            constexprs=_WIDTH,
        ),
    ]
    for by_weight in (False, True):
        ending = f"{logits}-{'weights' if by_weight else 'tokens'}"
        blocks = logits_BV | {"block_max_BX": "*fp32"} | _ROWS
        constexprs = {"BY_WEIGHT": by_weight} | _TILE
        types = dict.fromkeys(constexprs, "constexpr")
        sums = {"limit_R": "*fp32", "sums_RX": "*i64", "num_columns": "i32:16"}
        bins = {
            "limit_R": "*fp32",
            "prefix_R": "*i32",
            "histogram_RSX": "*i64",
            "num_columns": "i32:16",
        }
        bins |= dict.fromkeys(("shift", "num_bits", "num_copies"), "i32")
        cases += [
            CompileCase(
                name=f"block_sums-{ending}",
                kernel=sampling._block_sums,
                signature=blocks | sums | types,
                constexprs=constexprs,
            ),
            CompileCase(
                name=f"gap_histogram-{ending}",
                kernel=sampling._gap_histogram,
                signature=blocks | bins | types,
                constexprs=constexprs,
            ),
        ]
    return cases


_LISTED_LIMITS = CompileCase(
    name="listed_limits",
    kernel=sampling._listed_limits,
    signature={
        "list_NRK": "*i64",
        "list_RC": "*i64",
        "top_k_R": "*i64",
        "top_p_R": "*i64",
        "min_p_limit_R": "*fp32",
    }
    | {
        "limit_R": "*fp32",
        "kept_NR": "*i64",
        "num_ranks": "i32",
        "max_top_k": "i32",
        "WIDTH": "constexpr",
    },
    constexprs=_WIDTH,
    num_warps=8,
)

_DRAW_INDEX = CompileCase(
    name="target_weight",
    kernel=sampling._target_weight,
    signature={
        "seeds_R": "*i64",
        "positions_R": "*i64",
        "kept_NR": "*i64",
        "target_weight_R": "*i64",
    }
    | {"num_rows": "i32", "num_ranks": "i32", "rank": "i32", "ROWS": "constexpr"},
    constexprs={"ROWS": sampling._ROWS_PER_PROGRAM},
    num_warps=1,
)

_PACK = CompileCase(
    name="pack",
    kernel=sampling._pack_value_and_id,
    signature={
        "values": "*fp32",
        "ids": "*i64",
        "packed": "*i64",
        "num_rows": "i32",
        "ROWS": "constexpr",
    },
    constexprs={"ROWS": sampling._ROWS_PER_PROGRAM},
    num_warps=1,
)
_UNPACK = CompileCase(
    name="unpack",
    kernel=sampling._unpack_value_and_id,
    signature={
        "packed": "*i64",
        "values": "*fp32",
        "ids": "*i64",
        "num_rows": "i32",
        "ROWS": "constexpr",
    },
    constexprs={"ROWS": sampling._ROWS_PER_PROGRAM},
    num_warps=1,
)
_MAKE_LIST = CompileCase(
    name="make_list",
    kernel=sampling._make_list,
    signature={"nearest_RK": "*fp32", "top_k_R": "*i64", "counts_RX": "*i64", "list_RK": "*i64"}
    | {"max_top_k": "i32", "num_blocks": "i32", "WIDTH": "constexpr", "LISTED": "constexpr"},
    constexprs=_WIDTH | {"LISTED": MAX_LISTED_TOP_K},
)

CASES = [
    *_cases_over("bf16"),
    *_cases_over("fp32"),
    _LISTED_LIMITS,
    _DRAW_INDEX,
    _PACK,
    _UNPACK,
    _MAKE_LIST,
]
