"""How keys and values lie in the CPU's KV cache: by head, keys [N, K, D, P], values [N, K, P, D].

Scores then vectorize over the tokens of a block, and the weighted sum over the head dimension;
neither needs a sum across a vector. Where the processor multiplies pairs of bfloat16
(`tile.py`), two consecutive dimensions of keys lie side by side, and so do two consecutive
tokens of values: keys [N, K, D/2, P, 2], values [N, K, P/2, D, 2], in the same memory. Legend: N
blocks, K KV heads, D head dim, P block size, W elements side by side (1 or 2).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.cpu.tile import LANES, PAIR_SIZE, has_dot_products
from kernels.interface import Shape


def head_major_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[Shape, Shape]:
    """Keys [blocks, num_kv_heads, head_dim, block_size], values [blocks, num_kv_heads, block_size,
    head_dim].
    """
    leading_sizes = (num_blocks, num_kv_heads)
    return (*leading_sizes, head_dim, block_size), (*leading_sizes, block_size, head_dim)


def kernel_cache_views(
    k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Views of the caches as the kernels read and write them: keys [N, K, D/W, P, W], values [N, K,
    P/W, D, W]. `dtype`: that of the products, which is the caches' own unless they hold 8-bit
    numbers.
    """
    *leading_sizes, head_dim, block_size = k_cache.shape
    group_width = width(dtype, head_dim, block_size)
    return (
        k_cache.view(*leading_sizes, head_dim // group_width, block_size, group_width),
        v_cache.view(*leading_sizes, block_size // group_width, head_dim, group_width),
    )


@functools.cache
def width(dtype: torch.dtype, head_dim: int, block_size: int) -> int:
    """W for products in this dtype, for caches of this shape on this processor."""
    fills_lanes = head_dim % LANES == 0 and block_size % LANES == 0
    return PAIR_SIZE if dtype is torch.bfloat16 and fills_lanes and has_dot_products() else 1
