"""Paged attention on a GPU, in Triton: one kernel for prompts, one for decoding.

Token-major caches as in `paged_attention_reference`. Softmax is the online softmax with the tiling
of Dao 2023 (arXiv:2307.08691), with powers of two as exponentials, accumulated in float32. The G
query heads of a KV head share every read of its keys and values: they are adjacent in the first
dimension of a tile. Decode divides the tokens of rows between programs (Dao et al. 2023,
"Flash-Decoding for long-context inference"). Grids depend on shapes and bounds that the host knows,
so a CUDA graph can hold them; what a program does depends on lengths on the device.
Legend: T tokens of the step, B rows (B1: B + 1 entries), H query heads, K KV heads, G = H / K, D
head dim, N blocks, P block size, W blocks of a row, M query rows of a tile (queries times G), C
cached tokens of a tile, X parts of decode rows. In kernels D is padded to a power of two, and the
name of a tensor in memory stands for the pointer to it.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_parts import MAX_PARTS_PER_ROW, max_decode_parts
from kernels.gpu.attention_launch import decode_launch, padded_dim, prefill_launch
from kernels.gpu.fp8 import choose_fp8_widening, from_cache_dtype
from kernels.metadata import AttentionMetadata, DecodeParts

# Rows examined together when a program searches for its own.
_ROWS_PER_SEARCH = tl.constexpr(256)
_MAX_GRID_Y = 65_535  # of CUDA; the first dimension of a grid has no such limit


def paged_attention(
    q_THD: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> Tensor:
    """As `paged_attention_reference`, for queries in float32, bfloat16 and float16, `scale` above
    0. One launch for the rows of `attn.decode_parts`, one for the others.

    Queries may be a view with a contiguous last dimension; caches are contiguous. A token of a row
    with `seq_len` 0 gets zeros, and nothing is read for it. Never waits for the device.
    """
    assert q_THD.stride(2) == 1 and k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous()
    assert attn.block_table_BW.stride(1) == 1
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    scale_log2 = scale * math.log2(math.e)
    first_row = 0
    if attn.decode_parts is not None:
        attend_decode(
            q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, attn, attn.decode_parts, scale_log2
        )
        first_row = attn.decode_parts.num_rows
    if first_row < len(attn.seq_lens_B):
        _attend_prefill(q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, attn, first_row, scale_log2)
    return out_THD


def _attend_prefill(
    q_THD: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    out_THD: Tensor,
    attn: AttentionMetadata,
    first_row: int,
    scale_log2: float,
) -> None:
    """The rows from `first_row` on; those before it have one query each."""
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = k_cache_NPKD.shape[1:3]
    group_size = num_heads // num_kv_heads
    fills_sms = num_tokens * num_heads >= 128 * _num_sms(q_THD.device)
    # Before Hopper, widening 8-bit numbers leaves no registers for a large tile.
    has_registers = k_cache_NPKD.dtype is not torch.uint8 or _capability(q_THD.device) >= (9, 0)
    is_large_tile = fills_sms and has_registers and attn.max_query_len * group_size > 64
    is_hopper = _capability(q_THD.device)[0] == 9
    launch = prefill_launch(q_THD.dtype, head_dim, is_large_tile, is_hopper)
    num_rows = len(attn.seq_lens_B) - first_row
    grid = (num_tokens * group_size // launch.tile_m + num_rows, num_kv_heads)
    prefill_kernel[grid](
        q_THD,
        k_cache_NPKD,
        v_cache_NPKD,
        out_THD,
        attn.query_start_B1[first_row:],
        attn.seq_lens_B[first_row:],
        attn.block_table_BW[first_row:],
        num_rows,
        attn.block_table_BW.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        scale_log2,
        GROUP_SIZE=group_size,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_M=launch.tile_m,
        TILE_C=launch.tile_c,
        TILE_D=padded_dim(head_dim),
        FP8_WIDENING=launch.fp8_widening or choose_fp8_widening(q_THD.device, q_THD.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def attend_decode(
    q_THD: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    out_THD: Tensor,
    attn: AttentionMetadata,
    decode_parts: DecodeParts,
    scale_log2: float,
) -> None:
    """The rows of `attn.decode_parts`, written to the first tokens of `out_THD`. The rest as
    `paged_attention`; `scale_log2` is the scale for powers of two.
    """
    num_heads, head_dim = q_THD.shape[1:]
    block_size, num_kv_heads = k_cache_NPKD.shape[1:3]
    group_size = num_heads // num_kv_heads
    launch = decode_launch(q_THD.dtype, k_cache_NPKD.dtype, head_dim, group_size)
    acc_XHD, max_XH, sum_XH = out_THD, out_THD, out_THD  # unused while each row is one part
    if decode_parts.max_parts > decode_parts.num_rows:
        part_shape = (decode_parts.max_parts, num_heads)
        acc_XHD = torch.empty((*part_shape, head_dim), dtype=torch.float32, device=q_THD.device)
        # Each has memory of its own, which is aligned whatever the number of parts is.
        max_XH, sum_XH = (
            torch.empty(part_shape, dtype=torch.float32, device=q_THD.device) for _ in range(2)
        )
    heads_adjacent = launch.heads_adjacent and decode_parts.max_parts <= _MAX_GRID_Y
    grid = (num_kv_heads, decode_parts.max_parts)
    grid = grid if heads_adjacent else grid[::-1]
    decode_kernel[grid](
        q_THD,
        k_cache_NPKD,
        v_cache_NPKD,
        out_THD,
        acc_XHD,
        max_XH,
        sum_XH,
        decode_parts.num_arrived_parts_BK,
        decode_parts.part_start_B1,
        attn.seq_lens_B,
        attn.block_table_BW,
        decode_parts.num_rows,
        attn.block_table_BW.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        scale_log2,
        GROUP_SIZE=group_size,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_M=launch.tile_m,
        TILE_C=launch.tile_c,
        TILE_D=padded_dim(head_dim),
        FP8_WIDENING=launch.fp8_widening or choose_fp8_widening(q_THD.device, q_THD.dtype),
        TILE_X=MAX_PARTS_PER_ROW,
        HEADS_ADJACENT=heads_adjacent,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


# What launches depend on


def max_parts_on_device(
    num_rows: int, num_kv_heads: int, max_seq_len: int, device: torch.device
) -> int:
    """`max_decode_parts` for `num_rows` decode rows of at most `max_seq_len` tokens."""
    return max_decode_parts(num_rows, num_kv_heads, max_seq_len, _num_sms(device))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) on the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; on the CPU, where only the interpreter runs, those of an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


# Kernels

# They are not specialized on numbers that change from step to step, nor on the alignment of
# pointers to such numbers.


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["query_start_B1", "seq_lens_B", "block_table_BW"],
)
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
    GROUP_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    FP8_WIDENING: tl.constexpr,
) -> None:
    """One program handles M query rows of one row of the batch and one KV head. Grid: (T * G // M +
    B, K).

    For a row of Q queries and S tokens, 4 * H * D operations for each query and token it sees;
    reads Q * H * D elements of queries and, once every M / G queries, up to 2 * S * K * D of the
    cache, writes Q * H * D. With M = 128 that is 128 operations per byte of a 16-bit cache; the
    second-level cache serves all reads but the first.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    row, first_program = _row_of_program(program, query_start_B1, num_rows, GROUP_SIZE, TILE_M)
    if row < 0:
        return
    query_start = tl.load(query_start_B1 + row)
    query_len = tl.load(query_start_B1 + row + 1) - query_start
    # Tiles that see the most tokens go first.
    tile = tl.cdiv(query_len * GROUP_SIZE, TILE_M) - 1 - (program - first_program)
    if tile < 0:
        return
    seq_len = tl.load(seq_lens_B + row)
    m_M = tile * TILE_M + tl.arange(0, TILE_M)
    query_M, g_M = m_M // GROUP_SIZE, m_M % GROUP_SIZE
    d_D = tl.arange(0, TILE_D)
    mask_MD = (m_M < query_len * GROUP_SIZE)[:, None] & (d_D < HEAD_DIM)[None, :]
    q_QGD = q_THD + query_start.to(tl.int64) * q_stride_t + kv_head * GROUP_SIZE * q_stride_h
    q_MD = tl.load(
        q_QGD + (query_M * q_stride_t + g_M * q_stride_h)[:, None] + d_D[None, :],
        mask=mask_MD,
        other=0.0,
    )

    first_query_position = seq_len - query_len  # position of the first query of the row
    ends_M = first_query_position + query_M + 1
    last_query = tl.minimum((tile * TILE_M + TILE_M - 1) // GROUP_SIZE, query_len - 1)
    end_position = first_query_position + last_query + 1
    # Every query of the tile sees every token before `unmasked_end`.
    unmasked_end = (
        tl.maximum(first_query_position + tile * TILE_M // GROUP_SIZE + 1, 0) // TILE_C * TILE_C
    )
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
        unmasked_end,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        FP8_WIDENING,
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
        unmasked_end,
        end_position,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        FP8_WIDENING,
        True,
    )
    out_MD = _divide(acc_MD, sum_M).to(out_THD.dtype.element_ty)
    # Divided again, counting from the first query of the step: keeping the quotients above would
    # fill registers during the loops.
    step_query_row_M = query_start * GROUP_SIZE + m_M
    head_M = kv_head * GROUP_SIZE + step_query_row_M % GROUP_SIZE
    offset_M = (
        (step_query_row_M // GROUP_SIZE).to(tl.int64) * (GROUP_SIZE * KV_HEADS) + head_M
    ) * HEAD_DIM
    tl.store(out_THD + offset_M[:, None] + d_D[None, :], out_MD, mask=mask_MD)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["part_start_B1", "seq_lens_B", "block_table_BW"],
)
def decode_kernel(
    q_THD: tl.tensor,
    k_cache_NPKD: tl.tensor,
    v_cache_NPKD: tl.tensor,
    out_THD: tl.tensor,
    acc_XHD: tl.tensor,
    max_XH: tl.tensor,
    sum_XH: tl.tensor,
    num_arrived_parts_BK: tl.tensor,
    part_start_B1: tl.tensor,
    seq_lens_B: tl.tensor,
    block_table_BW: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    scale_log2: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    FP8_WIDENING: tl.constexpr,
    TILE_X: tl.constexpr,
    HEADS_ADJACENT: tl.constexpr,
) -> None:
    """One program handles one part of one row's tokens and one KV head, for the G query heads that
    share it. Row b is token b. Grid: (K, X) if HEADS_ADJACENT, else (X, K); programs past the
    last part return at once.

    For a row of S tokens, 4 * H * D * S operations; reads 2 * S * K * D elements of the cache, each
    once, which is G operations per byte of a 16-bit cache: bound by memory. A row of one part
    writes the H * D elements of the output. Otherwise each part writes its float32 accumulator,
    maximum and sum, H * (D + 2) * 4 bytes, and the program that is done last joins them, in the
    order of the parts, so the result does not depend on which one that is.
    """
    if HEADS_ADJACENT:
        kv_head, part = tl.program_id(0), tl.program_id(1)
    else:
        part, kv_head = tl.program_id(0), tl.program_id(1)
    if part >= tl.load(part_start_B1 + num_rows):
        return
    row = _row_of_part(part, part_start_B1, num_rows)
    first_part = tl.load(part_start_B1 + row)
    seq_len = tl.load(seq_lens_B + row)
    part_len = (
        tl.cdiv(tl.cdiv(seq_len, TILE_C), tl.load(part_start_B1 + row + 1) - first_part) * TILE_C
    )
    # Whole tiles may be fewer than the parts that the host counted.
    num_parts = tl.maximum(tl.cdiv(seq_len, tl.maximum(part_len, 1)), 1)
    part_in_row = part - first_part
    if part_in_row >= num_parts:
        return
    first_position = part_in_row * part_len
    end_position = tl.minimum(first_position + part_len, seq_len)
    g_M = tl.arange(0, TILE_M)
    head_M = kv_head * GROUP_SIZE + g_M
    d_D = tl.arange(0, TILE_D)
    mask_MD = (g_M < GROUP_SIZE)[:, None] & (d_D < HEAD_DIM)[None, :]
    q_HD = q_THD + row.to(tl.int64) * q_stride_t
    q_MD = tl.load(q_HD + (head_M * q_stride_h)[:, None] + d_D[None, :], mask=mask_MD, other=0.0)
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
        g_M * 0 + end_position,
        first_position,
        end_position,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE_C,
        TILE_D,
        FP8_WIDENING,
        True,
    )
    out_HD = out_THD + row.to(tl.int64) * (GROUP_SIZE * KV_HEADS * HEAD_DIM)
    if num_parts == 1:
        out_MD = _divide(acc_MD, sum_M).to(out_THD.dtype.element_ty)
        tl.store(out_HD + (head_M * HEAD_DIM)[:, None] + d_D[None, :], out_MD, mask=mask_MD)
        return
    part_head_M = part * (GROUP_SIZE * KV_HEADS) + head_M
    tl.store(acc_XHD + (part_head_M * HEAD_DIM)[:, None] + d_D[None, :], acc_MD, mask=mask_MD)
    tl.store(max_XH + part_head_M, max_M, mask=g_M < GROUP_SIZE)
    tl.store(sum_XH + part_head_M, sum_M, mask=g_M < GROUP_SIZE)
    # Every thread has stored its part before one of them says so. The program that counts the last
    # part sees all of them (release and acquire, in the scope of the GPU).
    tl.debug_barrier()
    num_arrived_parts_pointer = num_arrived_parts_BK + row * KV_HEADS + kv_head
    if tl.atomic_add(num_arrived_parts_pointer, 1, sem="acq_rel", scope="gpu") < num_parts - 1:
        return
    tl.store(num_arrived_parts_pointer, 0)
    for g in range(GROUP_SIZE):
        head = kv_head * GROUP_SIZE + g
        joined_D = _join(
            acc_XHD,
            max_XH,
            sum_XH,
            first_part * (GROUP_SIZE * KV_HEADS) + head,
            num_parts,
            GROUP_SIZE * KV_HEADS,
            HEAD_DIM,
            TILE_D,
            TILE_X,
        )
        tl.store(
            out_HD + head * HEAD_DIM + d_D,
            joined_D.to(out_THD.dtype.element_ty),
            mask=d_D < HEAD_DIM,
        )


# Parts of kernels


@triton.jit
def _row_of_program(
    program: tl.tensor,
    query_start_B1: tl.tensor,
    num_rows: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(the row that a program of the grid's first dimension works on, the first program of that
    row).

    Row b has the programs from `start[b] * G // M + b` on: at least as many as the tiles its
    queries fill. The T * G // M + B programs of the grid cover all of these, however the tokens are
    distributed over the rows. Programs before the first row belong to row -1: the step may have
    other tokens before it.
    """
    row = -1
    for first_searched_row in range(0, num_rows, _ROWS_PER_SEARCH):
        row_B = first_searched_row + tl.arange(0, _ROWS_PER_SEARCH)
        start_B = tl.load(query_start_B1 + row_B, mask=row_B < num_rows, other=0)
        has_begun_B = (row_B < num_rows) & (start_B * GROUP_SIZE // TILE_M + row_B <= program)
        row += tl.sum(has_begun_B.to(tl.int32), 0)
    return row, tl.load(query_start_B1 + tl.maximum(row, 0)) * GROUP_SIZE // TILE_M + row


@triton.jit
def _row_of_part(part: tl.tensor, part_start_B1: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """The row that a part belongs to."""
    row = -1
    for first_searched_row in range(0, num_rows, _ROWS_PER_SEARCH):
        row_B = first_searched_row + tl.arange(0, _ROWS_PER_SEARCH)
        start_B = tl.load(part_start_B1 + row_B, mask=row_B < num_rows, other=0)
        row += tl.sum(((row_B < num_rows) & (start_B <= part)).to(tl.int32), 0)
    return row


@triton.jit
def _join(
    acc_XHD: tl.tensor,
    max_XH: tl.tensor,
    sum_XH: tl.tensor,
    first_index: tl.tensor,
    num_parts: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The output of one row and query head, from its parts at `first_index`, `first_index + H` and
    so on, each of which has at least one token. Bypasses the first-level cache, which does not see
    what others have written.
    """
    d_D = tl.arange(0, TILE_D)
    x_X = tl.arange(0, TILE_X)
    index_X = first_index + x_X * NUM_HEADS
    mask_X = x_X < num_parts
    max_X = tl.load(max_XH + index_X, mask=mask_X, other=float("-inf"), cache_modifier=".cg")
    sum_X = tl.load(sum_XH + index_X, mask=mask_X, other=0.0, cache_modifier=".cg")
    acc_XD = tl.load(
        acc_XHD + (index_X * HEAD_DIM)[:, None] + d_D[None, :],
        mask=mask_X[:, None] & (d_D < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    rescale_factor_X = tl.exp2(max_X - tl.max(max_X, 0))
    return tl.sum(acc_XD * rescale_factor_X[:, None], 0) / tl.sum(sum_X * rescale_factor_X, 0)


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
    first_position: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_C: tl.constexpr,
    TILE_D: tl.constexpr,
    FP8_WIDENING: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(accumulator, maximum, sum) after the tokens from `first_position`, a multiple of C, to
    `end`, which is also a multiple of C unless MASKED.

    Query row m sees the tokens before `ends_M[m]`. Nothing from `end` on is read, neither table nor
    cache.
    """
    d_D = tl.arange(0, TILE_D)
    for tile_start in range(first_position, end, TILE_C):
        token_C = tile_start + tl.arange(0, TILE_C)
        # One load of the table for keys and values of the whole tile.
        if BLOCK_SIZE % TILE_C == 0:
            block_C = tl.load(table_W + tile_start // BLOCK_SIZE)
        else:
            block_C = _load(table_W + token_C // BLOCK_SIZE, token_C < end, MASKED)
        kv_place_C = block_C.to(tl.int64) * BLOCK_SIZE + token_C % BLOCK_SIZE
        offset_CD = ((kv_place_C * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + d_D[None, :]
        mask_CD = (token_C < end)[:, None] & (d_D < HEAD_DIM)[None, :]
        k_CD = _load(k_cache_NPKD + offset_CD, mask_CD, MASKED or HEAD_DIM < TILE_D)
        v_CD = _load(v_cache_NPKD + offset_CD, mask_CD, MASKED or HEAD_DIM < TILE_D)
        k_CD = from_cache_dtype(k_CD, q_MD.dtype, FP8_WIDENING)
        v_CD = from_cache_dtype(v_CD, q_MD.dtype, FP8_WIDENING)
        s_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision="ieee")
        if MASKED:
            s_MC = tl.where(token_C[None, :] < ends_M[:, None], s_MC, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(s_MC, 1) * scale_log2)
        p_MC = tl.exp2(s_MC * scale_log2 - new_max_M[:, None])
        rescale_factor_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * rescale_factor_M + tl.sum(p_MC, 1)
        acc_MD = tl.dot(
            p_MC.to(v_CD.dtype), v_CD, acc_MD * rescale_factor_M[:, None], input_precision="ieee"
        )
        max_M = new_max_M
    return acc_MD, max_M, sum_M


@triton.jit
def _load(pointers: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """The values pointed to, with zeros where MASKED and `mask` is false."""
    if MASKED:
        values = tl.load(pointers, mask=mask, other=0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def _divide(acc_MD: tl.tensor, sum_M: tl.tensor) -> tl.tensor:
    """The weighted mean, zeros where nothing was seen."""
    return acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
