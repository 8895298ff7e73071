"""Compile cases of paged attention, tiled as its wrapper tiles them: one for each launch and each
way of reading the cache, with the dtype, group and block size that need most registers.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.decode_parts import MAX_PARTS_PER_ROW
from kernels.gpu.attention import decode_kernel, prefill_kernel
from kernels.gpu.attention_launch import LaunchConfig, decode_launch, padded_dim, prefill_launch
from kernels.gpu.fp8 import Fp8Widening
from tests.kernels.compile_cases import CHIPS, CompileCase, compile_case

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Chips whose caches of 8-bit numbers may be read in each way.
_FP8_CHIPS: dict[Fp8Widening, tuple[int, ...]] = {"instructions": (90, 100), "pairs": CHIPS}
_KV_HEADS = 8
_TYPES = {"scale_log2": "fp32", "q_stride_t": "i32:16", "q_stride_h": "i32:16"}
_TYPES |= dict.fromkeys(("query_start_B1", "part_start_B1", "seq_lens_B", "block_table_BW"), "*i32")
_TYPES |= dict.fromkeys(("acc_XHD", "max_XH", "sum_XH"), "*fp32") | {"num_arrived_parts_BK": "*i32"}
_DECODE: dict[str, Any] = {"TILE_X": MAX_PARTS_PER_ROW, "HEADS_ADJACENT": True}


def _case(
    name: str,
    kernel: Any,
    dtype: str,
    launch: LaunchConfig,
    constexprs: dict[str, Any],
    cache: str | None = None,
    chips: tuple[int, ...] = CHIPS,
) -> CompileCase:
    types = _TYPES | dict.fromkeys(("q_THD", "out_THD"), f"*{dtype}")
    types |= dict.fromkeys(("k_cache_NPKD", "v_cache_NPKD"), f"*{cache or dtype}")
    warps, stages = launch.num_warps, launch.num_stages
    return compile_case(
        name, kernel, types, constexprs, num_warps=warps, num_stages=stages, chips=chips
    )


def _shape(head_dim: int, group: int, block_size: int, launch: LaunchConfig) -> dict[str, Any]:
    return {
        "GROUP_SIZE": group,
        "KV_HEADS": _KV_HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_M": launch.tile_m,
        "TILE_C": launch.tile_c,
        "TILE_D": padded_dim(head_dim),
        "FP8_WIDENING": "pairs",
    }


def _prefill(
    dtype: str,
    head_dim: int,
    group: int,
    block_size: int,
    *,
    large: bool,
    read: Fp8Widening | None = None,
) -> list[CompileCase]:
    """The launch on Hopper and that on other chips; with `read` over a cache of 8-bit numbers."""
    name = f"prefill {f'fp8 for {dtype}' if read else dtype} D={head_dim} G={group} P={block_size}"
    name += f"{f' {read}' if read else ''}{' large' if large else ''}"
    # Before Hopper, tiles over 8-bit numbers are small.
    others = (100,) if read and (large or read == "instructions") else (80, 100)
    cases = []
    # float32 has no matrix products, and one launch for all chips.
    launches = ((" on Hopper", (90,)), ("", others)) if dtype != "fp32" else (("", others[:1]),)
    for sort, chips in launches:
        launch = prefill_launch(_DTYPES[dtype], head_dim, large, is_hopper=90 in chips)
        constexprs = _shape(head_dim, group, block_size, launch) | {"FP8_WIDENING": read or "pairs"}
        cache = "u8" if read else None
        cases.append(_case(name + sort, prefill_kernel, dtype, launch, constexprs, cache, chips))
    return cases


def _decode(dtype: str, head_dim: int, group: int, block_size: int) -> CompileCase:
    launch = decode_launch(_DTYPES[dtype], _DTYPES[dtype], head_dim, group)
    name = f"decode {dtype} D={head_dim} G={group} P={block_size}"
    constexprs = _shape(head_dim, group, block_size, launch) | _DECODE
    chips = CHIPS if dtype != "fp32" else CHIPS[:1]
    return _case(name, decode_kernel, dtype, launch, constexprs, chips=chips)


def _decode_fp8(dtype: str, head_dim: int, group: int, read: Fp8Widening) -> CompileCase:
    launch = decode_launch(_DTYPES[dtype], torch.uint8, head_dim, group)
    name = f"decode fp8 for {dtype} D={head_dim} G={group} {read}"
    constexprs = _shape(head_dim, group, 16, launch) | _DECODE | {"FP8_WIDENING": read}
    return _case(name, decode_kernel, dtype, launch, constexprs, "u8", _FP8_CHIPS[read])


CASES: list[CompileCase] = [
    *_prefill("bf16", 128, 2, 16, large=True),
    *_prefill("fp16", 64, 1, 16, large=True),
    *_prefill("fp16", 80, 3, 16, large=True),
    *_prefill("bf16", 128, 8, 16, large=False),
    *_prefill("bf16", 256, 4, 16, large=False),
    *_prefill("fp32", 128, 2, 16, large=True),
    _decode("bf16", 128, 2, 16),
    _decode("fp16", 64, 1, 256),
    _decode("bf16", 256, 4, 16),
    _decode("fp32", 128, 2, 16),
    _decode_fp8("bf16", 128, 2, "pairs"),
    *(_decode_fp8("fp16", 128, 2, read) for read in _FP8_CHIPS),
    *_prefill("bf16", 128, 2, 16, large=False, read="pairs"),
    *_prefill("bf16", 128, 2, 16, large=True, read="pairs"),
    *_prefill("fp16", 128, 2, 16, large=True, read="instructions"),
]
