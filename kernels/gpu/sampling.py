"""Sampling on a GPU: the kernels of `kernels/reference/sampling.py`, where functions of the same
names say what they compute, in Triton.

A program takes tiles of `_BLOCKS_PER_TILE` blocks of one row; if there are few rows, many programs
share a row. As on a CPU, a block whose largest logit lies beyond a limit is never read. Nothing
waits for the device and grids depend on shapes alone. All arguments are contiguous.
Bits: a subtraction, then a division rounded as IEEE 754 says; a product that is added to something
is an explicit fused operation, and no other operation is fused. So a gap or a weight is the same in
every kernel and on every chip.
A gap is (largest logit of all ranks - logit) / temperature, a weight floor(exp(-gap) * 2**40), a
target weight where the drawn token lies in the running sum of this rank's weights. An entry of a
list is a gap and how many tokens it stands for; `prefix_R` is the digits of a gap that earlier
passes found, `top_p_R` in units of 2**-30.
Legend: B rows, R rows of one draw, V this rank's columns (tokens of its shard), X blocks of columns
or bins of a histogram, K the largest top-k of a draw, N ranks, S copies of a row's histogram; a
block is `BLOCK_COLUMNS` columns of a row, the last one shorter. Inside a program X is the blocks of
a tile or of the row, C the columns of a block or the entries of a list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.interface import GapRows
from kernels.reference import sampling
from kernels.reference.sampling import (
    BLOCK_COLUMNS,
    INFINITY_BITS,
    MAX_LISTED_TOP_K,
    RADIX_PASSES,
    TOP_P_ONE,
)
from kernels.reference.sampling import mask_columns as mask_columns

# 8 logits for each of the 128 threads of a program, one load of 16 bytes in bfloat16.
_BLOCKS_PER_TILE = 8
_TARGET_PROGRAMS = 4096  # 16 programs on each of 132 processors, twice
# number of histograms over which few rows are spread, because additions to the same place wait for
# each other
_NUM_HISTOGRAMS = 64
# rows of blocks and lists are padded to at least this, so that most sizes share compiled code
_MIN_PADDED_SIZE = 2048
_ROWS_PER_PROGRAM = 32  # in programs with one thread per row

_BLOCK_COLUMNS = tl.constexpr(BLOCK_COLUMNS)
_INFINITY = tl.constexpr(float("inf"))
_WEIGHTLESS_GAP = tl.constexpr(28.0)  # exp(-28) * 2**40 < 1
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_TOP_P_ONE = tl.constexpr(TOP_P_ONE)
_INFINITY_BITS = tl.constexpr(INFINITY_BITS)
_EMPTY_ENTRY = tl.constexpr(INFINITY_BITS << 32)
_GOLDEN_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(word) for word in sampling.SPLITMIX64)


def row_best(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_columns = logits_BV.shape
    num_vocab_blocks = triton.cdiv(num_columns, BLOCK_COLUMNS)
    block_max_BX = torch.empty(
        num_rows, num_vocab_blocks, dtype=torch.float32, device=logits_BV.device
    )
    max_B = torch.empty(num_rows, dtype=torch.float32, device=logits_BV.device)
    column_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    _block_maxima[_grid(num_rows, num_vocab_blocks)](
        logits_BV, block_max_BX, num_columns, TILE=_BLOCKS_PER_TILE
    )
    _row_best[(num_rows,)](
        logits_BV,
        block_max_BX,
        max_B,
        column_B,
        num_columns,
        PADDED_BLOCKS=_padded_size(num_vocab_blocks),
    )
    return max_B, column_B, block_max_BX


def pack_value_and_id(values: Tensor, ids: Tensor) -> Tensor:
    """Arguments have one dimension."""
    packed = torch.empty_like(ids)
    _pack_value_and_id[(triton.cdiv(len(ids), _ROWS_PER_PROGRAM),)](
        values, ids, packed, len(ids), ROWS=_ROWS_PER_PROGRAM, num_warps=1
    )
    return packed


def unpack_value_and_id(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The argument has one dimension."""
    values = torch.empty_like(packed, dtype=torch.float32)
    ids = torch.empty_like(packed)
    _unpack_value_and_id[(triton.cdiv(len(packed), _ROWS_PER_PROGRAM),)](
        packed, values, ids, len(packed), ROWS=_ROWS_PER_PROGRAM, num_warps=1
    )
    return values, ids


def block_weights(gap_rows: GapRows, gap_limit_R: Tensor) -> tuple[Tensor, Tensor]:
    sums_RX = _sums_within_gap_limit(gap_rows, gap_limit_R, by_weight=True)
    return sums_RX, sums_RX.sum(dim=1)


def target_weight(
    seeds_R: Tensor, positions_R: Tensor, kept_weight_NR: Tensor, rank: int
) -> Tensor:
    num_ranks, num_rows = kept_weight_NR.shape
    assert kept_weight_NR.is_contiguous()
    target_weight_R = torch.empty_like(positions_R)
    _target_weight[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        seeds_R,
        positions_R,
        kept_weight_NR,
        target_weight_R,
        num_rows,
        num_ranks,
        rank,
        ROWS=_ROWS_PER_PROGRAM,
        num_warps=1,
    )
    return target_weight_R


def pick_column(
    gap_rows: GapRows, gap_limit_R: Tensor, sums_RX: Tensor, target_weight_R: Tensor
) -> Tensor:
    assert (
        gap_limit_R.is_contiguous() and sums_RX.is_contiguous() and target_weight_R.is_contiguous()
    )
    column_R = torch.empty_like(target_weight_R)
    _pick_column[(len(target_weight_R),)](
        gap_rows.logits_BV,
        gap_rows.rows_R,
        gap_rows.max_R,
        gap_rows.temperature_R,
        gap_limit_R,
        sums_RX,
        target_weight_R,
        column_R,
        gap_rows.logits_BV.shape[1],
        PADDED_BLOCKS=_padded_size(sums_RX.shape[1]),
    )
    return column_R


def list_nearest(gap_rows: GapRows, top_k_R: Tensor, max_top_k: int) -> Tensor:
    """The k blocks with the largest maxima hold k tokens at least as near as any token elsewhere,
    so these blocks alone determine the list, which `torch.topk` makes. Only ties with entry k, the
    row's last, may lie elsewhere: its count is how many tokens of this shard lie within its gap,
    less the k - 1 entries before it.
    """
    num_rows = len(gap_rows.rows_R)
    num_vocab_blocks = gap_rows.block_max_BX.shape[1]
    near_blocks_RX = (
        gap_rows.block_max_BX.index_select(0, gap_rows.rows_R)
        .topk(min(max_top_k, num_vocab_blocks), sorted=False)
        .indices
    )
    num_near_blocks = near_blocks_RX.shape[1]
    gaps_RC = torch.empty(
        num_rows, num_near_blocks * BLOCK_COLUMNS, dtype=torch.float32, device=near_blocks_RX.device
    )
    _near_gaps[(num_rows, triton.cdiv(num_near_blocks, _BLOCKS_PER_TILE))](
        gap_rows.logits_BV,
        gap_rows.rows_R,
        gap_rows.max_R,
        gap_rows.temperature_R,
        near_blocks_RX,
        gaps_RC,
        gap_rows.logits_BV.shape[1],
        num_near_blocks,
        TILE=_BLOCKS_PER_TILE,
    )
    nearest_gaps_RK = gaps_RC.topk(
        min(max_top_k, gaps_RC.shape[1]), largest=False, sorted=True
    ).values
    nearest_gaps_RK = functional.pad(
        nearest_gaps_RK, (0, max_top_k - nearest_gaps_RK.shape[1]), value=torch.inf
    )
    last_gap_R = nearest_gaps_RK.gather(1, top_k_R[:, None] - 1).squeeze(1)
    counts_RX = _sums_within_gap_limit(gap_rows, last_gap_R, by_weight=False)
    lists_RK = torch.empty(num_rows, max_top_k, dtype=torch.int64, device=near_blocks_RX.device)
    _make_list[(num_rows,)](
        nearest_gaps_RK,
        top_k_R,
        counts_RX,
        lists_RK,
        max_top_k,
        num_vocab_blocks,
        PADDED_BLOCKS=_padded_size(num_vocab_blocks),
        PADDED_TOP_K=triton.next_power_of_2(max(max_top_k, MAX_LISTED_TOP_K)),
    )
    return lists_RK


def gap_limits_from_lists(
    lists_NRK: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_gap_limit_R: Tensor
) -> tuple[Tensor, Tensor]:
    num_ranks, num_rows, max_top_k = lists_NRK.shape
    lists_RC = (
        lists_NRK.transpose(0, 1).flatten(1).sort(dim=1).values if num_ranks > 1 else lists_NRK[0]
    )
    gap_limit_R = torch.empty_like(min_p_gap_limit_R)
    kept_weight_NR = torch.empty(num_ranks, num_rows, dtype=torch.int64, device=gap_limit_R.device)
    _gap_limits_from_lists[(num_rows,)](
        lists_NRK,
        lists_RC,
        top_k_R,
        top_p_R,
        min_p_gap_limit_R,
        gap_limit_R,
        kept_weight_NR,
        num_ranks,
        max_top_k,
        PADDED_ENTRIES=_padded_size(num_ranks * max_top_k),
        num_warps=8,
    )
    return gap_limit_R, kept_weight_NR


def gap_histogram(
    gap_rows: GapRows, gap_limit_R: Tensor, prefix_R: Tensor, radix_pass: int, by_weight: bool
) -> Tensor:
    shift, num_bits = RADIX_PASSES[radix_pass]
    num_rows = len(gap_rows.rows_R)
    num_vocab_blocks = gap_rows.block_max_BX.shape[1]
    num_copies = triton.cdiv(_NUM_HISTOGRAMS, max(1, num_rows))
    histogram_RSX = torch.zeros(
        num_rows, num_copies, 1 << num_bits, dtype=torch.int64, device=gap_limit_R.device
    )
    _gap_histogram[_grid(num_rows, num_vocab_blocks)](
        gap_rows.logits_BV,
        gap_rows.block_max_BX,
        gap_rows.rows_R,
        gap_rows.max_R,
        gap_rows.temperature_R,
        gap_limit_R,
        prefix_R,
        histogram_RSX,
        gap_rows.logits_BV.shape[1],
        shift,
        num_bits,
        num_copies,
        BY_WEIGHT=by_weight,
        TILE=_BLOCKS_PER_TILE,
    )
    return histogram_RSX.sum(dim=1)


def _grid(num_rows: int, num_vocab_blocks: int) -> tuple[int, int]:
    """(rows, programs that share the tiles of a row)."""
    return num_rows, min(
        triton.cdiv(num_vocab_blocks, _BLOCKS_PER_TILE),
        triton.cdiv(_TARGET_PROGRAMS, max(1, num_rows)),
    )


def _padded_size(length: int) -> int:
    return max(_MIN_PADDED_SIZE, 1 << (length - 1).bit_length())


def _sums_within_gap_limit(gap_rows: GapRows, gap_limit_R: Tensor, by_weight: bool) -> Tensor:
    """Weights within the limit, or how many tokens lie there, by block, int64 [R, X]."""
    num_rows = len(gap_rows.rows_R)
    num_vocab_blocks = gap_rows.block_max_BX.shape[1]
    sums_RX = torch.empty(num_rows, num_vocab_blocks, dtype=torch.int64, device=gap_limit_R.device)
    _block_sums[_grid(num_rows, num_vocab_blocks)](
        gap_rows.logits_BV,
        gap_rows.block_max_BX,
        gap_rows.rows_R,
        gap_rows.max_R,
        gap_rows.temperature_R,
        gap_limit_R,
        sums_RX,
        gap_rows.logits_BV.shape[1],
        BY_WEIGHT=by_weight,
        TILE=_BLOCKS_PER_TILE,
    )
    return sums_RX


# Device functions. Per-row values are views at any offset, and some numbers change from step to
# step: kernels are not specialized on them (`do_not_specialize`).


@triton.jit
def _replace_nan(logits):  # type: ignore[no-untyped-def]
    """Logits as float32, with -infinity for NaN."""
    logits = logits.to(tl.float32)
    return tl.where(logits == logits, logits, -_INFINITY)


@triton.jit
def _gaps(logits, max_logit, temperature):  # type: ignore[no-untyped-def]
    return tl.div_rn(max_logit - logits.to(tl.float32), temperature)


@triton.jit
def _weights(gaps, gap_limit):  # type: ignore[no-untyped-def]
    """The one function from gap to weight; a NaN gap lies within no limit.

    The exponential by Cody and Waite's reduction x = n log 2 + r, then the polynomial of the Cephes
    library's `expf` (Moshier 1989), within 2 units in the last place. The scale 2**(n + 40) is
    exact.
    """
    is_within = (gaps <= gap_limit) & (gaps <= _WEIGHTLESS_GAP)
    x = tl.where(is_within, -gaps, 0.0)
    n = tl.floor(tl.fma(x, _LOG2_E, 0.5))
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, x))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p * r, r, r) + 1.0
    scale = ((n.to(tl.int32) + (127 + 40)) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_within, (p * scale).to(tl.int64), 0)


@triton.jit
def _block_gaps(block_max_X, blocks_X, num_vocab_blocks, max_logit, temperature):  # type: ignore[no-untyped-def]
    """The smallest gap of each block; 0 if it is NaN, since its other gaps may be numbers."""
    gaps_X = _gaps(
        tl.load(block_max_X + blocks_X, mask=blocks_X < num_vocab_blocks, other=-_INFINITY),
        max_logit,
        temperature,
    )
    return tl.where(gaps_X == gaps_X, gaps_X, 0.0)


@triton.jit
def _tile_gaps(logits_V, blocks_X, is_near_X, num_columns, max_logit, temperature):  # type: ignore[no-untyped-def]
    """Gaps of the blocks that are near, [X, C]; NaN for other blocks and beyond the row."""
    columns_XC = blocks_X[:, None] * _BLOCK_COLUMNS + tl.arange(0, _BLOCK_COLUMNS)[None, :]
    mask_XC = is_near_X[:, None] & (columns_XC < num_columns)
    logits_XC = tl.load(logits_V + columns_XC, mask=mask_XC, other=0.0)
    return tl.where(mask_XC, _gaps(logits_XC, max_logit, temperature), float("nan"))


@triton.jit
def _block_maxima(logits_BV, block_max_BX, num_columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    num_vocab_blocks = tl.cdiv(num_columns, _BLOCK_COLUMNS)
    for tile in range(tl.program_id(1), tl.cdiv(num_vocab_blocks, TILE), tl.num_programs(1)):
        blocks_X = tile * TILE + tl.arange(0, TILE)
        columns_XC = blocks_X[:, None] * _BLOCK_COLUMNS + tl.arange(0, _BLOCK_COLUMNS)[None, :]
        logits_XC = tl.load(
            logits_BV + row * num_columns + columns_XC,
            mask=columns_XC < num_columns,
            other=-_INFINITY,
        )
        tl.store(
            block_max_BX + row * num_vocab_blocks + blocks_X,
            tl.max(_replace_nan(logits_XC), 1),
            mask=blocks_X < num_vocab_blocks,
        )


@triton.jit
def _row_best(logits_BV, block_max_BX, max_B, column_B, num_columns, PADDED_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    num_vocab_blocks = tl.cdiv(num_columns, _BLOCK_COLUMNS)
    blocks_X = tl.arange(0, PADDED_BLOCKS)
    block_max_X = tl.load(
        block_max_BX + row * num_vocab_blocks + blocks_X,
        mask=blocks_X < num_vocab_blocks,
        other=-_INFINITY,
    )
    max_logit = tl.max(block_max_X, 0)
    block = tl.min(tl.where(block_max_X == max_logit, blocks_X, PADDED_BLOCKS), 0)
    columns_C = block * _BLOCK_COLUMNS + tl.arange(0, _BLOCK_COLUMNS)
    logits_C = tl.load(
        logits_BV + row * num_columns + columns_C, mask=columns_C < num_columns, other=-_INFINITY
    )
    tl.store(max_B + row, max_logit)
    tl.store(
        column_B + row,
        tl.min(tl.where(_replace_nan(logits_C) == max_logit, columns_C, num_columns), 0),
    )


@triton.jit
def _ordered_bits(bits):  # type: ignore[no-untyped-def]
    """As `kernels.reference.sampling._ordered_bits`."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_rows"])
def _pack_value_and_id(values, ids, packed, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    value = tl.load(values + rows, mask=mask, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(
        packed + rows,
        (_ordered_bits(bits) << 32) + (0x7FFFFFFF - tl.load(ids + rows, mask=mask, other=0)),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _unpack_value_and_id(packed, values, ids, num_rows, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    packed_value = tl.load(packed + rows, mask=mask, other=0)
    tl.store(
        values + rows,
        _ordered_bits(packed_value >> 32).to(tl.int32).to(tl.float32, bitcast=True),
        mask=mask,
    )
    tl.store(ids + rows, 0x7FFFFFFF - (packed_value & 0xFFFFFFFF), mask=mask)


@triton.jit(do_not_specialize=["rows_R", "max_R", "temperature_R", "gap_limit_R"])
def _block_sums(  # type: ignore[no-untyped-def]
    logits_BV,
    block_max_BX,
    rows_R,
    max_R,
    temperature_R,
    gap_limit_R,
    sums_RX,
    num_columns,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_R + r)
    max_logit = tl.load(max_R + r)
    temperature = tl.load(temperature_R + r)
    gap_limit = tl.load(gap_limit_R + r)
    num_vocab_blocks = tl.cdiv(num_columns, _BLOCK_COLUMNS)
    for tile in range(tl.program_id(1), tl.cdiv(num_vocab_blocks, TILE), tl.num_programs(1)):
        blocks_X = tile * TILE + tl.arange(0, TILE)
        is_near_X = (
            _block_gaps(
                block_max_BX + row * num_vocab_blocks,
                blocks_X,
                num_vocab_blocks,
                max_logit,
                temperature,
            )
            <= gap_limit
        )
        sums_X = tl.zeros([TILE], tl.int64)
        if tl.max(is_near_X.to(tl.int32), 0) > 0:
            gaps_XC = _tile_gaps(
                logits_BV + row * num_columns,
                blocks_X,
                is_near_X,
                num_columns,
                max_logit,
                temperature,
            )
            amounts_XC = (
                _weights(gaps_XC, gap_limit) if BY_WEIGHT else (gaps_XC <= gap_limit).to(tl.int64)
            )
            sums_X = tl.sum(amounts_XC, 1)
        tl.store(
            sums_RX + r * num_vocab_blocks + blocks_X, sums_X, mask=blocks_X < num_vocab_blocks
        )


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    """The finalizer of SplitMix64, as `kernels.reference.sampling._mix`; the masks turn arithmetic
    shifts into logical ones.
    """
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit(
    do_not_specialize=["seeds_R", "positions_R", "kept_weight_NR", "num_rows", "num_ranks", "rank"]
)
def _target_weight(  # type: ignore[no-untyped-def]
    seeds_R,
    positions_R,
    kept_weight_NR,
    target_weight_R,
    num_rows,
    num_ranks,
    rank,
    ROWS: tl.constexpr,
):
    """As `kernels.reference.sampling.target_weight`, with `uniform_bits` and `uniform_below`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    start = _mix(tl.load(seeds_R + rows, mask=mask, other=0) + _GOLDEN_GAMMA)
    position = tl.load(positions_R + rows, mask=mask, other=0)
    bits = (_mix(start + (position + 1) * _GOLDEN_GAMMA) >> 2) & 0x3FFFFFFFFFFFFFFF
    total = tl.zeros([ROWS], tl.int64)
    weight_before = tl.zeros([ROWS], tl.int64)
    for peer in range(num_ranks):
        kept_weight = tl.load(kept_weight_NR + peer * num_rows + rows, mask=mask, other=0)
        total += kept_weight
        weight_before += tl.where(peer < rank, kept_weight, 0)
    bits_high, bits_low = bits >> 31, bits & 0x7FFFFFFF
    total_high, total_low = total >> 31, total & 0x7FFFFFFF
    middle = total_high * bits_low + total_low * bits_high + ((total_low * bits_low) >> 31)
    tl.store(
        target_weight_R + rows, total_high * bits_high + (middle >> 31) - weight_before, mask=mask
    )


@triton.jit(
    do_not_specialize=["rows_R", "max_R", "temperature_R", "gap_limit_R", "target_weight_R"]
)
def _pick_column(  # type: ignore[no-untyped-def]
    logits_BV,
    rows_R,
    max_R,
    temperature_R,
    gap_limit_R,
    sums_RX,
    target_weight_R,
    column_R,
    num_columns,
    PADDED_BLOCKS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_R + r)
    max_logit = tl.load(max_R + r)
    temperature = tl.load(temperature_R + r)
    target_weight = tl.load(target_weight_R + r)
    num_vocab_blocks = tl.cdiv(num_columns, _BLOCK_COLUMNS)
    blocks_X = tl.arange(0, PADDED_BLOCKS)
    sums_X = tl.load(
        sums_RX + r * num_vocab_blocks + blocks_X, mask=blocks_X < num_vocab_blocks, other=0
    )
    is_passed_X = tl.cumsum(sums_X, 0) <= target_weight
    block = tl.sum(is_passed_X.to(tl.int32), 0)
    weight_left = target_weight - tl.sum(tl.where(is_passed_X, sums_X, 0), 0)
    columns_C = block * _BLOCK_COLUMNS + tl.arange(0, _BLOCK_COLUMNS)
    logits_C = tl.load(
        logits_BV + row * num_columns + columns_C, mask=columns_C < num_columns, other=-_INFINITY
    )
    weights_C = _weights(_gaps(logits_C, max_logit, temperature), tl.load(gap_limit_R + r))
    place_in_block = tl.sum((tl.cumsum(weights_C, 0) <= weight_left).to(tl.int32), 0)
    in_shard = (target_weight >= 0) & (target_weight < tl.sum(sums_X, 0))
    tl.store(
        column_R + r, tl.where(in_shard, block * _BLOCK_COLUMNS + place_in_block, -1).to(tl.int64)
    )


@triton.jit(do_not_specialize=["rows_R", "max_R", "temperature_R", "num_near_blocks"])
def _near_gaps(  # type: ignore[no-untyped-def]
    logits_BV,
    rows_R,
    max_R,
    temperature_R,
    near_blocks_RX,
    gaps_RC,
    num_columns,
    num_near_blocks,
    TILE: tl.constexpr,
):
    """Gaps of the tokens of some blocks per row; infinite for NaN."""
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_R + r)
    max_logit = tl.load(max_R + r)
    temperature = tl.load(temperature_R + r)
    offsets_X = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask_X = offsets_X < num_near_blocks
    blocks_X = tl.load(near_blocks_RX + r * num_near_blocks + offsets_X, mask=mask_X, other=0)
    gaps_XC = _tile_gaps(
        logits_BV + row * num_columns, blocks_X, mask_X, num_columns, max_logit, temperature
    )
    gaps_XC = tl.where(gaps_XC == gaps_XC, gaps_XC, _INFINITY)
    offsets_XC = (r * num_near_blocks + offsets_X)[:, None] * _BLOCK_COLUMNS + tl.arange(
        0, _BLOCK_COLUMNS
    )[None, :]
    tl.store(gaps_RC + offsets_XC, gaps_XC, mask=mask_X[:, None])


@triton.jit(do_not_specialize=["top_k_R", "max_top_k", "num_vocab_blocks"])
def _make_list(  # type: ignore[no-untyped-def]
    nearest_gaps_RK,
    top_k_R,
    counts_RX,
    lists_RK,
    max_top_k,
    num_vocab_blocks,
    PADDED_BLOCKS: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
):
    """Entries of a list from the nearest gaps, and from how many tokens of each block lie within
    the row's last one, of entry k; behind that, entries for no token.
    """
    r = tl.program_id(0).to(tl.int64)
    last_entry = tl.load(top_k_R + r) - 1
    entries_K, blocks_X = tl.arange(0, PADDED_TOP_K), tl.arange(0, PADDED_BLOCKS)
    gaps_K = tl.load(
        nearest_gaps_RK + r * max_top_k + entries_K, mask=entries_K <= last_entry, other=_INFINITY
    )
    bits_K = gaps_K.to(tl.int32, bitcast=True)
    num_within_gap_limit = tl.sum(
        tl.load(
            counts_RX + r * num_vocab_blocks + blocks_X, mask=blocks_X < num_vocab_blocks, other=0
        ),
        0,
    )
    counts_K = tl.where(
        bits_K < _INFINITY_BITS,
        tl.where(entries_K == last_entry, num_within_gap_limit - last_entry, 1),
        0,
    )
    tl.store(
        lists_RK + r * max_top_k + entries_K,
        (bits_K.to(tl.int64) << 32) + counts_K,
        mask=entries_K < max_top_k,
    )


@triton.jit
def _entry_gaps(list_C):  # type: ignore[no-untyped-def]
    return (list_C >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _entry_weights(list_C, gap_limit):  # type: ignore[no-untyped-def]
    return _weights(_entry_gaps(list_C), gap_limit) * list_C.to(tl.int32)


@triton.jit
def _gap_at_target(gaps_C, amounts_C, target):  # type: ignore[no-untyped-def]
    """As `kernels.reference.sampling._gap_at_target`; gaps ascend."""
    return tl.min(tl.where(tl.cumsum(amounts_C, 0) >= target, gaps_C, _INFINITY), 0)


@triton.jit
def _top_p_target(weight, top_p):  # type: ignore[no-untyped-def]
    """As `kernels.reference.sampling.top_p_target`."""
    weight_high, weight_low = weight >> 31, weight & 0x7FFFFFFF
    return tl.maximum(weight_high * top_p * 2 + ((weight_low * top_p + (_TOP_P_ONE - 1)) >> 30), 1)


@triton.jit(
    do_not_specialize=[
        "lists_NRK",
        "lists_RC",
        "top_k_R",
        "top_p_R",
        "min_p_gap_limit_R",
        "num_ranks",
        "max_top_k",
    ]
)
def _gap_limits_from_lists(  # type: ignore[no-untyped-def]
    lists_NRK,
    lists_RC,
    top_k_R,
    top_p_R,
    min_p_gap_limit_R,
    gap_limit_R,
    kept_weight_NR,
    num_ranks,
    max_top_k,
    PADDED_ENTRIES: tl.constexpr,
):
    r, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    top_p = tl.load(top_p_R + r)
    entries_C = tl.arange(0, PADDED_ENTRIES)
    num_entries = num_ranks * max_top_k
    list_C = tl.load(
        lists_RC + r * num_entries + entries_C, mask=entries_C < num_entries, other=_EMPTY_ENTRY
    )
    gaps_C = _entry_gaps(list_C)
    gap_limit = _gap_at_target(gaps_C, list_C.to(tl.int32), tl.load(top_k_R + r))
    weights_C = _entry_weights(list_C, gap_limit)
    top_p_gap_limit = _gap_at_target(gaps_C, weights_C, _top_p_target(tl.sum(weights_C, 0), top_p))
    gap_limit = tl.minimum(gap_limit, tl.where(top_p < _TOP_P_ONE, top_p_gap_limit, _INFINITY))
    gap_limit = tl.minimum(gap_limit, tl.load(min_p_gap_limit_R + r))
    tl.store(gap_limit_R + r, gap_limit)
    for rank in range(num_ranks):
        rank_row = rank * num_rows + r
        list_C = tl.load(
            lists_NRK + rank_row * max_top_k + entries_C,
            mask=entries_C < max_top_k,
            other=_EMPTY_ENTRY,
        )
        tl.store(kept_weight_NR + rank_row, tl.sum(_entry_weights(list_C, gap_limit), 0))


@triton.jit(
    do_not_specialize=[
        "rows_R",
        "max_R",
        "temperature_R",
        "gap_limit_R",
        "prefix_R",
        "shift",
        "num_bits",
        "num_copies",
    ]
)
def _gap_histogram(  # type: ignore[no-untyped-def]
    logits_BV,
    block_max_BX,
    rows_R,
    max_R,
    temperature_R,
    gap_limit_R,
    prefix_R,
    histogram_RSX,
    num_columns,
    shift,
    num_bits,
    num_copies,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_R + r)
    max_logit = tl.load(max_R + r)
    temperature = tl.load(temperature_R + r)
    gap_limit, prefix = tl.load(gap_limit_R + r), tl.load(prefix_R + r)
    histogram_X = histogram_RSX + ((r * num_copies + tl.program_id(1) % num_copies) << num_bits)
    num_vocab_blocks = tl.cdiv(num_columns, _BLOCK_COLUMNS)
    for tile in range(tl.program_id(1), tl.cdiv(num_vocab_blocks, TILE), tl.num_programs(1)):
        blocks_X = tile * TILE + tl.arange(0, TILE)
        nearest_gap_X = _block_gaps(
            block_max_BX + row * num_vocab_blocks,
            blocks_X,
            num_vocab_blocks,
            max_logit,
            temperature,
        )
        gap_prefixes_X = nearest_gap_X.to(tl.int32, bitcast=True) >> (shift + num_bits)
        is_near_X = (nearest_gap_X <= gap_limit) & (gap_prefixes_X <= prefix)
        if tl.max(is_near_X.to(tl.int32), 0) > 0:
            gaps_XC = _tile_gaps(
                logits_BV + row * num_columns,
                blocks_X,
                is_near_X,
                num_columns,
                max_logit,
                temperature,
            )
            gap_prefixes_XC = gaps_XC.to(tl.int32, bitcast=True) >> shift
            is_counted_XC = (gaps_XC <= gap_limit) & ((gap_prefixes_XC >> num_bits) == prefix)
            amounts_XC = _weights(gaps_XC, gap_limit) if BY_WEIGHT else is_counted_XC.to(tl.int64)
            digits_XC = gap_prefixes_XC & ((1 << num_bits) - 1)
            is_counted_XC = is_counted_XC & (amounts_XC > 0)
            tl.atomic_add(histogram_X + digits_XC, amounts_XC, mask=is_counted_XC, sem="relaxed")
