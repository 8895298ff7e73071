"""The tables of a batch: one case each, since nothing but counts varies."""

from __future__ import annotations

from kernels.gpu import tables
from tests.kernels.compile_cases import CHIPS_NOT_RUN_ON, CompileCase

_TOKENS = {"TOKENS": tables._TOKENS_PER_PROGRAM}

CASES = [
    CompileCase(
        name="look_up_tokens",
        kernel=tables._look_up_tokens,
        signature=dict.fromkeys(
            ("tokens_SL", "block_table_SW", "slots_T", "positions_T", "num_cached_T"), "*i32"
        )
        | {"token_ids_T": "*i32", "kv_places_T": "*i64"}
        | dict.fromkeys(("num_tokens", "token_stride", "table_stride", "block_size"), "i32")
        | {"TOKENS": "constexpr"},
        constexprs=_TOKENS,
        chips=CHIPS_NOT_RUN_ON,
    ),
    CompileCase(
        name="write_tokens",
        kernel=tables._write_tokens,
        signature=dict.fromkeys(("tokens_SL", "slots_R", "positions_R"), "*i32")
        | {"token_ids_R": "*i64", "num_rows": "i32", "token_stride": "i32", "TOKENS": "constexpr"},
        constexprs=_TOKENS,
        chips=CHIPS_NOT_RUN_ON,
    ),
]
