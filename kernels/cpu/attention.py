"""Paged attention on a CPU, one kernel for decode and prefill.

The caches are those of `kv_layout.py`. Softmax is the online softmax of Milakov and Gimelshein 2018
(arXiv:1805.02867), one block at a time, in float32. Products are `tile.py`'s: of bfloat16 widened
to float32, unless the processor has dot products of pairs, for which the weights of the values are
rounded to bfloat16, as they are on a GPU.

Legend: T tokens of the step, B rows (B1: B + 1 entries), H query heads, K KV heads, G = H / K, D
head dim, N blocks, P block size, W elements side by side in a cache, in tables blocks of a row, M
queries of a tile times G; in products (`_add_product`), K is the depth and N columns. A task is one
tile of queries of one row and one KV head.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload
from torch import Tensor

from kernels.cpu.fp8 import from_cache_dtype
from kernels.cpu.jit import (
    FAST_MATH,
    Array,
    as_array,
    exact_entry_jit,
    exp_nonpositive,
    fast_entry_jit,
    fast_jit,
    float_of_ordered_bits,
    inlined_jit,
    narrow,
    ordered_bits,
    widen,
)
from kernels.cpu.kv_layout import kernel_cache_views
from kernels.cpu.parallel import parallel_for
from kernels.cpu.pool import get_num_threads
from kernels.cpu.recording import empty, keep
from kernels.cpu.tile import LANES, PAIR_SIZE, STEP_BYTES, add_16_columns, add_64_columns
from kernels.metadata import AttentionMetadata

_QUERIES_PER_TILE = 16
_BFLOAT16_EXAMPLE, _FLOAT32_EXAMPLE = np.empty(0, np.uint16), np.empty(0, np.float32)


def paged_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, attn: AttentionMetadata, scale: float
) -> Tensor:
    """As `paged_attention_reference`."""
    out_THD = empty(q_THD.shape, q_THD.dtype)
    k_view, v_view = kernel_cache_views(k_cache, v_cache, q_THD.dtype)
    arrays = map(as_array, (q_THD, k_view, v_view, out_THD))
    row_arrays = attn.query_start_B1.numpy(), attn.seq_lens_B.numpy(), attn.block_table_BW.numpy()
    tiles = keep(_tiles(row_arrays[0], _QUERIES_PER_TILE))
    example = _BFLOAT16_EXAMPLE if k_view.shape[-1] == PAIR_SIZE else _FLOAT32_EXAMPLE
    _paged_attention(tiles, *arrays, *row_arrays, np.float32(scale), example, get_num_threads())
    return out_THD


@exact_entry_jit
def _tiles(query_start_B1: Array, queries_per_tile: int) -> Array:
    """Tiles as (row, first query in the row, number of queries)."""
    num_tiles = 0
    for b in range(len(query_start_B1) - 1):
        num_tiles += (
            query_start_B1[b + 1] - query_start_B1[b] + queries_per_tile - 1
        ) // queries_per_tile
    tiles = np.empty((num_tiles, 3), np.int32)
    tile = 0
    for b in range(len(query_start_B1) - 1):
        num_queries = query_start_B1[b + 1] - query_start_B1[b]
        for first_query in range(0, num_queries, queries_per_tile):
            tiles[tile, 0], tiles[tile, 1] = b, first_query
            tiles[tile, 2] = min(queries_per_tile, num_queries - first_query)
            tile += 1
    return tiles


def _add_product(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, prefetch_address: int) -> None:
    """c += a[:, :depth] @ b[:depth], with c in float32; at `prefetch_address` lies what will be
    read next. With a in float32, b [K, N, 1] is widened to it. With a in bfloat16, b is [K / 2, N,
    2].
    """
    raise NotImplementedError("for compiled code")


def _add_pairs(a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, prefetch_address: int) -> None:
    """See `_add_product`. The last of an odd number of elements is multiplied alone: the element
    stored beside it is undefined.
    """
    num_pairs = depth // PAIR_SIZE
    _add_tiles(a_MK, 0, b_KNW, c_MN, num_pairs, prefetch_address)
    if depth % PAIR_SIZE:
        last_row_1NW = np.empty((1, *b_KNW.shape[1:]), np.uint16)
        for n in range(b_KNW.shape[1]):
            last_row_1NW[0, n, 0], last_row_1NW[0, n, 1] = b_KNW[num_pairs, n, 0], 0
        _add_tiles(a_MK, num_pairs, last_row_1NW, c_MN, np.int64(1), prefetch_address)


def _add_widened_product(
    a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, prefetch_address: int
) -> None:
    """See `_add_product`."""
    num_rows, num_columns = c_MN.shape
    _add_tiles(a_MK, 0, b_KNW, c_MN, depth, prefetch_address)
    for row in range(num_rows):
        for k in range(depth):
            for n in range(num_columns // LANES * LANES, num_columns):
                c_MN[row, n] += a_MK[row, k] * widen(b_KNW[k, n, 0])


@fast_jit
def _add_tiles(
    a_MK: Array, step_of_a: int, b_KNW: Array, c_MN: Array, num_steps: int, prefetch_address: int
) -> None:
    """c += a @ b for a's elements from its step `step_of_a` on, for whole vectors of columns. A
    step is `STEP_BYTES` of a row of a, as in `tile.py`.
    """
    num_rows, num_columns = c_MN.shape
    a = a_MK.ctypes.data + STEP_BYTES * step_of_a, a_MK.itemsize * a_MK.shape[1], a_MK[0, 0]
    b_bytes = b_KNW.itemsize * b_KNW.shape[2]
    c_stride = c_MN.itemsize * num_columns
    column = 0
    while column + LANES <= num_columns:
        b = b_KNW.ctypes.data + b_bytes * column, b_bytes * num_columns, b_KNW[0, 0, 0]
        c = c_MN.ctypes.data + c_MN.itemsize * column, c_stride
        next_address = prefetch_address + b_bytes * num_steps * column
        if column + 4 * LANES <= num_columns:
            add_64_columns(num_rows, a, b, c, num_steps, next_address)
            column += 4 * LANES
        else:
            add_16_columns(num_rows, a, b, c, num_steps, next_address)
            column += LANES


@overload(_add_product, jit_options={"fastmath": FAST_MATH})
def _choose_product(
    a_MK: Array, b_KNW: Array, c_MN: Array, depth: int, prefetch_address: int
) -> None:
    # numba wants the signature of what is returned, down to the annotations.
    return _add_pairs if a_MK.dtype == types.uint16 else _add_widened_product  # type: ignore[return-value]


@inlined_jit
def _softmax_block(
    s_MP: Array,
    p_MP: Array,
    scale: np.float32,
    acc_MD: Array,
    max_M: Array,
    sum_M: Array,
    ends_M: Array,
    block_first_position: int,
) -> None:
    """From products `s_MP` to weights `p_MP` relative to the running maximum; what was accumulated
    so far is rescaled when the maximum grows.

    Row m sees tokens before `ends_M[m]`; the block starts at token `block_first_position`.
    """
    num_rows, block_size = s_MP.shape
    for m in range(num_rows):
        num_visible_tokens = max(0, min(block_size, ends_M[m] - block_first_position))
        ordered_max = ordered_bits(max_M[m])
        for p in range(num_visible_tokens):
            s_MP[m, p] *= scale
            ordered_max = max(ordered_max, ordered_bits(s_MP[m, p]))
        new_max = float_of_ordered_bits(ordered_max)
        if new_max > max_M[m]:
            rescale = exp_nonpositive(max_M[m] - new_max)
            sum_M[m] *= rescale
            for d in range(acc_MD.shape[1]):
                acc_MD[m, d] *= rescale
            max_M[m] = new_max
        weight_sum = np.float32(0)
        for p in range(num_visible_tokens):
            weight = exp_nonpositive(s_MP[m, p] - new_max)
            p_MP[m, p] = narrow(weight, p_MP[0, 0])
            weight_sum += weight
        sum_M[m] += weight_sum
        for p in range(num_visible_tokens, block_size):
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
    dtype_example: Array,
    prefetch_address: int,
) -> None:
    """`num_queries` queries of a row, from token `first_token` of the step and position
    `first_position` of the row on, against a KV head. `prefetch_address`: of the next tile's keys.
    """
    num_kv_heads, block_size = k_NKDPW.shape[1], k_NKDPW.shape[3]
    num_heads, head_dim = q_THD.shape[1:]
    group_size = num_heads // num_kv_heads
    num_rows = num_queries * group_size
    q_MD = np.empty((num_rows, head_dim), dtype_example.dtype)
    acc_MD = np.empty((num_rows, head_dim), np.float32)
    s_MP = np.empty((num_rows, block_size), np.float32)
    p_MP = np.empty((num_rows, block_size), dtype_example.dtype)
    max_M = np.empty(num_rows, np.float32)
    sum_M = np.empty(num_rows, np.float32)
    ends_M = np.empty(num_rows, np.int64)
    for i in range(num_queries):
        for g in range(group_size):
            m = i * group_size + g
            ends_M[m] = first_position + i + 1
            max_M[m] = -np.inf
            sum_M[m] = 0
            for d in range(head_dim):
                acc_MD[m, d] = 0
                query = widen(q_THD[first_token + i, head * group_size + g, d])
                q_MD[m, d] = narrow(query, q_MD[0, 0])
    end_position = first_position + num_queries
    num_blocks = (end_position + block_size - 1) // block_size
    for block in range(num_blocks):
        block_id = np.int64(table_W[block])
        k_DPW = from_cache_dtype(k_NKDPW[block_id, head], dtype_example)
        v_PDW = from_cache_dtype(v_NKPDW[block_id, head], dtype_example)
        s_MP[:] = np.float32(0)
        _add_product(q_MD, k_DPW, s_MP, head_dim, v_PDW.ctypes.data)
        _softmax_block(s_MP, p_MP, scale, acc_MD, max_M, sum_M, ends_M, block * block_size)
        num_tokens = min(block_size, end_position - block * block_size)
        next_address = prefetch_address
        if block + 1 < num_blocks:
            next_address = k_NKDPW[np.int64(table_W[block + 1]), head].ctypes.data
        _add_product(p_MP, v_PDW, acc_MD, num_tokens, next_address)
    for i in range(num_queries):
        for g in range(group_size):
            m = i * group_size + g
            inverse_sum = np.float32(1) / sum_M[m]
            for d in range(head_dim):
                out_THD[first_token + i, head * group_size + g, d] = narrow(
                    acc_MD[m, d] * inverse_sum, out_THD[0, 0, 0]
                )


@fast_jit
def _attend(
    index: int,
    tiles: Array,
    heads_per_share: int,
    q_THD: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    out_THD: Array,
    query_start_B1: Array,
    seq_lens_B: Array,
    block_table_BW: Array,
    scale: np.float32,
    dtype_example: Array,
) -> None:
    """Task `index`: the tiles of the first `heads_per_share` heads come first, by tile, then by
    head.
    """
    num_tiles = len(tiles)
    head_share = index // (num_tiles * heads_per_share)
    place_in_share = index % (num_tiles * heads_per_share)
    row, first_query, num_queries = tiles[place_in_share // heads_per_share]
    first_token = np.int64(query_start_B1[row])
    end_token = np.int64(query_start_B1[row + 1])
    head = head_share * heads_per_share + place_in_share % heads_per_share
    next_place_in_share = (
        place_in_share + 1 if place_in_share + 1 < num_tiles * heads_per_share else place_in_share
    )
    next_row = tiles[next_place_in_share // heads_per_share, 0]
    next_block = np.int64(block_table_BW[next_row, 0])
    next_head = head_share * heads_per_share + next_place_in_share % heads_per_share
    _attend_tile(
        q_THD,
        k_NKDPW,
        v_NKPDW,
        out_THD,
        first_token + np.int64(first_query),
        np.int64(num_queries),
        np.int64(seq_lens_B[row]) - (end_token - first_token) + np.int64(first_query),
        block_table_BW[row],
        head,
        scale,
        dtype_example,
        k_NKDPW[next_block, next_head].ctypes.data,
    )


@fast_entry_jit
def _paged_attention(
    tiles: Array,
    q_THD: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    out_THD: Array,
    query_start_B1: Array,
    seq_lens_B: Array,
    block_table_BW: Array,
    scale: np.float32,
    dtype_example: Array,
    num_threads: int,
) -> None:
    """`dtype_example`: an array of the type that products multiply, bfloat16 or float32."""
    # Threads take whole heads, so that each has an equal part of every row, whatever the row
    # lengths. A thread reads the heads of a row one after the other, as they lie in a block.
    num_kv_heads = k_NKDPW.shape[1]
    heads_per_share = num_kv_heads // num_threads if num_kv_heads % num_threads == 0 else 1
    parallel_for(
        num_kv_heads * len(tiles),
        _attend,
        (
            tiles,
            heads_per_share,
            q_THD,
            k_NKDPW,
            v_NKPDW,
            out_THD,
            query_start_B1,
            seq_lens_B,
            block_table_BW,
            scale,
            dtype_example,
        ),
    )
