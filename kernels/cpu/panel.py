"""A product of few rows with a weight that is stored in panels, one panel after the other.

A weight is panels of as many output features as a tile has columns (`tile.py`): `linear.py`
(bfloat16) and `int8.py` read oneDNN's (`packed.py`), `mixed.py` (float32 with bfloat16) and
`experts.py` pack their own. A panel is read in chunks, each once from memory and then, for each
tile of rows, from the first-level cache, while the next one is fetched. Each sum is taken in one
order, along X, so a row's results do not depend on the other rows or on the number of threads.

Legend: T tokens, X features in, Y features out. A step multiplies 4 bytes of each row of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from kernels.cpu.jit import Array, exact_jit, narrow, widen
from kernels.cpu.tile import (
    LANES,
    STEP_BYTES,
    VECTOR_BYTES,
    add_64_columns,
    add_tile,
    has_wide_registers,
    loop_over_rows,
)

CACHED_ROWS = 256  # rows of x that stay in the second-level cache from panel to panel
_CHUNK_BYTES = 8192  # of weights
# Products of float32 added in one sum; longer rows add several such sums, which is more accurate.
_STEPS_PER_SPAN = 1024
_ALIGNMENT_BYTES = 64
_BFLOAT16_BYTES = 2
# Rows of a tile of 16 columns. Six times two registers of sums, two of weights and one of x fill a
# register file of sixteen; where one register holds a panel, eight sums keep two multipliers busy.
_MAX_HEIGHT = 8 if has_wide_registers() else 6


def _panel_product(
    num_vectors: int, sum_type: type[np.generic], widens: bool
) -> Callable[..., None]:
    """`multiply_panel` for tiles of `num_vectors` * 16 columns and sums of this type; whether the
    weights are widened to float32.
    """
    width = num_vectors * LANES
    step_bytes = width * (_BFLOAT16_BYTES if widens else STEP_BYTES)
    steps_per_chunk = _CHUNK_BYTES // step_bytes

    @exact_jit
    def multiply_panel(
        panel: int,
        x_TX: Array,
        weight: tuple[int, int, Any],
        bias_Y: Array,
        scales: tuple[Array, ...],
        out_TY: Array,
    ) -> None:
        address, panel_bytes, element = weight
        num_rows, x_stride = len(x_TX), x_TX.shape[1] * x_TX.itemsize
        num_steps = x_stride // STEP_BYTES
        sums = np.zeros(num_rows * width + _ALIGNMENT_BYTES, sum_type)
        first_sum_index = -sums.ctypes.data // 4 % (_ALIGNMENT_BYTES // 4)
        sums_operand = sums.ctypes.data + 4 * first_sum_index, 4 * width
        if widens:  # totals of all spans are laid out as the sums of one, though not aligned
            totals, widened = np.zeros_like(sums), np.empty(steps_per_chunk * width, np.float32)
        for first_step in range(0, num_steps, steps_per_chunk):
            end_step = min(first_step + steps_per_chunk, num_steps)
            x = x_TX.ctypes.data + first_step * STEP_BYTES, x_stride, x_TX[0, 0]
            chunk_address = address + panel * panel_bytes + first_step * step_bytes
            chunk = chunk_address, step_bytes, element
            prefetch_address = chunk_address + (end_step - first_step) * step_bytes
            operands = x, chunk, sums_operand, end_step - first_step, prefetch_address
            if widens:
                _add_chunk_product(num_rows, *operands, widened.ctypes.data)
                if end_step == num_steps or end_step % _STEPS_PER_SPAN == 0:
                    for i in range(len(sums)):
                        totals[i] += sums[i]
                        sums[i] = 0
            else:
                add_64_columns(num_rows, *operands)
        if widens:
            sums = totals
        _apply_epilogue(panel * width, sums, first_sum_index, width, bias_Y, scales, out_TY)

    return multiply_panel  # type: ignore[no-any-return]


@exact_jit
def _add_chunk_product(
    num_rows: int,
    x: tuple[int, int, Any],
    chunk: tuple[int, int, Any],
    sums: tuple[int, int],
    num_steps: int,
    prefetch_address: int,
    widened_address: int,
) -> None:
    """Add the products with a chunk of weights; operands as `add_tile`'s. The first tile widens the
    weights, for the others too.
    """
    num_tiles = (num_rows + _MAX_HEIGHT - 1) // _MAX_HEIGHT
    height = (num_rows + num_tiles - 1) // num_tiles
    add_tile(
        1, _MAX_HEIGHT, 1, height, x, chunk, sums, num_steps, prefetch_address, widened_address
    )
    _add_other_rows(
        num_rows - height,
        (x[0] + height * x[1], x[1], x[2]),
        (widened_address, VECTOR_BYTES, np.float32(0)),
        (sums[0] + height * sums[1], sums[1]),
        num_steps,
        prefetch_address,
    )


# Of more than `_MAX_HEIGHT` rows, what is left after the first of several tiles.
_add_other_rows = loop_over_rows((_MAX_HEIGHT + 1) // 2, _MAX_HEIGHT, 1)


def _apply_epilogue(
    first_feature: int,
    sums: Array,
    first_sum_index: int,
    width: int,
    bias_Y: Array,
    scales: tuple[Array, ...],
    out_TY: Array,
) -> None:
    """Scale the sums of `width` output features, those of row t from `first_sum_index` + t *
    `width` on, add the bias and round.
    """
    raise NotImplementedError("for compiled code")


@overload(_apply_epilogue)  # the signatures must match exactly, so none is annotated
def _choose_epilogue(first_feature, sums, first_sum_index, width, bias_Y, scales, out_TY):  # type: ignore[no-untyped-def]
    is_scaled = len(scales) > 0

    def apply_epilogue(first_feature, sums, first_sum_index, width, bias_Y, scales, out_TY):  # type: ignore[no-untyped-def]
        # Unsigned, because an index that may be negative keeps a loop from being vectorized.
        first = np.uint64(first_feature)
        num_features = min(np.uint64(width), np.uint64(out_TY.shape[1]) - first)
        for t in range(len(out_TY)):
            row_start_index = np.uint64(first_sum_index + t * width)
            if is_scaled:
                scale_t = scales[2][t]
            for p in range(num_features):
                value = sums[row_start_index + p]
                if is_scaled:
                    unscaled_sum = np.float32(value - scales[0][first + p])
                    value = unscaled_sum * scales[1][first + p] * scale_t
                if len(bias_Y):
                    value += widen(bias_Y[first + p])
                out_TY[t, first + p] = narrow(value, out_TY[0, 0])

    return apply_epilogue


# Tasks: out = x @ weight.T + bias for one panel, with `weight` as (address, bytes of a panel, an
# element) and the bias [Y] or empty. scales: (excess_Y, scale_Y, scale_T) for 8-bit numbers, with
# what the sums have too much; otherwise empty.
multiply_unwidened_panel = _panel_product(4, np.float32, False)
multiply_int8_panel = _panel_product(4, np.int32, False)
multiply_widened_panel = _panel_product(1, np.float32, True)
