"""The tables of a batch: one case each, since nothing but counts varies."""

from __future__ import annotations

from kernels.gpu import tables
from tests.kernels.compile_cases import CHIPS_NOT_RUN_ON, compile_case

_TOKENS = {"TOKENS": tables._TOKENS_PER_PROGRAM}
_TYPES = {"kv_places_T": "*i64", "token_ids_R": "*i64"} | dict.fromkeys(
    ("num_tokens", "num_rows", "token_stride", "table_stride", "block_size"), "i32"
)

CASES = [
    compile_case(
        name, getattr(tables, f"_{name}"), _TYPES, _TOKENS, default="*i32", chips=CHIPS_NOT_RUN_ON
    )
    for name in ("look_up_tokens", "write_tokens")
]
