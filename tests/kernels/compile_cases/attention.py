"""Compile cases of paged attention: tiled as its wrapper tiles them; dtype, head dim, group and
block size in pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.decode_parts import MAX_PARTS
from kernels.gpu.attention import (
    Launch,
    decode_kernel,
    decode_launch,
    padded_dim,
    prefill_kernel,
    prefill_launch,
)
from tests.kernels.compile_cases import CompileCase

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KV_HEADS = 8
_POINTERS = {
    "query_start_B1": "*i32",
    "start_B1": "*i32",
    "seq_lens_B": "*i32",
    "block_table_BW": "*i32",
}
_SCRATCH = {"acc_XHD": "*fp32", "max_XH": "*fp32", "sum_XH": "*fp32", "arrived_BK": "*i32"}


def _case(
    name: str,
    kernel: Any,
    dtype: str,
    launch: Launch,
    constexprs: dict[str, Any],
    cache: str | None = None,
) -> CompileCase:
    types = {
        **_POINTERS,
        **_SCRATCH,
        "scale_log2": "fp32",
        **dict.fromkeys(constexprs, "constexpr"),
    }
    types |= {"q_stride_t": "i32:16", "q_stride_h": "i32:16"}
    types |= dict.fromkeys(("q_THD", "out_THD"), f"*{dtype}")
    types |= dict.fromkeys(("k_cache_NPKD", "v_cache_NPKD"), f"*{cache or dtype}")
    return CompileCase(
        name=name,
        kernel=kernel,
        signature={parameter: types.get(parameter, "i32") for parameter in kernel.arg_names},
        constexprs=constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        oldest_chip=89 if constexprs["NATIVE_FP8"] else 80,
    )


def _shape(head_dim: int, group: int, block_size: int, launch: Launch) -> dict[str, Any]:
    return {
        "GROUP": group,
        "KV_HEADS": _KV_HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_M": launch.tile_m,
        "TILE_C": launch.tile_c,
        "TILE_D": padded_dim(head_dim),
        "NATIVE_FP8": False,
    }


def _prefill(dtype: str, head_dim: int, group: int, block_size: int, large: bool) -> CompileCase:
    launch = prefill_launch(_DTYPES[dtype], head_dim, large)
    name = f"prefill {dtype} D={head_dim} G={group} P={block_size}{' large' if large else ''}"
    return _case(name, prefill_kernel, dtype, launch, _shape(head_dim, group, block_size, launch))


def _decode(dtype: str, head_dim: int, group: int, block_size: int) -> CompileCase:
    launch = decode_launch(_DTYPES[dtype], head_dim, group)
    name = f"decode {dtype} D={head_dim} G={group} P={block_size}"
    constexprs = _shape(head_dim, group, block_size, launch) | {"TILE_X": MAX_PARTS}
    return _case(name, decode_kernel, dtype, launch, constexprs)


def _fp8(kind: str, dtype: str, head_dim: int, group: int, native: bool) -> CompileCase:
    """Cases over a cache of 8-bit numbers, read by instructions or by arithmetic."""
    if kind == "decode":
        launch, kernel = decode_launch(_DTYPES[dtype], head_dim, group), decode_kernel
        more = {"TILE_X": MAX_PARTS}
    else:
        large = kind == "large prefill"
        launch, kernel = prefill_launch(_DTYPES[dtype], head_dim, large), prefill_kernel
        more = {}
    name = f"{kind} fp8 for {dtype} D={head_dim} G={group}{' native' if native else ''}"
    constexprs = _shape(head_dim, group, 16, launch) | more | {"NATIVE_FP8": native}
    return _case(name, kernel, dtype, launch, constexprs, "u8")


CASES: list[CompileCase] = [
    _prefill("bf16", 128, 2, 16, large=True),
    _prefill("fp16", 64, 1, 16, large=True),
    _prefill("bf16", 64, 8, 256, large=True),
    _prefill("bf16", 128, 8, 16, large=False),
    _prefill("fp16", 128, 2, 256, large=False),
    _prefill("fp16", 80, 3, 16, large=True),
    _prefill("bf16", 128, 5, 16, large=True),
    _prefill("bf16", 64, 2, 16, large=False),
    _prefill("bf16", 256, 4, 16, large=False),
    _prefill("fp32", 128, 2, 16, large=True),
    _decode("bf16", 128, 2, 16),
    _decode("bf16", 128, 8, 256),
    _decode("fp16", 64, 1, 256),
    _decode("fp16", 64, 8, 16),
    _decode("bf16", 256, 4, 16),
    _decode("fp32", 128, 2, 16),
    *(
        _fp8(kind, "bf16", 128, group, native)
        for kind in ("decode", "prefill", "large prefill")
        for group in (2, 8)
        for native in (False, True)
        if native or kind != "large prefill"
    ),
    _fp8("decode", "fp16", 64, 1, native=True),
]
