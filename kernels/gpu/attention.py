"""Paged attention on a GPU, in Triton: one kernel for prefill and mixed batches, two for decode.

Token-major caches as in `paged_attention_reference`. Softmax is the online softmax with the tiling
of Dao 2023 (arXiv:2307.08691), with powers of two as exponentials, accumulated in float32. The G
query heads of a KV head share every read of its keys and values: they are adjacent in the first
dimension of a tile. Decode splits the tokens of a row between programs (Dao et al. 2023,
"Flash-Decoding for long-context inference"). Grids depend on shapes and bounds that the host knows,
so a CUDA graph can hold them; what a program does depends on lengths on the device.
Legend: T tokens of the step, B rows, H query heads, K KV heads, G = H / K, D head dim, N blocks, P
block size, W blocks of a row, M query rows of a tile (queries times G), C cached tokens of a tile,
X splits of a row. In kernels D is padded to a power of two, and the name of a tensor in memory
stands for the pointer to it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.metadata import AttentionMetadata

# Decode programs to start per multiprocessor: three run at once, and more of them balance rows of
# unequal length.
_PROGRAMS_PER_SM = 4
# A split of fewer tokens costs more to combine than it saves.
_MIN_SPLIT_TOKENS = tl.constexpr(128)
# A program reads the tokens of its split one tile after the other: a step would have to wait for
# the one program with a much longer split, however many rows there are.
_MAX_SPLIT_TOKENS = tl.constexpr(4096)
_MAX_SPLITS = 128
# Rows examined together when a program searches for its own.
_SEARCHED_ROWS = tl.constexpr(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a kernel is tiled: M query rows and C cached tokens per tile, warps per program, pipeline
    stages of its loads.
    """

    tile_m: int
    tile_c: int
    num_warps: int
    num_stages: int


def paged_attention(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """As `paged_attention_reference`, for float32, bfloat16 and float16; all three of the same
    dtype, `scale` above 0.

    Queries may be a view with a contiguous last dimension; caches are contiguous. A token of a row
    with `seq_len` 0 gets zeros, and nothing is read for it. Never waits for the device.
    """
    assert q_THD.stride(2) == 1 and k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous()
    assert attn.block_table_BW.stride(1) == 1
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    attend = _attend_decode if attn.is_decode else _attend_prefill
    attend(q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, attn, scale * math.log2(math.e))
    return out_THD


def _attend_prefill(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    out_THD: torch.Tensor,
    attn: AttentionMetadata,
    scale_log2: float,
) -> None:
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, kv_heads = k_cache_NPKD.shape[1:3]
    group = num_heads // kv_heads
    fills_sms = num_tokens * num_heads >= 128 * _num_sms(q_THD.device)
    launch = prefill_launch(
        q_THD.dtype, head_dim, large=fills_sms and attn.max_query_len * group > 64
    )
    num_rows = len(attn.seq_lens_B)
    grid = (num_tokens * group // launch.tile_m + num_rows, kv_heads)
    prefill_kernel[grid](
        q_THD,
        k_cache_NPKD,
        v_cache_NPKD,
        out_THD,
        attn.query_start_B1,
        attn.seq_lens_B,
        attn.block_table_BW,
        num_rows,
        attn.block_table_BW.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        scale_log2,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_M=launch.tile_m,
        TILE_C=launch.tile_c,
        TILE_D=padded_dim(head_dim),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _attend_decode(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    out_THD: torch.Tensor,
    attn: AttentionMetadata,
    scale_log2: float,
) -> None:
    num_heads, head_dim = q_THD.shape[1:]
    block_size, kv_heads = k_cache_NPKD.shape[1:3]
    group = num_heads // kv_heads
    launch = decode_launch(q_THD.dtype, head_dim, group)
    num_rows = len(attn.seq_lens_B)
    num_splits, filling = count_splits(
        num_rows * kv_heads, attn.max_seq_len, _num_sms(q_THD.device)
    )
    # Unused if a single split writes the output.
    acc_BHXD, max_BHX, sum_BHX = (
        out_THD,
        out_THD,
        out_THD,
    )
    if num_splits > 1:
        shape = (num_rows, num_heads, num_splits)
        acc_BHXD = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_THD.device)
        max_BHX, sum_BHX = torch.empty((2, *shape), dtype=torch.float32, device=q_THD.device)
    decode_kernel[(num_rows, kv_heads, num_splits)](
        q_THD,
        k_cache_NPKD,
        v_cache_NPKD,
        out_THD,
        acc_BHXD,
        max_BHX,
        sum_BHX,
        attn.query_start_B1,
        attn.seq_lens_B,
        attn.block_table_BW,
        attn.block_table_BW.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        scale_log2,
        num_splits,
        filling,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLIT=num_splits > 1,
        TILE_M=launch.tile_m,
        TILE_C=launch.tile_c,
        TILE_D=padded_dim(head_dim),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        combine_kernel[(num_rows, num_heads)](
            acc_BHXD,
            max_BHX,
            sum_BHX,
            out_THD,
            attn.query_start_B1,
            attn.seq_lens_B,
            num_splits,
            filling,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            TILE_C=launch.tile_c,
            TILE_X=COMBINE_TILE,
            TILE_D=padded_dim(head_dim),
            num_warps=4,
        )


# How kernels are tiled

COMBINE_TILE = 32


def padded_dim(head_dim: int) -> int:
    """The head dim of a tile: a power of two that a matrix product accepts."""
    return max(16, 1 << (head_dim - 1).bit_length())


def prefill_launch(dtype: torch.dtype, head_dim: int, large: bool) -> Launch:
    """Large tiles read keys and values least often; small tiles are used where large ones would
    leave processors idle.

    One of the five stages loads the block table, so two tiles of keys and values are being loaded
    while one is used. With the queries that is up to 133 KB, which fits an A100 too. float32 has no
    matrix instructions and needs twice the bytes.
    """
    if dtype == torch.float32:
        return Launch(tile_m=32, tile_c=16, num_warps=8, num_stages=5)
    if padded_dim(head_dim) > 128:
        return Launch(tile_m=64, tile_c=32, num_warps=8, num_stages=5)
    tile_c = 8192 // max(64, padded_dim(head_dim))
    if large:
        return Launch(tile_m=128, tile_c=tile_c, num_warps=8, num_stages=5)
    return Launch(tile_m=64, tile_c=tile_c // 2, num_warps=4, num_stages=5)


def decode_launch(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """The G query heads of one query, padded to the 16 rows of the smallest matrix product.

    Keys of a tile take 16 KB whatever the head dim, and stages are as in prefill: 72 KB altogether,
    so each multiprocessor of an H200 runs three programs with about 200 KB in flight, several times
    what the latency of its memory requires.
    """
    tile_m = max(16, 1 << (group - 1).bit_length())
    tile_c = max(16, min(128, 16384 // (padded_dim(head_dim) * dtype.itemsize)))
    return Launch(tile_m=tile_m, tile_c=tile_c, num_warps=4, num_stages=5)


def count_splits(num_programs: int, max_seq_len: int, num_sms: int) -> tuple[int, int]:
    """(maximum number of splits per row, number of splits per row that fills the device if all rows
    are `max_seq_len` long), from bounds alone.

    The first is larger where one such row could hold up a batch that fills the device without
    splits. `num_programs`: rows times KV heads.
    """
    wanted = -(-_PROGRAMS_PER_SM * num_sms // max(1, num_programs))
    possible: int = -(-max_seq_len // _MIN_SPLIT_TOKENS.value)
    filling = max(1, min(wanted, possible, _MAX_SPLITS))
    return min(max(filling, -(-max_seq_len // _MAX_SPLIT_TOKENS.value)), _MAX_SPLITS), filling


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; on the CPU, where only the interpreter runs, those of an H200."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


# Kernels

# What changes from step to step: kernels are not specialized on its alignment.
_VARYING_INTS = ["num_rows", "table_stride", "num_splits", "filling"]
_VARYING_POINTERS = ["query_start_B1", "seq_lens_B", "block_table_BW"]


@triton.jit(do_not_specialize=_VARYING_INTS, do_not_specialize_on_alignment=_VARYING_POINTERS)
def prefill_kernel(
    q_THD: tl.tensor,
    k_cache_NPKD: tl.tensor,
    v_cache_NPKD: tl.tensor,
    out_THD: tl.tensor,
    query_start_B1: tl.tensor,
    seq_lens_B: tl.tensor,
    block_table_BW: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program handles M query rows of one row of the batch and one KV head. Grid: (T * G // M +
    B, K).

    For a row of Q queries and S tokens, 4 * H * D operations for each query and token it sees;
    reads Q * H * D elements of queries and, once every M / G queries, up to 2 * S * K * D of the
    cache, writes Q * H * D. With M = 128 that is 128 operations per byte of a 16-bit cache; the
    second-level cache serves all reads but the first.
    """
    place, kv_head = tl.program_id(0), tl.program_id(1)
    row, first_place = _row_of(place, query_start_B1, num_rows, GROUP, TILE_M)
    query_start = tl.load(query_start_B1 + row)
    query_len = tl.load(query_start_B1 + row + 1) - query_start
    # Tiles that see the most tokens go first.
    tile = tl.cdiv(query_len * GROUP, TILE_M) - 1 - (place - first_place)
    if tile < 0:
        return
    seq_len = tl.load(seq_lens_B + row)
    m_M = tile * TILE_M + tl.arange(0, TILE_M)
    query_M, g_M = m_M // GROUP, m_M % GROUP
    d_D = tl.arange(0, TILE_D)
    live_MD = (m_M < query_len * GROUP)[:, None] & (d_D < HEAD_DIM)[None, :]
    q_QGD = q_THD + query_start.to(tl.int64) * q_stride_t + kv_head * GROUP * q_stride_h
    q_MD = tl.load(
        q_QGD + (query_M * q_stride_t + g_M * q_stride_h)[:, None] + d_D[None, :],
        mask=live_MD,
        other=0.0,
    )

    offset = seq_len - query_len  # position of the first query of the row
    ends_M = offset + query_M + 1
    last_query = tl.minimum((tile * TILE_M + TILE_M - 1) // GROUP, query_len - 1)
    end = offset + last_query + 1
    # Every query of the tile sees every token before `full`.
    full = tl.maximum(offset + tile * TILE_M // GROUP + 1, 0) // TILE_C * TILE_C
    table_W = block_table_BW + row.to(tl.int64) * table_stride
    acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
    max_M = tl.full([TILE_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    acc_MD, max_M, sum_M = _attend(
        q_MD,
        acc_MD,
        max_M,
        sum_M,
        k_cache_NPKD,
        v_cache_NPKD,
        table_W,
        kv_head,
        ends_M,
        0,
        full,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        False,
    )
    acc_MD, max_M, sum_M = _attend(
        q_MD,
        acc_MD,
        max_M,
        sum_M,
        k_cache_NPKD,
        v_cache_NPKD,
        table_W,
        kv_head,
        ends_M,
        full,
        end,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        True,
    )
    out_MD = _divide(acc_MD, sum_M).to(out_THD.dtype.element_ty)
    # Divided again, counting from the first query of the step: keeping the quotients above would
    # fill registers during the loops.
    flat_M = query_start * GROUP + m_M
    head_M = kv_head * GROUP + flat_M % GROUP
    offset_M = ((flat_M // GROUP).to(tl.int64) * (GROUP * KV_HEADS) + head_M) * HEAD_DIM
    tl.store(out_THD + offset_M[:, None] + d_D[None, :], out_MD, mask=live_MD)


@triton.jit(do_not_specialize=_VARYING_INTS, do_not_specialize_on_alignment=_VARYING_POINTERS)
def decode_kernel(
    q_THD: tl.tensor,
    k_cache_NPKD: tl.tensor,
    v_cache_NPKD: tl.tensor,
    out_THD: tl.tensor,
    acc_BHXD: tl.tensor,
    max_BHX: tl.tensor,
    sum_BHX: tl.tensor,
    query_start_B1: tl.tensor,
    seq_lens_B: tl.tensor,
    block_table_BW: tl.tensor,
    table_stride: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    scale_log2: tl.tensor,
    num_splits: tl.tensor,
    filling: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """One program handles one split of one row's tokens and one KV head, for the G query heads that
    share it. Grid: (B, K, X).

    For a row of S tokens, 4 * H * D * S operations; reads 2 * S * K * D elements of the cache, each
    once, which is G operations per byte of a 16-bit cache: bound by memory. Writes the H * D
    elements of the output, or with SPLIT the float32 accumulator, maximum and sum of each split, H
    * (D + 2) * 4 bytes; nothing for splits that begin past the end of the row.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_B1 + row)
    if tl.load(query_start_B1 + row + 1) == token:
        return
    seq_len = tl.load(seq_lens_B + row)
    first, end = 0, seq_len
    if SPLIT:
        split_len = _split_len(seq_len, num_splits, filling, TILE_C)
        first = split * split_len
        end = tl.minimum(first + split_len, seq_len)
        if first >= seq_len:
            return
    g_M = tl.arange(0, TILE_M)
    head_M = kv_head * GROUP + g_M
    d_D = tl.arange(0, TILE_D)
    live_MD = (g_M < GROUP)[:, None] & (d_D < HEAD_DIM)[None, :]
    q_D = q_THD + token.to(tl.int64) * q_stride_t
    q_MD = tl.load(q_D + (head_M * q_stride_h)[:, None] + d_D[None, :], mask=live_MD, other=0.0)
    table_W = block_table_BW + row.to(tl.int64) * table_stride
    acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
    max_M = tl.full([TILE_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([TILE_M], tl.float32)
    acc_MD, max_M, sum_M = _attend(
        q_MD,
        acc_MD,
        max_M,
        sum_M,
        k_cache_NPKD,
        v_cache_NPKD,
        table_W,
        kv_head,
        g_M * 0 + end,
        first,
        end,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        True,
    )
    if SPLIT:
        place_M = (row * (GROUP * KV_HEADS) + head_M) * num_splits + split
        tl.store(acc_BHXD + (place_M * HEAD_DIM)[:, None] + d_D[None, :], acc_MD, mask=live_MD)
        tl.store(max_BHX + place_M, max_M, mask=g_M < GROUP)
        tl.store(sum_BHX + place_M, sum_M, mask=g_M < GROUP)
    else:
        out_MD = _divide(acc_MD, sum_M).to(out_THD.dtype.element_ty)
        out_D = out_THD + token.to(tl.int64) * (GROUP * KV_HEADS * HEAD_DIM)
        tl.store(out_D + (head_M * HEAD_DIM)[:, None] + d_D[None, :], out_MD, mask=live_MD)


@triton.jit(do_not_specialize=_VARYING_INTS, do_not_specialize_on_alignment=_VARYING_POINTERS)
def combine_kernel(
    acc_BHXD: tl.tensor,
    max_BHX: tl.tensor,
    sum_BHX: tl.tensor,
    out_THD: tl.tensor,
    query_start_B1: tl.tensor,
    seq_lens_B: tl.tensor,
    num_splits: tl.tensor,
    filling: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_X: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """The output of one row and query head, combined from the splits that its length has. Grid: (B,
    H).

    Reads (D + 2) * 4 bytes per split and writes D elements; 2 * D operations per split.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_B1 + row)
    if tl.load(query_start_B1 + row + 1) == token:
        return
    seq_len = tl.load(seq_lens_B + row)
    used = tl.cdiv(seq_len, _split_len(seq_len, num_splits, filling, TILE_C))
    first_place = (row * NUM_HEADS + head) * num_splits
    d_D = tl.arange(0, TILE_D)
    acc_D = tl.zeros([TILE_D], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, used, TILE_X):
        x_X = first + tl.arange(0, TILE_X)
        place_X = first_place + x_X
        live_XD = (x_X < used)[:, None] & (d_D < HEAD_DIM)[None, :]
        max_X = tl.load(max_BHX + place_X, mask=x_X < used, other=float("-inf"))
        sum_X = tl.load(sum_BHX + place_X, mask=x_X < used, other=0.0)
        acc_XD = tl.load(
            acc_BHXD + (place_X * HEAD_DIM)[:, None] + d_D[None, :], mask=live_XD, other=0.0
        )
        new_largest = tl.maximum(largest, tl.max(max_X, 0))
        factor, factor_X = tl.exp2(largest - new_largest), tl.exp2(max_X - new_largest)
        total = total * factor + tl.sum(sum_X * factor_X, 0)
        acc_D = acc_D * factor + tl.sum(acc_XD * factor_X[:, None], 0)
        largest = new_largest
    out_D = (acc_D / tl.where(total > 0, total, 1.0)).to(out_THD.dtype.element_ty)
    tl.store(
        out_THD + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + d_D,
        out_D,
        mask=d_D < HEAD_DIM,
    )


# Parts of kernels


@triton.jit
def _row_of(
    place: tl.tensor,
    query_start_B1: tl.tensor,
    num_rows: tl.tensor,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(the row that owns a place of the grid, the first place of that row).

    Row b owns the places from `query_start[b] * G // M + b` on: at least as many as the tiles its
    queries fill. The T * G // M + B places of the grid cover all of these, however the tokens are
    distributed over the rows.
    """
    row = -1
    for first in range(0, num_rows, _SEARCHED_ROWS):
        row_B = first + tl.arange(0, _SEARCHED_ROWS)
        start_B = tl.load(query_start_B1 + row_B, mask=row_B < num_rows, other=0)
        begun_B = (row_B < num_rows) & (start_B * GROUP // TILE_M + row_B <= place)
        row += tl.sum(begun_B.to(tl.int32), 0)
    return row, tl.load(query_start_B1 + row) * GROUP // TILE_M + row


@triton.jit
def _split_len(
    seq_len: tl.tensor, num_splits: tl.tensor, filling: tl.tensor, TILE_C: tl.constexpr
) -> tl.tensor:
    """Tokens per split, in whole tiles. A row is divided into up to `filling` splits of at least
    `_MIN_SPLIT_TOKENS` each, and into more if they would have over `_MAX_SPLIT_TOKENS`.
    """
    tiles = tl.cdiv(seq_len, TILE_C)
    used = tl.maximum(
        tl.minimum(filling, tl.cdiv(seq_len, _MIN_SPLIT_TOKENS)),
        tl.cdiv(seq_len, _MAX_SPLIT_TOKENS),
    )
    return tl.maximum(tl.cdiv(tiles, tl.maximum(tl.minimum(used, num_splits), 1)), 1) * TILE_C


@triton.jit
def _attend(
    q_MD: tl.tensor,
    acc_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    k_cache_NPKD: tl.tensor,
    v_cache_NPKD: tl.tensor,
    table_W: tl.tensor,
    kv_head: tl.tensor,
    ends_M: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(accumulator, maximum, sum) after the tokens from `first`, a multiple of C, to `end`, which
    is also a multiple of C unless MASKED.

    Query row m sees the tokens before `ends_M[m]`. Nothing from `end` on is read, neither table nor
    cache.
    """
    d_D = tl.arange(0, TILE_D)
    for start in range(first, end, TILE_C):
        token_C = start + tl.arange(0, TILE_C)
        # One load of the table for keys and values of the whole tile.
        if BLOCK_SIZE % TILE_C == 0:
            block_C = tl.load(table_W + start // BLOCK_SIZE)
        else:
            block_C = _load(table_W + token_C // BLOCK_SIZE, token_C < end, MASKED)
        slot_C = block_C.to(tl.int64) * BLOCK_SIZE + token_C % BLOCK_SIZE
        offset_CD = ((slot_C * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + d_D[None, :]
        kept_CD = (token_C < end)[:, None] & (d_D < HEAD_DIM)[None, :]
        k_CD = _load(k_cache_NPKD + offset_CD, kept_CD, MASKED or HEAD_DIM < TILE_D)
        v_CD = _load(v_cache_NPKD + offset_CD, kept_CD, MASKED or HEAD_DIM < TILE_D)
        s_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision="ieee")
        if MASKED:
            s_MC = tl.where(token_C[None, :] < ends_M[:, None], s_MC, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(s_MC, 1) * scale_log2)
        p_MC = tl.exp2(s_MC * scale_log2 - new_max_M[:, None])
        factor_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * factor_M + tl.sum(p_MC, 1)
        acc_MD = tl.dot(
            p_MC.to(v_CD.dtype), v_CD, acc_MD * factor_M[:, None], input_precision="ieee"
        )
        max_M = new_max_M
    return acc_MD, max_M, sum_M


@triton.jit
def _load(pointers: tl.tensor, kept: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """The values pointed to, with zeros where MASKED and not kept."""
    if MASKED:
        values = tl.load(pointers, mask=kept, other=0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def _divide(acc_MD: tl.tensor, sum_M: tl.tensor) -> tl.tensor:
    """The weighted mean, zeros where nothing was seen."""
    return acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
