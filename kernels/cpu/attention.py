"""Paged attention on a CPU, one kernel for decode and prefill.

The caches are those of `kv_layout.py`. Softmax is the online softmax of Milakov and Gimelshein 2018
(arXiv:1805.02867), one block at a time, in float32. Products of float32 are `matmul_tile.py`'s;
those of bfloat16 too, widened to float32, unless the processor has dot products of pairs: then
`dot_tile.py`'s, for which the weights of the values are rounded to bfloat16, as they are on a GPU.

Legend: T tokens of the step, B rows, H query heads, K KV heads, G = H / K, D head dim, N blocks, P
block size, W elements side by side in a cache, in tables blocks of a row, M queries of a tile times
G. A task is one tile of queries of one row and one KV head.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload

from kernels.cpu.dot_tile import PAIR, add_dots, add_rows
from kernels.cpu.fp8 import loaded
from kernels.cpu.jit import (
    FAST,
    Array,
    as_array,
    exp_nonpositive,
    fast_entry_jit,
    fast_jit,
    float_of_ordered,
    inlined_jit,
    narrow,
    ordered_bits,
    widen,
)
from kernels.cpu.kv_layout import as_laid_out
from kernels.cpu.matmul_tile import LANES, add_product, has_wide_registers
from kernels.cpu.parallel import parallel_for
from kernels.metadata import AttentionMetadata

_TILE = 16  # queries of a tile
# This many vectors of 16 sums fit into the registers, beside what is multiplied.
_VECTORS_OF_FOUR_ROWS, _VECTORS_OF_TWO_ROWS = (2, 4) if has_wide_registers() else (1, 2)
_BFLOAT16, _FLOAT32 = np.empty(0, np.uint16), np.empty(0, np.float32)


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """As `paged_attention_reference`."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    k_laid_out, v_laid_out = as_laid_out(k_cache, v_cache, q_THD.dtype)
    _paged_attention(
        as_array(q_THD),
        as_array(k_laid_out),
        as_array(v_laid_out),
        as_array(out_THD),
        attn.query_start_B1.numpy(),
        attn.seq_lens_B.numpy(),
        attn.block_table_BW.numpy(),
        np.float32(scale),
        _BFLOAT16 if k_laid_out.shape[-1] == PAIR else _FLOAT32,
        numba.get_num_threads(),
    )
    return out_THD


@inlined_jit
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


def _add_product(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, ahead: int) -> None:
    """c += a[:, :depth] @ b[:depth], with c in float32; `ahead` is the address of what will be read
    next. With a in float32, b [K, N, 1] is widened to it. With a in bfloat16, b is [K / 2, N, 2].
    """
    raise NotImplementedError("for compiled code")


def _add_pairs(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, ahead: int) -> None:
    """See `_add_product`. The last of an odd number of elements is multiplied alone: the element
    stored beside it is undefined.
    """
    num_pairs = depth // PAIR
    a = np.int64(a_MK.ctypes.data)
    _add_whole_pairs(a, a_MK.shape[1], b_KNW, c_MN, num_pairs, ahead)
    if depth % PAIR:
        last_1NW = np.empty((1, *b_KNW.shape[1:]), np.uint16)
        for n in range(b_KNW.shape[1]):
            last_1NW[0, n, 0], last_1NW[0, n, 1] = b_KNW[num_pairs, n, 0], 0
        start = a + 2 * PAIR * num_pairs
        _add_whole_pairs(start, a_MK.shape[1], last_1NW, c_MN, np.int64(1), ahead)


@fast_jit
def _add_whole_pairs(
    a: int, a_length: int, b_KNW: Array, c_MN: Array, num_pairs: int, ahead: int
) -> None:
    """`a`: address of the first element, in rows of `a_length`."""
    rows, columns = c_MN.shape
    b, c = b_KNW.ctypes.data, c_MN.ctypes.data
    lda, ldb, ldc = 2 * a_length, 2 * PAIR * columns, 4 * columns
    column = 0
    while column + 4 * LANES <= columns:
        at_b, at_c = b + 2 * PAIR * column, c + 4 * column
        add_rows(a, lda, at_b, ldb, at_c, ldc, rows, num_pairs, ahead + 4 * column * num_pairs)
        column += 4 * LANES
    while column < columns:  # a multiple of 16, as wherever elements are stored in pairs
        for row in range(rows):
            at_c = c + row * ldc + 4 * column
            add_dots(
                PAIR,
                1,
                1,
                a + row * lda,
                lda,
                b + 2 * PAIR * column,
                ldb,
                at_c,
                ldc,
                num_pairs,
                ahead,
            )
        column += LANES


def _add_widened(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, ahead: int) -> None:
    """See `_add_product`."""
    rows, columns = c_MN.shape
    a, lda = a_MK.ctypes.data, a_MK.shape[1]
    b, c, like = b_KNW.ctypes.data, c_MN.ctypes.data, b_KNW[0, 0, 0]
    size = b_KNW.itemsize
    column = 0
    while column + 64 <= columns:
        row = 0
        while row + 4 <= rows:
            for part in range(column, column + 64, LANES * _VECTORS_OF_FOUR_ROWS):
                add_product(
                    4,
                    _VECTORS_OF_FOUR_ROWS,
                    a + 4 * row * lda,
                    lda,
                    b + size * part,
                    columns,
                    c + 4 * (row * columns + part),
                    columns,
                    depth,
                    ahead + size * depth * part,
                    like,
                )
            row += 4
        while row + 2 <= rows:
            for part in range(column, column + 64, LANES * _VECTORS_OF_TWO_ROWS):
                add_product(
                    2,
                    _VECTORS_OF_TWO_ROWS,
                    a + 4 * row * lda,
                    lda,
                    b + size * part,
                    columns,
                    c + 4 * (row * columns + part),
                    columns,
                    depth,
                    ahead + size * depth * part,
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
                ahead + size * depth * column,
                like,
            )
        column += 64
    for row in range(rows):  # columns beyond a multiple of 64
        for k in range(depth):
            for n in range(column, columns):
                c_MN[row, n] += a_MK[row, k] * widen(b_KNW[k, n, 0])


@overload(_add_product, jit_options={"fastmath": FAST})
def _choose_product(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, ahead: int) -> None:
    # numba wants the signature of what is returned, down to the annotations.
    return _add_pairs if a_MK.dtype == types.uint16 else _add_widened  # type: ignore[return-value]


@inlined_jit
def _softmax_block(
    s_MP: Array,
    p_MP: Array,
    scale: np.float32,
    acc_MD: Array,
    max_M: Array,
    sum_M: Array,
    ends_M: Array,
    first: int,
) -> None:
    """From products `s_MP` to weights `p_MP` relative to the running maximum; what was accumulated
    so far is rescaled when the maximum grows.

    Row m sees tokens before `ends_M[m]`; the block starts at token `first`.
    """
    num_rows, size = s_MP.shape
    for m in range(num_rows):
        seen = max(0, min(size, ends_M[m] - first))
        ordered = ordered_bits(max_M[m])
        for p in range(seen):
            s_MP[m, p] *= scale
            ordered = max(ordered, ordered_bits(s_MP[m, p]))
        largest = float_of_ordered(ordered)
        if largest > max_M[m]:
            factor = exp_nonpositive(max_M[m] - largest)
            sum_M[m] *= factor
            for d in range(acc_MD.shape[1]):
                acc_MD[m, d] *= factor
            max_M[m] = largest
        total = np.float32(0)
        for p in range(seen):
            weight = exp_nonpositive(s_MP[m, p] - largest)
            p_MP[m, p] = narrow(weight, p_MP[0, 0])
            total += weight
        sum_M[m] += total
        for p in range(seen, size):
            p_MP[m, p] = narrow(np.float32(0), p_MP[0, 0])


@inlined_jit
def _attend_tile(
    q_THD: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    out_THD: Array,
    first_token: int,
    num_queries: int,
    first_position: int,
    table_W: Array,
    head: int,
    scale: np.float32,
    like: Array,
    ahead: int,
) -> None:
    """One tile: `num_queries` queries of a row from token `first_token` on, against KV head
    `head`. `ahead`: address of the keys that the thread's next tile begins with.
    """
    kv_heads, size = k_NKDPW.shape[1], k_NKDPW.shape[3]
    heads, dim = q_THD.shape[1:]
    group = heads // kv_heads
    rows = num_queries * group
    q_MD = np.empty((rows, dim), like.dtype)
    acc_MD = np.empty((rows, dim), np.float32)
    s_MP = np.empty((rows, size), np.float32)
    p_MP = np.empty((rows, size), like.dtype)
    max_M, sum_M = np.empty(rows, np.float32), np.empty(rows, np.float32)
    ends_M = np.empty(rows, np.int64)
    for i in range(num_queries):
        for g in range(group):
            m = i * group + g
            ends_M[m], max_M[m], sum_M[m] = first_position + i + 1, -np.inf, 0
            for d in range(dim):
                acc_MD[m, d] = 0
                query = widen(q_THD[first_token + i, head * group + g, d])
                q_MD[m, d] = narrow(query, q_MD[0, 0])
    end = first_position + num_queries
    num_blocks = (end + size - 1) // size
    for block in range(num_blocks):
        block_id = np.int64(table_W[block])
        k_DPW = loaded(k_NKDPW[block_id, head], like)
        v_PDW = loaded(v_NKPDW[block_id, head], like)
        s_MP[:] = np.float32(0)
        _add_product(q_MD, k_DPW, s_MP, dim, v_PDW.ctypes.data)
        _softmax_block(s_MP, p_MP, scale, acc_MD, max_M, sum_M, ends_M, block * size)
        depth, following = min(size, end - block * size), ahead
        if block + 1 < num_blocks:
            following = k_NKDPW[np.int64(table_W[block + 1]), head].ctypes.data
        _add_product(p_MP, v_PDW, acc_MD, depth, following)
    for i in range(num_queries):
        for g in range(group):
            m = i * group + g
            inverse = np.float32(1) / sum_M[m]
            for d in range(dim):
                out_THD[first_token + i, head * group + g, d] = narrow(
                    acc_MD[m, d] * inverse, out_THD[0, 0, 0]
                )


@fast_jit
def _attend(
    index: int,
    tiles: Array,
    heads_each: int,
    q_THD: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    out_THD: Array,
    starts_B1: Array,
    lens_B: Array,
    table_BW: Array,
    scale: np.float32,
    like: Array,
) -> None:
    """Task `index`: the tiles of the first `heads_each` heads come first, by tile, then by head."""
    num_tiles = len(tiles)
    heads, place = index // (num_tiles * heads_each), index % (num_tiles * heads_each)
    row, first_query, num_queries = tiles[place // heads_each]
    start, end = np.int64(starts_B1[row]), np.int64(starts_B1[row + 1])
    head = heads * heads_each + place % heads_each
    next_place = place + 1 if place + 1 < num_tiles * heads_each else place
    next_row = tiles[next_place // heads_each, 0]
    next_block = np.int64(table_BW[next_row, 0])
    next_head = heads * heads_each + next_place % heads_each
    _attend_tile(
        q_THD,
        k_NKDPW,
        v_NKPDW,
        out_THD,
        start + np.int64(first_query),
        np.int64(num_queries),
        np.int64(lens_B[row]) - (end - start) + np.int64(first_query),
        table_BW[row],
        head,
        scale,
        like,
        k_NKDPW[next_block, next_head].ctypes.data,
    )


@fast_entry_jit
def _paged_attention(
    q_THD: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    out_THD: Array,
    starts_B1: Array,
    lens_B: Array,
    table_BW: Array,
    scale: np.float32,
    like: Array,
    num_threads: int,
) -> None:
    """`like`: an array of the type that products multiply, bfloat16 or float32."""
    tiles = _tiles(starts_B1, _TILE)
    # Threads take whole heads, so that each has an equal part of every row, whatever the row
    # lengths. A thread reads the heads of a row one after the other, as they lie in a block.
    kv_heads = k_NKDPW.shape[1]
    heads_each = kv_heads // num_threads if kv_heads % num_threads == 0 else 1
    parallel_for(
        kv_heads * len(tiles),
        _attend,
        (
            tiles,
            heads_each,
            q_THD,
            k_NKDPW,
            v_NKPDW,
            out_THD,
            starts_B1,
            lens_B,
            table_BW,
            scale,
            like,
        ),
    )
