"""How the kernels of paged attention are launched: sizes of tiles, warps, stages, order.

Legend as in `kernels/gpu/attention.py`: K KV heads, G query heads of each, D head dim, M query rows
of a tile (queries times G), C cached tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gpu.fp8 import Fp8Widening


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a kernel is launched: M query rows and C cached tokens per tile, warps per program,
    pipeline stages of its loads.

    fp8_widening: None for `choose_fp8_widening`. heads_adjacent: of decode; whether programs that
    start together have the KV heads of the same tokens, or else the parts of the same head.
    """

    tile_m: int
    tile_c: int
    num_warps: int
    num_stages: int
    fp8_widening: Fp8Widening | None = None
    heads_adjacent: bool = True


def padded_dim(head_dim: int) -> int:
    """The head dim of a tile: a power of two that a matrix product accepts."""
    return max(16, 1 << (head_dim - 1).bit_length())


def prefill_launch(
    dtype: torch.dtype, head_dim: int, is_large_tile: bool, is_hopper: bool
) -> LaunchConfig:
    """Large tiles read keys and values least often; small tiles are used where large ones would
    leave processors idle.

    One stage loads the block table. Of five, two load tiles of keys and values while one is used:
    with the queries up to 133 KB, which fits an A100 too. On Hopper (`is_hopper`) there are three,
    of which one loads a tile, 99 KB: with five, ptxas lets most shapes run their matrix
    instructions one by one, with a wait after each (its message C7515, for which the compile test
    looks); four are compiled as three. Small tiles have four at most: with five, one of them spills
    on sm_100. float32 has no matrix instructions and needs twice the bytes.
    """
    if dtype == torch.float32:
        return LaunchConfig(tile_m=32, tile_c=16, num_warps=16, num_stages=5)
    num_stages = 3 if is_hopper else 5
    if padded_dim(head_dim) > 128:
        return LaunchConfig(tile_m=64, tile_c=32, num_warps=8, num_stages=num_stages)
    tile_c = 8192 // max(64, padded_dim(head_dim))
    if is_large_tile:
        return LaunchConfig(tile_m=128, tile_c=tile_c, num_warps=8, num_stages=num_stages)
    return LaunchConfig(tile_m=64, tile_c=tile_c // 2, num_warps=4, num_stages=min(num_stages, 4))


def decode_launch(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group_size: int
) -> LaunchConfig:
    """The G query heads of one query, padded to the 16 rows of the smallest matrix product.

    Keys of a tile take 16 KB whatever the head dim and the dtype of the cache, but they are 128 at
    most. One of the five stages loads the block table, two load tiles: 74 KB altogether, so each
    multiprocessor of an H200 runs three programs with about 200 KB in flight, several times what
    the latency of its memory requires.

    KV heads are adjacent: programs that run together read all of a token, 2 KB in one place with
    eight heads of 16 bits, and share its entry of the block table and of the translation of
    addresses. By parts, they read 256 bytes each, a token apart, which is 0 to 3% slower on an
    H200 (`benchmarks/gpu_sweep.py`).
    """
    tile_m = max(16, 1 << (group_size - 1).bit_length())
    if dtype == torch.float32:  # which has no matrix instructions
        cache_dtype, num_warps = dtype, 8
    else:
        num_warps = 4
    tile_c = max(16, min(128, 16384 // (padded_dim(head_dim) * cache_dtype.itemsize)))
    return LaunchConfig(tile_m=tile_m, tile_c=tile_c, num_warps=num_warps, num_stages=5)
