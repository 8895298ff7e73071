"""The best token, and the weights from which a token is drawn: compiled parts of `sampling.py`.

A gap is (largest logit of all ranks - logit) / temperature, a weight floor(exp(-gap) * 2**40), a
target weight where the drawn token lies in the running sum of this rank's weights.
Legend: B rows, R rows of one draw, V this rank's columns (tokens of its shard), X blocks of
`BLOCK_COLUMNS` of them, the last one shorter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.jit import (
    Array,
    exact_entry_jit,
    exact_jit,
    exp_nonpositive,
    flip_int16,
    float_of_ordered_bits,
    inlined_jit,
    ordered_bits,
    widen,
)
from kernels.cpu.parallel import parallel_for
from kernels.reference.sampling import BLOCK_COLUMNS, WEIGHT_ONE

# (logits_BV, block_max_BX, rows_R, max_R, temperature_R) of `GapRows`
GapArrays = tuple[Array, Array, Array, Array, Array]
INFINITY = np.float32(np.inf)
_BLOCKS_PER_TASK = 64
_WEIGHTLESS_GAP = np.float32(28.0)  # exp(-28) * 2**40 < 1
_WEIGHT_ONE = np.float32(WEIGHT_ONE)


# The best token. Integers in the order of the floats, because a maximum of floats without rules for
# NaN does not vectorize; for bfloat16 the integers are half as wide.


def _order_key(value: Any) -> Any:
    """A logit as an integer in the same order; NaN is below all others."""
    raise NotImplementedError("for compiled code")


@overload(_order_key)  # the signatures must match exactly, so none is annotated
def _choose_order_key(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:

        def bfloat16_key(value):  # type: ignore[no-untyped-def]
            key = flip_int16(np.int16(value))
            return key if key <= np.int16(0x7F80) else np.int16(-0x8000)

        return bfloat16_key

    def float32_key(value):  # type: ignore[no-untyped-def]
        key = ordered_bits(value)
        return key if key <= np.int32(0x7F800000) else np.int32(-0x80000000)

    return float32_key


def _key_value(key: Any) -> Any:
    """The float32 of an order key; -infinity for NaN."""
    raise NotImplementedError("for compiled code")


@overload(_key_value)
def _choose_key_value(key):  # type: ignore[no-untyped-def]
    if key == types.int16:

        def bfloat16_value(key):  # type: ignore[no-untyped-def]
            value = widen(np.uint16(flip_int16(key)))
            return value if value >= -INFINITY else -INFINITY

        return bfloat16_value

    def float32_value(key):  # type: ignore[no-untyped-def]
        value = float_of_ordered_bits(key)
        return value if value >= -INFINITY else -INFINITY

    return float32_value


@inlined_jit
def _num_tasks(num_vocab_blocks: int) -> int:
    """Of one row."""
    return (num_vocab_blocks + _BLOCKS_PER_TASK - 1) // _BLOCKS_PER_TASK


@inlined_jit
def _row_and_block(task: int, num_vocab_blocks: int) -> tuple[int, int]:
    """The row of a task, and the first of its blocks."""
    num_tasks = _num_tasks(num_vocab_blocks)
    return task // num_tasks, task % num_tasks * _BLOCKS_PER_TASK


@inlined_jit
def _max_logit(logits: Array) -> Any:
    """The largest logit of a block, float32."""
    max_key = _order_key(logits[0])
    for i in range(len(logits)):
        key = _order_key(logits[i])
        max_key = key if key > max_key else max_key
    return _key_value(max_key)


@exact_jit
def _fill_block_max(task: int, logits_BV: Array, block_max_BX: Array) -> None:
    """The largest logit of each of `_BLOCKS_PER_TASK` blocks of one row."""
    row, first_block = _row_and_block(task, block_max_BX.shape[1])
    logits_V, block_max_X = logits_BV[row], block_max_BX[row]
    for block in range(first_block, min(first_block + _BLOCKS_PER_TASK, len(block_max_X))):
        block_max_X[block] = _max_logit(
            logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
        )


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
def row_best(logits_BV: Array, block_max_BX: Array, max_B: Array, column_B: Array) -> None:
    num_rows, num_vocab_blocks = block_max_BX.shape
    parallel_for(
        num_rows * _num_tasks(num_vocab_blocks), _fill_block_max, (logits_BV, block_max_BX)
    )
    for row in range(num_rows):
        max_B[row], column_B[row] = _best_of_row(logits_BV[row], block_max_BX[row])


# Weights


@inlined_jit
def gap_of(logit: Any, max_logit: Any, temperature: Any) -> Any:
    """How far a logit lies below the largest one, in units of the temperature."""
    return (max_logit - logit) / temperature


@inlined_jit
def weight_of(gap: Any, gap_limit: Any) -> Any:
    """The one function from gap to weight; a NaN gap lies within no limit."""
    weight = np.int64(exp_nonpositive(-gap) * _WEIGHT_ONE)
    return weight if gap <= gap_limit else np.int64(0)


@exact_jit
def _sum_of_weights(logits: Array, max_logit: Any, temperature: Any, gap_limit: Any) -> Any:
    total = np.int64(0)
    for i in range(len(logits)):
        total += weight_of(gap_of(widen(logits[i]), max_logit, temperature), gap_limit)
    return total


@exact_jit
def _weights_of_blocks(task: int, gap_rows: GapArrays, gap_limit_R: Array, sums_RX: Array) -> None:
    """The weight of each of `_BLOCKS_PER_TASK` blocks of one row; a block beyond the limit is not
    read.
    """
    logits_BV, block_max_BX, rows_R, max_R, temperature_R = gap_rows
    r, first_block = _row_and_block(task, sums_RX.shape[1])
    row, sums_X = rows_R[r], sums_RX[r]
    logits_V, block_max_X = logits_BV[row], block_max_BX[row]
    max_logit = max_R[r]
    temperature = temperature_R[r]
    gap_limit = min(gap_limit_R[r], _WEIGHTLESS_GAP)
    for block in range(first_block, min(first_block + _BLOCKS_PER_TASK, len(sums_X))):
        sums_X[block] = 0
        if gap_of(block_max_X[block], max_logit, temperature) <= gap_limit:
            logits = logits_V[block * BLOCK_COLUMNS : (block + 1) * BLOCK_COLUMNS]
            sums_X[block] = _sum_of_weights(logits, max_logit, temperature, gap_limit)


@exact_entry_jit
def block_weights(gap_rows: GapArrays, gap_limit_R: Array, sums_RX: Array, total_R: Array) -> None:
    num_rows, num_vocab_blocks = sums_RX.shape
    parallel_for(
        num_rows * _num_tasks(num_vocab_blocks),
        _weights_of_blocks,
        (gap_rows, gap_limit_R, sums_RX),
    )
    for r in range(num_rows):
        total_R[r] = sums_RX[r].sum()


@exact_entry_jit
def pick_column(
    gap_rows: GapArrays, gap_limit_R: Array, sums_RX: Array, target_weight_R: Array, column_R: Array
) -> None:
    logits_BV, _, rows_R, max_R, temperature_R = gap_rows
    for r in range(len(rows_R)):
        column_R[r] = -1
        weight_left = target_weight_R[r]
        block = 0
        while weight_left >= 0 and block < sums_RX.shape[1] and weight_left >= sums_RX[r, block]:
            weight_left -= sums_RX[r, block]
            block += 1
        if weight_left < 0 or block == sums_RX.shape[1]:
            continue
        for column in range(
            block * BLOCK_COLUMNS, min((block + 1) * BLOCK_COLUMNS, logits_BV.shape[1])
        ):
            gap = gap_of(widen(logits_BV[rows_R[r], column]), max_R[r], temperature_R[r])
            weight_left -= weight_of(gap, gap_limit_R[r])
            if weight_left < 0:
                column_R[r] = column
                break
