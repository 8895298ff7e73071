"""Paged attention on a CPU, one kernel for decode and prefill.

Head-major caches: keys [N, K, D, P], values [N, K, P, D]. Scores then vectorize over the tokens of
a block, and the weighted sum over the head dimension; neither needs a sum across a vector. Softmax
is the online softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867), one block at a time, in
float32 throughout. Legend: T tokens of the step, B rows, H query heads, K KV heads, G = H / K, D
head dim, N blocks, P block size, W blocks of a row, M queries of a tile times G. A task is one tile
of queries of one row and one KV head.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.jit import (
    Array,
    as_array,
    exp_nonpositive,
    fast_jit,
    fast_parallel_jit,
    narrow,
    widen,
)
from kernels.cpu.matmul_tile import add_product
from kernels.metadata import AttentionMetadata

_TILE = 16  # queries of a tile


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """As `paged_attention_reference`."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    _paged_attention(
        as_array(q_THD),
        as_array(k_cache),
        as_array(v_cache),
        as_array(out_THD),
        attn.query_start_B1.numpy(),
        attn.seq_lens_B.numpy(),
        attn.block_table_BW.numpy(),
        np.float32(scale),
    )
    return out_THD


@fast_jit
def _tiles(starts_B1: Array, tile: int) -> Array:
    """Tiles as (row, first query in the row, number of queries)."""
    total = 0
    for b in range(len(starts_B1) - 1):
        total += (starts_B1[b + 1] - starts_B1[b] + tile - 1) // tile
    tiles = np.empty((total, 3), np.int32)
    i = 0
    for b in range(len(starts_B1) - 1):
        length = starts_B1[b + 1] - starts_B1[b]
        for first in range(0, length, tile):
            tiles[i, 0], tiles[i, 1], tiles[i, 2] = b, first, min(tile, length - first)
            i += 1
    return tiles


@fast_jit
def _add_product(a_MK: Array, b_KN: Array, c_MN: Array, depth: int) -> None:
    """c += a[:, :depth] @ b[:depth]; `b_KN` in the dtype of the cache, the others float32."""
    rows, columns = c_MN.shape
    a, lda = a_MK.ctypes.data, a_MK.shape[1]
    b, c, like = b_KN.ctypes.data, c_MN.ctypes.data, b_KN[0, 0]
    size = b_KN.itemsize
    column = 0
    while column + 64 <= columns:
        row = 0
        while row + 4 <= rows:
            for part in range(column, column + 64, 32):
                add_product(
                    4,
                    2,
                    a + 4 * row * lda,
                    lda,
                    b + size * part,
                    columns,
                    c + 4 * (row * columns + part),
                    columns,
                    depth,
                    like,
                )
            row += 4
        while row + 2 <= rows:
            add_product(
                2,
                4,
                a + 4 * row * lda,
                lda,
                b + size * column,
                columns,
                c + 4 * (row * columns + column),
                columns,
                depth,
                like,
            )
            row += 2
        if row < rows:
            add_product(
                1,
                4,
                a + 4 * row * lda,
                lda,
                b + size * column,
                columns,
                c + 4 * (row * columns + column),
                columns,
                depth,
                like,
            )
        column += 64
    for row in range(rows):  # columns beyond a multiple of 64
        for k in range(depth):
            for n in range(column, columns):
                c_MN[row, n] += a_MK[row, k] * widen(b_KN[k, n])


@fast_jit
def _softmax_block(
    s_MP: Array, acc_MD: Array, max_M: Array, sum_M: Array, ends_M: Array, first: int
) -> None:
    """Turn scores into weights relative to the running maximum; what was accumulated so far is
    rescaled when the maximum grows.

    Row m sees tokens before `ends_M[m]`; the block starts at token `first`.
    """
    num_rows, size = s_MP.shape
    for m in range(num_rows):
        seen = min(size, ends_M[m] - first)
        largest = max_M[m]
        for p in range(seen):
            largest = max(largest, s_MP[m, p])
        if largest > max_M[m]:
            factor = exp_nonpositive(max_M[m] - largest)
            sum_M[m] *= factor
            for d in range(acc_MD.shape[1]):
                acc_MD[m, d] *= factor
            max_M[m] = largest
        total = np.float32(0)
        for p in range(seen):
            weight = exp_nonpositive(s_MP[m, p] - largest)
            s_MP[m, p] = weight
            total += weight
        sum_M[m] += total
        for p in range(max(0, seen), size):
            s_MP[m, p] = np.float32(0)


@fast_jit
def _attend_tile(
    q_THD: Array,
    k_NKDP: Array,
    v_NKPD: Array,
    out_THD: Array,
    first_token: int,
    num_queries: int,
    first_position: int,
    table_W: Array,
    head: int,
    scale: np.float32,
) -> None:
    """One tile: `num_queries` queries of a row from token `first_token` on, against KV head
    `head`.
    """
    kv_heads, dim, size = k_NKDP.shape[1:]
    group = q_THD.shape[1] // kv_heads
    rows = num_queries * group
    q_MD = np.empty((rows, dim), np.float32)
    acc_MD = np.zeros((rows, dim), np.float32)
    s_MP = np.empty((rows, size), np.float32)
    max_M = np.full(rows, -np.inf, np.float32)
    sum_M = np.zeros(rows, np.float32)
    ends_M = np.empty(rows, np.int64)
    for i in range(num_queries):
        for g in range(group):
            ends_M[i * group + g] = first_position + i + 1
            for d in range(dim):
                q_MD[i * group + g, d] = widen(q_THD[first_token + i, head * group + g, d]) * scale
    end = first_position + num_queries
    for block in range((end + size - 1) // size):
        block_id = np.int64(table_W[block])
        s_MP[:] = np.float32(0)
        _add_product(q_MD, k_NKDP[block_id, head], s_MP, dim)
        _softmax_block(s_MP, acc_MD, max_M, sum_M, ends_M, block * size)
        _add_product(s_MP, v_NKPD[block_id, head], acc_MD, min(size, end - block * size))
    for i in range(num_queries):
        for g in range(group):
            m = i * group + g
            inverse = np.float32(1) / sum_M[m]
            for d in range(dim):
                out_THD[first_token + i, head * group + g, d] = narrow(
                    acc_MD[m, d] * inverse, out_THD[0, 0, 0]
                )


@fast_parallel_jit
def _paged_attention(
    q_THD: Array,
    k_NKDP: Array,
    v_NKPD: Array,
    out_THD: Array,
    starts_B1: Array,
    lens_B: Array,
    table_BW: Array,
    scale: np.float32,
) -> None:
    tiles = _tiles(starts_B1, _TILE)
    num_tiles = len(tiles)
    # Heads are the outer loop and tiles the inner one, so threads take equal parts of every row,
    # whatever the row lengths.
    for index in numba.prange(k_NKDP.shape[1] * num_tiles):
        # An index of `prange` is unsigned, which would compile its helpers a second time.
        task = np.int64(index)
        row, first_query, num_queries = tiles[task % num_tiles]
        start, end = np.int64(starts_B1[row]), np.int64(starts_B1[row + 1])
        _attend_tile(
            q_THD,
            k_NKDP,
            v_NKPD,
            out_THD,
            start + np.int64(first_query),
            np.int64(num_queries),
            np.int64(lens_B[row]) - (end - start) + np.int64(first_query),
            table_BW[row],
            task // num_tiles,
            scale,
        )
