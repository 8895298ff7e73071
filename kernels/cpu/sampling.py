"""Sampling on a CPU: the kernels of `kernels/reference/sampling.py`, each in one pass over the
logits it needs.

bfloat16 logits are read as they are. A block whose largest logit lies beyond a limit is never read:
after `row_best`, most kernels read few blocks. Tasks are runs of blocks, so that one row uses every
thread. Compiled without reassociation or contraction: a gap or a weight has the same bits in a
vector loop, in its tail and alone; sums are integer sums.
Legend: as `kernels/reference/sampling.py`; a block is a row's `BLOCK_COLUMNS` columns, the last one
shorter.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload

from kernels.cpu.jit import (
    Array,
    as_array,
    bits_of_float,
    exact_entry_jit,
    exact_jit,
    exp_nonpositive,
    float_of_bits,
    inlined_jit,
    widen,
)
from kernels.cpu.parallel import parallel_for
from kernels.interface import GapRows
from kernels.reference import sampling
from kernels.reference.sampling import BLOCK_COLUMNS, RADIX_PASSES, TOP_P_ONE, WEIGHT_ONE

_BLOCKS_PER_TASK = 64
_WEIGHTLESS = np.float32(28.0)  # exp(-28) * 2**40 < 1
_INFINITY = np.float32(np.inf)
_ONE = np.float32(WEIGHT_ONE)
_LOW_31 = (1 << 31) - 1
_LOW_32 = (1 << 32) - 1


def row_best(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.reference.sampling.row_best`."""
    num_rows, num_columns = logits_BV.shape
    block_max_BX = torch.empty(num_rows, -(-num_columns // BLOCK_COLUMNS), dtype=torch.float32)
    max_B, column_B = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    _row_best(as_array(logits_BV), block_max_BX.numpy(), max_B.numpy(), column_B.numpy())
    return max_B, column_B, block_max_BX


def block_weights(gaps: GapRows, limit_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.sampling.block_weights`."""
    sums_RX = torch.empty(len(gaps.rows_R), gaps.block_max_BX.shape[1], dtype=torch.int64)
    total_R = torch.empty(len(gaps.rows_R), dtype=torch.int64)
    _block_weights(*_arrays(gaps), limit_R.numpy(), sums_RX.numpy(), total_R.numpy())
    return sums_RX, total_R


def pick_column(
    gaps: GapRows, limit_R: torch.Tensor, sums_RX: torch.Tensor, index_R: torch.Tensor
) -> torch.Tensor:
    """See `kernels.reference.sampling.pick_column`."""
    column_R = torch.empty_like(index_R)
    logits_BV, _, *rows = _arrays(gaps)
    _pick_column(
        logits_BV, *rows, limit_R.numpy(), sums_RX.numpy(), index_R.numpy(), column_R.numpy()
    )
    return column_R


def list_nearest(gaps: GapRows, top_k_R: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """See `kernels.reference.sampling.list_nearest`."""
    list_RK = torch.empty(len(gaps.rows_R), max_top_k, dtype=torch.int64)
    _list_nearest(*_arrays(gaps), top_k_R.numpy(), list_RK.numpy())
    return list_RK


def listed_limits(
    list_NRK: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, max_gap_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.sampling.listed_limits`."""
    limit_R, kept_NR = (
        torch.empty_like(max_gap_R),
        torch.empty(list_NRK.shape[:2], dtype=torch.int64),
    )
    arrays = (
        tensor.numpy() for tensor in (list_NRK, top_k_R, top_p_R, max_gap_R, limit_R, kept_NR)
    )
    _listed_limits(*arrays)
    return limit_R, kept_NR


def gap_histogram(
    gaps: GapRows, limit_R: torch.Tensor, prefix_R: torch.Tensor, radix_pass: int, by_weight: bool
) -> torch.Tensor:
    """See `kernels.reference.sampling.gap_histogram`."""
    shift, num_bits = RADIX_PASSES[radix_pass]
    num_rows = len(gaps.rows_R)
    # One histogram per task; with few rows, each row is split so that every thread has a part.
    num_parts = -(-numba.get_num_threads() // max(1, num_rows))
    histogram_RSX = torch.zeros(num_rows, num_parts, 1 << num_bits, dtype=torch.int64)
    _gap_histogram(
        *_arrays(gaps),
        limit_R.numpy(),
        prefix_R.numpy(),
        shift,
        num_bits,
        by_weight,
        histogram_RSX.numpy(),
    )
    return histogram_RSX.sum(dim=1)


def mask_columns(
    logits_BV: torch.Tensor, rows_R: torch.Tensor, mask_words_RW: torch.Tensor, first_bit: int
) -> None:
    """See `kernels.reference.sampling.mask_columns`."""
    logits = as_array(logits_BV)
    minus_infinity = np.uint16(0xFF80) if logits_BV.dtype is torch.bfloat16 else np.float32(-np.inf)
    _mask_columns(logits, as_array(rows_R), as_array(mask_words_RW), first_bit, minus_infinity)


class CpuSampling:
    """`SamplingKernels` on a CPU."""

    row_best = staticmethod(row_best)
    pack_value_and_id = staticmethod(sampling.pack_value_and_id)
    unpack_value_and_id = staticmethod(sampling.unpack_value_and_id)
    block_weights = staticmethod(block_weights)
    draw_index = staticmethod(sampling.draw_index)
    pick_column = staticmethod(pick_column)
    list_nearest = staticmethod(list_nearest)
    listed_limits = staticmethod(listed_limits)
    gap_histogram = staticmethod(gap_histogram)
    mask_columns = staticmethod(mask_columns)


def run_each_once(dtype: torch.dtype) -> None:
    """Run every kernel on one logit."""
    logits_BV = torch.zeros(1, 1, dtype=dtype)
    max_B, column_B, block_max_BX = row_best(logits_BV)
    gaps = GapRows(
        logits_BV=logits_BV,
        block_max_BX=block_max_BX,
        rows_R=column_B,
        max_R=max_B,
        temperature_R=max_B + 1,
    )
    ones_R = column_B + 1
    limit_R, _ = listed_limits(list_nearest(gaps, ones_R, 1)[None], ones_R, ones_R, max_B)
    gap_histogram(gaps, limit_R, column_B.to(torch.int32), 0, False)
    pick_column(gaps, limit_R, block_weights(gaps, limit_R)[0], column_B)
    if dtype is torch.float32:  # adjusted logits are float32
        mask_columns(logits_BV, column_B, column_B[None].to(torch.int32), 0)


def _arrays(gaps: GapRows) -> tuple[Array, ...]:
    """(logits_BV, block_max_BX, rows_R, max_R, temperature_R)."""
    row_tensors = (gaps.block_max_BX, gaps.rows_R, gaps.max_R, gaps.temperature_R)
    return as_array(gaps.logits_BV), *(tensor.numpy() for tensor in row_tensors)


# The best token. Integers in the order of the floats, because a maximum of floats without rules for
# NaN does not vectorize; for bfloat16 the integers are half as wide.


def _order_key(value: Any) -> Any:
    """A logit as an integer in the same order; NaN is below all others."""
    raise NotImplementedError("for compiled code")


@overload(_order_key)  # the signatures must match exactly, so none is annotated
def _order_key_of(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:

        def of_bfloat16(value):  # type: ignore[no-untyped-def]
            bits = np.int16(value)
            key = np.int16(bits ^ np.int16(np.int16(bits >> np.int16(15)) & np.int16(0x7FFF)))
            return key if key <= np.int16(0x7F80) else np.int16(-0x8000)

        return of_bfloat16

    def of_float32(value):  # type: ignore[no-untyped-def]
        bits = np.int32(bits_of_float(value))
        key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        return key if key <= np.int32(0x7F800000) else np.int32(-0x80000000)

    return of_float32


def _key_value(key: Any) -> Any:
    """The float32 of an order key; -infinity for NaN."""
    raise NotImplementedError("for compiled code")


@overload(_key_value)
def _value_of_key(key):  # type: ignore[no-untyped-def]
    if key == types.int16:

        def of_bfloat16(key):  # type: ignore[no-untyped-def]
            bits = np.int16(key ^ np.int16(np.int16(key >> np.int16(15)) & np.int16(0x7FFF)))
            value = float_of_bits(np.uint32(np.uint16(bits)) << np.uint32(16))
            return value if value >= -_INFINITY else -_INFINITY

        return of_bfloat16

    def of_float32(key):  # type: ignore[no-untyped-def]
        value = float_of_bits(
            np.uint32(key ^ np.int32(np.int32(key >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        )
        return value if value >= -_INFINITY else -_INFINITY

    return of_float32


@inlined_jit
def _num_tasks(num_blocks: int) -> int:
    """Of one row."""
    return (num_blocks + _BLOCKS_PER_TASK - 1) // _BLOCKS_PER_TASK


@inlined_jit
def _row_and_block(task: int, num_blocks: int) -> tuple[int, int]:
    """The row of a task, and the first of its blocks."""
    num_tasks = _num_tasks(num_blocks)
    return task // num_tasks, task % num_tasks * _BLOCKS_PER_TASK


@inlined_jit
def _largest(logits: Array) -> Any:
    """The largest logit of a block, float32."""
    largest = _order_key(logits[0])
    for i in range(len(logits)):
        key = _order_key(logits[i])
        largest = key if key > largest else largest
    return _key_value(largest)


@exact_jit
def _largest_of_blocks(task: int, logits_BV: Array, block_max_BX: Array) -> None:
    """The largest logit of each of `_BLOCKS_PER_TASK` blocks of one row."""
    row, first_block = _row_and_block(task, block_max_BX.shape[1])
    logits_V, block_max_X = logits_BV[row], block_max_BX[row]
    for block in range(first_block, min(first_block + _BLOCKS_PER_TASK, len(block_max_X))):
        block_max_X[block] = _largest(logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS])


@exact_jit
def _best_of_row(logits_V: Array, block_max_X: Array) -> Any:
    """(the largest logit, its first column), from the largest of each block."""
    best_block = 0
    for block in range(len(block_max_X)):
        if block_max_X[block] > block_max_X[best_block]:
            best_block = block
    for column in range(
        best_block * BLOCK_COLUMNS, min((best_block + 1) * BLOCK_COLUMNS, len(logits_V))
    ):
        if widen(logits_V[column]) == block_max_X[best_block]:
            return block_max_X[best_block], column
    return block_max_X[best_block], best_block * BLOCK_COLUMNS


@exact_entry_jit
def _row_best(logits_BV: Array, block_max_BX: Array, max_B: Array, column_B: Array) -> None:
    num_rows, num_blocks = block_max_BX.shape
    parallel_for(num_rows * _num_tasks(num_blocks), _largest_of_blocks, (logits_BV, block_max_BX))
    for row in range(num_rows):
        max_B[row], column_B[row] = _best_of_row(logits_BV[row], block_max_BX[row])


# Weights


@inlined_jit
def _gap(logit: Any, largest: Any, temperature: Any) -> Any:
    return (largest - logit) / temperature


@inlined_jit
def _weight(gap: Any, limit: Any) -> Any:
    """The one function from gap to weight; a NaN gap lies within no limit."""
    weight = np.int64(exp_nonpositive(-gap) * _ONE)
    return weight if gap <= limit else np.int64(0)


@exact_jit
def _sum_of_weights(logits: Array, largest: Any, temperature: Any, limit: Any) -> Any:
    total = np.int64(0)
    for i in range(len(logits)):
        total += _weight(_gap(widen(logits[i]), largest, temperature), limit)
    return total


@exact_jit
def _weights_of_blocks(
    task: int,
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    limit_R: Array,
    sums_RX: Array,
) -> None:
    """The weight of each of `_BLOCKS_PER_TASK` blocks of one row; a block beyond the limit is not
    read.
    """
    r, first_block = _row_and_block(task, sums_RX.shape[1])
    row, sums_X = rows_R[r], sums_RX[r]
    logits_V, block_max_X = logits_BV[row], block_max_BX[row]
    largest, temperature, limit = max_R[r], temperature_R[r], min(limit_R[r], _WEIGHTLESS)
    for block in range(first_block, min(first_block + _BLOCKS_PER_TASK, len(sums_X))):
        sums_X[block] = 0
        if _gap(block_max_X[block], largest, temperature) <= limit:
            logits = logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            sums_X[block] = _sum_of_weights(logits, largest, temperature, limit)


@exact_entry_jit
def _block_weights(
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    limit_R: Array,
    sums_RX: Array,
    total_R: Array,
) -> None:
    num_rows, num_blocks = sums_RX.shape
    parallel_for(
        num_rows * _num_tasks(num_blocks),
        _weights_of_blocks,
        (logits_BV, block_max_BX, rows_R, max_R, temperature_R, limit_R, sums_RX),
    )
    for r in range(num_rows):
        total_R[r] = sums_RX[r].sum()


@exact_entry_jit
def _pick_column(
    logits_BV: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    limit_R: Array,
    sums_RX: Array,
    index_R: Array,
    column_R: Array,
) -> None:
    for r in range(len(rows_R)):
        column_R[r] = -1
        weight_left = index_R[r]
        block = 0
        while weight_left >= 0 and block < sums_RX.shape[1] and weight_left >= sums_RX[r, block]:
            weight_left -= sums_RX[r, block]
            block += 1
        if weight_left < 0 or block == sums_RX.shape[1]:
            continue
        for column in range(
            block * BLOCK_COLUMNS, min((block + 1) * BLOCK_COLUMNS, logits_BV.shape[1])
        ):
            gap = _gap(widen(logits_BV[rows_R[r], column]), max_R[r], temperature_R[r])
            weight_left -= _weight(gap, limit_R[r])
            if weight_left < 0:
                column_R[r] = column
                break


# The nearest tokens


@exact_jit
def _sift_down(heap: Array, gap: Any) -> None:
    """Put `gap` in place of the root of a heap whose root is the largest of all."""
    hole, child = 0, 1
    while child < len(heap):
        if child + 1 < len(heap) and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= gap:
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = gap


@exact_jit
def _keep_nearest(heap: Array, gaps: Array) -> None:
    """Let smaller gaps take the places of the largest ones in `heap`."""
    for i in range(len(gaps)):
        if gaps[i] < heap[0]:
            _sift_down(heap, gaps[i])


@exact_jit
def _sort_heap(heap: Array) -> None:
    """Ascending order, in place. numba's own sort takes seconds to compile."""
    for heap_end in range(len(heap) - 1, 0, -1):
        largest_gap, last_gap = heap[0], heap[heap_end]
        _sift_down(heap[:heap_end], last_gap)
        heap[heap_end] = largest_gap


@exact_jit
def _count_equal(gaps: Array, gap: Any) -> int:
    num_equal = 0
    for i in range(len(gaps)):
        num_equal += gaps[i] == gap
    return num_equal


@exact_jit
def _gaps_of(logits: Array, largest: Any, temperature: Any, gaps: Array) -> None:
    for i in range(len(logits)):
        gaps[i] = _gap(widen(logits[i]), largest, temperature)


@exact_jit
def _gaps_within(
    logits: Array, block_gaps: Array, limit: Any, largest: Any, temperature: Any
) -> Array:
    """Gaps of every token of the blocks whose nearest token is within the limit."""
    num_blocks = 0
    for block in range(len(block_gaps)):
        num_blocks += block_gaps[block] <= limit
    gaps = np.empty(BLOCK_COLUMNS * num_blocks, np.float32)
    num_gaps = 0
    for block in range(len(block_gaps)):
        if block_gaps[block] <= limit:
            block_logits = logits[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            _gaps_of(
                block_logits, largest, temperature, gaps[num_gaps : num_gaps + len(block_logits)]
            )
            num_gaps += len(block_logits)
    return gaps[:num_gaps]


@exact_jit
def _list_row(
    r: int,
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    top_k_R: Array,
    list_RK: Array,
) -> None:
    logits_V, block_max_X = logits_BV[rows_R[r]], block_max_BX[rows_R[r]]
    largest, temperature, top_k, list_K = max_R[r], temperature_R[r], top_k_R[r], list_RK[r]
    block_gaps = np.empty(len(block_max_X), np.float32)
    _gaps_of(block_max_X, largest, temperature, block_gaps)
    nearest_gaps = np.full(top_k, _INFINITY, np.float32)
    _keep_nearest(nearest_gaps, block_gaps)  # at least k blocks have a token within nearest_gaps[0]
    gaps = _gaps_within(logits_V, block_gaps, nearest_gaps[0], largest, temperature)
    nearest_gaps[:] = _INFINITY
    _keep_nearest(nearest_gaps, gaps)
    _sort_heap(nearest_gaps)
    last_gap = nearest_gaps[top_k - 1]
    for k in range(len(list_K)):
        gap = nearest_gaps[k] if k < top_k else _INFINITY
        list_K[k] = (np.int64(bits_of_float(gap)) << 32) + (1 if gap < _INFINITY else 0)
    if last_gap < _INFINITY:
        list_K[top_k - 1] += _count_equal(gaps, last_gap) - _count_equal(nearest_gaps, last_gap)


@exact_entry_jit
def _list_nearest(
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    top_k_R: Array,
    list_RK: Array,
) -> None:
    parallel_for(
        len(rows_R),
        _list_row,
        (logits_BV, block_max_BX, rows_R, max_R, temperature_R, top_k_R, list_RK),
    )


@exact_jit
def _gap_of_entry(entry: Any) -> Any:
    return float_of_bits(np.uint32(entry >> 32))


@exact_jit
def _top_p_target(mass: Any, top_p: Any) -> Any:
    """As `kernels.reference.sampling.top_p_target`."""
    mass_high, mass_low = mass >> 31, mass & _LOW_31
    return max(1, mass_high * top_p * 2 + ((mass_low * top_p + (TOP_P_ONE - 1)) >> 30))


@exact_jit
def _limit_of_list(entries: Array, top_k: Any, top_p: Any) -> Any:
    """Limit of top-k, then top-p, from the entries of all ranks, ascending."""
    num_kept_entries, num_tokens, kept_mass = 0, np.int64(0), np.int64(0)
    while num_kept_entries < len(entries) and num_tokens < top_k:
        num_tokens += entries[num_kept_entries] & _LOW_32
        num_kept_entries += 1
    limit = _gap_of_entry(entries[num_kept_entries - 1]) if num_tokens >= top_k else _INFINITY
    while num_kept_entries < len(entries) and _gap_of_entry(entries[num_kept_entries]) <= limit:
        num_kept_entries += 1
    for i in range(num_kept_entries):
        kept_mass += _weight(_gap_of_entry(entries[i]), limit) * (entries[i] & _LOW_32)
    if top_p < TOP_P_ONE:
        missing_mass = _top_p_target(kept_mass, top_p)
        for i in range(num_kept_entries):
            missing_mass -= _weight(_gap_of_entry(entries[i]), limit) * (entries[i] & _LOW_32)
            if missing_mass <= 0:
                return _gap_of_entry(entries[i])
    return limit


@exact_entry_jit
def _listed_limits(
    list_NRK: Array,
    top_k_R: Array,
    top_p_R: Array,
    max_gap_R: Array,
    limit_R: Array,
    kept_NR: Array,
) -> None:
    num_ranks, num_rows, _ = list_NRK.shape
    for r in range(num_rows):
        entries = list_NRK[:, r].copy().reshape(-1)
        if num_ranks > 1:
            entries.sort()
        limit_R[r] = min(_limit_of_list(entries, top_k_R[r], top_p_R[r]), max_gap_R[r])
        for n in range(num_ranks):
            kept_NR[n, r] = 0
            for entry in list_NRK[n, r]:
                kept_NR[n, r] += _weight(_gap_of_entry(entry), limit_R[r]) * (entry & _LOW_32)


# Histograms


@exact_jit
def _compact(gaps: Array, limit: Any, prefix: int, prefix_shift: int) -> int:
    """Move the gaps that count to the front, without branches; returns how many there are."""
    num_counted = 0
    for i in range(len(gaps)):
        gap = gaps[i]
        gaps[num_counted] = gap
        num_counted += (gap <= limit) & (np.int64(bits_of_float(gap)) >> prefix_shift == prefix)
    return num_counted


@exact_jit
def _weights_of(gaps: Array, limit: Any, weights: Array) -> None:
    for i in range(len(gaps)):
        weights[i] = _weight(gaps[i], limit)


@exact_jit
def _count_part(
    task: int,
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    limit_R: Array,
    prefix_R: Array,
    shift: int,
    num_bits: int,
    by_weight: bool,
    histogram_RSX: Array,
) -> None:
    """Count one part of a row's blocks into its own histogram."""
    num_parts, num_bins = histogram_RSX.shape[1:]
    r, part = task // num_parts, task % num_parts
    logits_V, block_max_X = logits_BV[rows_R[r]], block_max_BX[rows_R[r]]
    largest, temperature, limit, prefix = max_R[r], temperature_R[r], limit_R[r], prefix_R[r]
    histogram_X = histogram_RSX[r, part]
    num_blocks = len(block_max_X)
    gaps, amounts = np.empty(BLOCK_COLUMNS, np.float32), np.ones(BLOCK_COLUMNS, np.int64)
    for block in range(num_blocks * part // num_parts, num_blocks * (part + 1) // num_parts):
        nearest_gap = _gap(block_max_X[block], largest, temperature)
        if (
            nearest_gap <= limit
            and np.int64(bits_of_float(nearest_gap)) >> (shift + num_bits) <= prefix
        ):
            logits = logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            _gaps_of(logits, largest, temperature, gaps)
            num_counted = _compact(gaps[: len(logits)], limit, prefix, shift + num_bits)
            if by_weight:
                _weights_of(gaps[:num_counted], limit, amounts)
            for i in range(num_counted):
                digit = (np.int64(bits_of_float(gaps[i])) >> shift) & (num_bins - 1)
                histogram_X[digit] += amounts[i]


@exact_entry_jit
def _gap_histogram(
    logits_BV: Array,
    block_max_BX: Array,
    rows_R: Array,
    max_R: Array,
    temperature_R: Array,
    limit_R: Array,
    prefix_R: Array,
    shift: int,
    num_bits: int,
    by_weight: bool,
    histogram_RSX: Array,
) -> None:
    num_rows, num_parts, _ = histogram_RSX.shape
    parallel_for(
        num_rows * num_parts,
        _count_part,
        (
            *(logits_BV, block_max_BX, rows_R, max_R, temperature_R, limit_R, prefix_R),
            *(shift, num_bits, by_weight, histogram_RSX),
        ),
    )


@exact_jit
def _mask_row(
    r: int,
    logits_BV: Array,
    rows_R: Array,
    mask_words_RW: Array,
    first_bit: int,
    minus_infinity: Any,
) -> None:
    num_columns = logits_BV.shape[1]
    logits_V, mask_words_W = logits_BV[rows_R[r]], mask_words_RW[r]
    for word_index in range(len(mask_words_W)):
        mask_word = mask_words_W[word_index]
        if mask_word == -1:  # all of them are allowed
            continue
        column = np.int64(32 * word_index - first_bit)
        if column >= 0 and column + 32 <= num_columns:
            for bit in range(32):  # a constant, so that it becomes a few instructions
                logit = logits_V[column + bit]
                logits_V[column + bit] = (
                    logit if (mask_word >> np.int32(bit)) & 1 else minus_infinity
                )
            continue
        for bit in range(max(np.int64(0), -column), min(np.int64(32), num_columns - column)):
            if not (mask_word >> np.int32(bit)) & 1:
                logits_V[column + bit] = minus_infinity


@exact_entry_jit
def _mask_columns(
    logits_BV: Array, rows_R: Array, mask_words_RW: Array, first_bit: int, minus_infinity: Any
) -> None:
    """`minus_infinity`: minus infinity, as the logits store it."""
    parallel_for(
        len(rows_R), _mask_row, (logits_BV, rows_R, mask_words_RW, first_bit, minus_infinity)
    )
