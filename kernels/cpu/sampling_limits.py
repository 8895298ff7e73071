"""How far from the best token a token may lie, by lists of the nearest or by histograms, and what a
grammar forbids: compiled parts of `sampling.py`.

A gap is (largest logit of all ranks - logit) / temperature; `prefix_R` is the digits of a gap that
earlier passes found, `top_p_R` in units of 2**-30.
Legend: B rows, R rows of one draw or with a mask, V this rank's columns (tokens of its shard), X
blocks of columns or bins of a histogram, K the largest top-k of a draw, N ranks, W words of a mask,
S parts of a row, each counted by one task.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.jit import Array, bits_of_float, exact_entry_jit, exact_jit, float_of_bits, widen
from kernels.cpu.parallel import parallel_for
from kernels.cpu.sampling_weights import INFINITY, GapArrays, gap_of, weight_of
from kernels.reference.sampling import BLOCK_COLUMNS, TOP_P_ONE

_LOW_31_BITS = (1 << 31) - 1
_LOW_32_BITS = (1 << 32) - 1


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
def _compute_gaps(logits: Array, max_logit: Any, temperature: Any, gaps: Array) -> None:
    for i in range(len(logits)):
        gaps[i] = gap_of(widen(logits[i]), max_logit, temperature)


@exact_jit
def _gaps_within(
    logits: Array, block_gaps: Array, gap_limit: Any, max_logit: Any, temperature: Any
) -> Array:
    """Gaps of every token of the blocks whose nearest token is within the limit."""
    num_near_blocks = 0
    for block in range(len(block_gaps)):
        num_near_blocks += block_gaps[block] <= gap_limit
    gaps = np.empty(BLOCK_COLUMNS * num_near_blocks, np.float32)
    num_gaps = 0
    for block in range(len(block_gaps)):
        if block_gaps[block] <= gap_limit:
            block_logits = logits[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            _compute_gaps(
                block_logits, max_logit, temperature, gaps[num_gaps : num_gaps + len(block_logits)]
            )
            num_gaps += len(block_logits)
    return gaps[:num_gaps]


@exact_jit
def _list_row(r: int, gap_rows: GapArrays, top_k_R: Array, lists_RK: Array) -> None:
    logits_BV, block_max_BX, rows_R, max_R, temperature_R = gap_rows
    logits_V, block_max_X = logits_BV[rows_R[r]], block_max_BX[rows_R[r]]
    max_logit = max_R[r]
    temperature = temperature_R[r]
    top_k = top_k_R[r]
    list_K = lists_RK[r]
    block_gaps = np.empty(len(block_max_X), np.float32)
    _compute_gaps(block_max_X, max_logit, temperature, block_gaps)
    nearest_gaps = np.full(top_k, INFINITY, np.float32)
    _keep_nearest(nearest_gaps, block_gaps)  # at least k blocks have a token within nearest_gaps[0]
    gaps = _gaps_within(logits_V, block_gaps, nearest_gaps[0], max_logit, temperature)
    nearest_gaps[:] = INFINITY
    _keep_nearest(nearest_gaps, gaps)
    _sort_heap(nearest_gaps)
    last_gap = nearest_gaps[top_k - 1]
    for k in range(len(list_K)):
        gap = nearest_gaps[k] if k < top_k else INFINITY
        list_K[k] = (np.int64(bits_of_float(gap)) << 32) + (1 if gap < INFINITY else 0)
    if last_gap < INFINITY:  # further tokens of this shard with the gap of the last entry
        list_K[top_k - 1] += _count_equal(gaps, last_gap) - _count_equal(nearest_gaps, last_gap)


@exact_entry_jit
def list_nearest(gap_rows: GapArrays, top_k_R: Array, lists_RK: Array) -> None:
    parallel_for(len(top_k_R), _list_row, (gap_rows, top_k_R, lists_RK))


@exact_jit
def _gap_of_entry(entry: Any) -> Any:
    """The gap of an entry of `list_nearest`: its bits, and below them how many tokens have it."""
    return float_of_bits(np.uint32(entry >> 32))


@exact_jit
def _top_p_target(weight: Any, top_p: Any) -> Any:
    """As `kernels.reference.sampling.top_p_target`."""
    weight_high, weight_low = weight >> 31, weight & _LOW_31_BITS
    return max(1, weight_high * top_p * 2 + ((weight_low * top_p + (TOP_P_ONE - 1)) >> 30))


@exact_jit
def _gap_limit_of_list(entries: Array, top_k: Any, top_p: Any) -> Any:
    """Limit of top-k, then top-p, from the entries of all ranks, ascending."""
    num_kept_entries, num_tokens, kept_weight = 0, np.int64(0), np.int64(0)
    while num_kept_entries < len(entries) and num_tokens < top_k:
        num_tokens += entries[num_kept_entries] & _LOW_32_BITS
        num_kept_entries += 1
    gap_limit = _gap_of_entry(entries[num_kept_entries - 1]) if num_tokens >= top_k else INFINITY
    while num_kept_entries < len(entries) and _gap_of_entry(entries[num_kept_entries]) <= gap_limit:
        num_kept_entries += 1
    for i in range(num_kept_entries):
        kept_weight += weight_of(_gap_of_entry(entries[i]), gap_limit) * (entries[i] & _LOW_32_BITS)
    if top_p < TOP_P_ONE:
        missing_weight = _top_p_target(kept_weight, top_p)
        for i in range(num_kept_entries):
            missing_weight -= weight_of(_gap_of_entry(entries[i]), gap_limit) * (
                entries[i] & _LOW_32_BITS
            )
            if missing_weight <= 0:
                return _gap_of_entry(entries[i])
    return gap_limit


@exact_entry_jit
def gap_limits_from_lists(
    lists_NRK: Array,
    top_k_R: Array,
    top_p_R: Array,
    min_p_gap_limit_R: Array,
    gap_limit_R: Array,
    kept_weight_NR: Array,
) -> None:
    num_ranks, num_rows, _ = lists_NRK.shape
    for r in range(num_rows):
        entries = lists_NRK[:, r].copy().reshape(-1)
        if num_ranks > 1:
            entries.sort()
        gap_limit_R[r] = min(
            _gap_limit_of_list(entries, top_k_R[r], top_p_R[r]), min_p_gap_limit_R[r]
        )
        for n in range(num_ranks):
            kept_weight_NR[n, r] = 0
            for entry in lists_NRK[n, r]:
                kept_weight_NR[n, r] += weight_of(_gap_of_entry(entry), gap_limit_R[r]) * (
                    entry & _LOW_32_BITS
                )


# Histograms


@exact_jit
def _compact(gaps: Array, gap_limit: Any, prefix: int, prefix_shift: int) -> int:
    """Move the gaps that count to the front, without branches; returns how many there are."""
    num_counted_gaps = 0
    for i in range(len(gaps)):
        gap = gaps[i]
        gaps[num_counted_gaps] = gap
        num_counted_gaps += (gap <= gap_limit) & (
            np.int64(bits_of_float(gap)) >> prefix_shift == prefix
        )
    return num_counted_gaps


@exact_jit
def _compute_weights(gaps: Array, gap_limit: Any, weights: Array) -> None:
    for i in range(len(gaps)):
        weights[i] = weight_of(gaps[i], gap_limit)


@exact_jit
def _count_part(
    task: int,
    gap_rows: GapArrays,
    gap_limit_R: Array,
    prefix_R: Array,
    shift: int,
    num_bits: int,
    by_weight: bool,
    histogram_RSX: Array,
) -> None:
    """Count one part of a row's blocks into its own histogram."""
    logits_BV, block_max_BX, rows_R, max_R, temperature_R = gap_rows
    num_parts, num_bins = histogram_RSX.shape[1:]
    r, part = task // num_parts, task % num_parts
    logits_V, block_max_X = logits_BV[rows_R[r]], block_max_BX[rows_R[r]]
    max_logit = max_R[r]
    temperature = temperature_R[r]
    gap_limit = gap_limit_R[r]
    prefix = prefix_R[r]
    histogram_X = histogram_RSX[r, part]
    num_vocab_blocks = len(block_max_X)
    gaps = np.empty(BLOCK_COLUMNS, np.float32)
    amounts = np.ones(BLOCK_COLUMNS, np.int64)
    for block in range(
        num_vocab_blocks * part // num_parts, num_vocab_blocks * (part + 1) // num_parts
    ):
        nearest_gap = gap_of(block_max_X[block], max_logit, temperature)
        if (
            nearest_gap <= gap_limit
            and np.int64(bits_of_float(nearest_gap)) >> (shift + num_bits) <= prefix
        ):
            logits = logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            _compute_gaps(logits, max_logit, temperature, gaps)
            num_counted_gaps = _compact(gaps[: len(logits)], gap_limit, prefix, shift + num_bits)
            if by_weight:
                _compute_weights(gaps[:num_counted_gaps], gap_limit, amounts)
            for i in range(num_counted_gaps):
                digit = (np.int64(bits_of_float(gaps[i])) >> shift) & (num_bins - 1)
                histogram_X[digit] += amounts[i]


@exact_entry_jit
def gap_histogram(
    gap_rows: GapArrays,
    gap_limit_R: Array,
    prefix_R: Array,
    shift: int,
    num_bits: int,
    by_weight: bool,
    histogram_RSX: Array,
) -> None:
    """Tokens, or their weights, by a digit of their gap: one histogram for each part of a row."""
    num_rows, num_parts, _ = histogram_RSX.shape
    arguments = (gap_rows, gap_limit_R, prefix_R, shift, num_bits, by_weight, histogram_RSX)
    parallel_for(num_rows * num_parts, _count_part, arguments)


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
def mask_columns(
    logits_BV: Array, rows_R: Array, mask_words_RW: Array, first_bit: int, minus_infinity: Any
) -> None:
    """`minus_infinity`: minus infinity, as the logits store it."""
    parallel_for(
        len(rows_R), _mask_row, (logits_BV, rows_R, mask_words_RW, first_bit, minus_infinity)
    )
