"""A product of few rows with a weight that is stored in panels, one panel after the other.

A weight is panels of as many output features as a tile has columns (`tile.py`): `few_rows.py`
(bfloat16) and `int8.py` read oneDNN's (`packed.py`), `mixed.py` (float32 with bfloat16) packs its
own. A panel is read in chunks, each once from memory and then, for each tile of rows, from the
first-level cache, while the next one is fetched. Each sum is taken in one order, along X, so a
row's results do not depend on the other rows or on the number of threads.

Legend: T tokens, X features in, Y features out, P output features of a panel, C steps of a chunk
(a step multiplies 4 bytes of each row of x).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.jit import Array, exact_jit, inlined_jit, narrow, widen
from kernels.cpu.parallel import parallel_for
from kernels.cpu.tile import (
    STEP_BYTES,
    VECTOR_BYTES,
    add_64_columns,
    add_tile,
    has_wide_registers,
    loop_over_rows,
)

_CHUNK_BYTES = 8192  # of weights
_ALIGNMENT = 64
# Rows of a tile of 16 columns. Six times two registers of sums, two of weights and one of x fill a
# register file of sixteen; where one register holds a panel, eight sums keep two multipliers busy.
_MAX_HEIGHT = 8 if has_wide_registers() else 6


class Panels(NamedTuple):
    """Where a weight lies, [Y / width, steps, width, what a step multiplies]."""

    address: int
    panel_bytes: int
    step_bytes: int  # of the weights of one step
    width: int  # output features of a panel
    steps_per_span: int  # added in one sum; of several such sums the total is taken
    element: Any  # of the weight; its value does not matter


@inlined_jit
def multiply_panels(
    x_TX: Array, weight: Panels, bias_Y: Array, scales: tuple[Any, ...], out_TY: Array
) -> None:
    """out = x @ weight.T + bias, for a compiled function to call. bias: [Y], or empty.

    x float32 with bfloat16 weights, or both bfloat16: `scales` is empty. x uint8 with int8 weights:
    see `finish_row`.
    """
    num_panels = (out_TY.shape[1] + weight.width - 1) // weight.width
    parallel_for(num_panels, _multiply_panel, (x_TX, weight, bias_Y, scales, out_TY))


@exact_jit
def finish_row(
    t: int,
    sums_P: Array,
    first_feature: int,
    bias_Y: Array,
    scales: tuple[Any, ...],
    out_TY: Array,
) -> None:
    """Scale a row's sums of the output features from `first_feature` on, add the bias and round.

    scales: empty, or (excess_Y, scale_Y, scale_T), with what int32 sums have too much.
    """
    # Unsigned, because an index that may be negative keeps a loop from being vectorized.
    first = np.uint64(first_feature)
    for p in range(min(np.uint64(len(sums_P)), np.uint64(out_TY.shape[1]) - first)):
        value = _scaled(sums_P[p], t, first + p, scales)
        if len(bias_Y):
            value += widen(bias_Y[first + p])
        out_TY[t, first + p] = narrow(value, out_TY[0, 0])


def _scaled(value: Any, t: int, feature: int, scales: tuple[Any, ...]) -> Any:
    """The product, in float32, of a sum."""
    raise NotImplementedError("for compiled code")


@overload(_scaled, inline="always")  # the signatures must match exactly, so none is annotated
def _choose_scaling(value, t, feature, scales):  # type: ignore[no-untyped-def]
    if not len(scales):
        return lambda value, t, feature, scales: value

    if value == types.float32:
        return lambda value, t, feature, scales: value * scales[1][feature] * scales[2][t]
    return lambda value, t, feature, scales: (
        np.float32(value - scales[0][feature]) * scales[1][feature] * scales[2][t]
    )


@exact_jit
def _multiply_panel(
    panel: int, x_TX: Array, weight: Panels, bias_Y: Array, scales: tuple[Any, ...], out_TY: Array
) -> None:
    num_steps = x_TX.shape[1] * x_TX.itemsize // STEP_BYTES
    panel_address = weight.address + panel * weight.panel_bytes
    total_TP = _zeros(x_TX, weight.width)
    _add_span(x_TX, weight, panel_address, 0, min(weight.steps_per_span, num_steps), total_TP)
    for first_step in range(weight.steps_per_span, num_steps, weight.steps_per_span):
        sums_TP = _zeros(x_TX, weight.width)
        end_step = min(first_step + weight.steps_per_span, num_steps)
        _add_span(x_TX, weight, panel_address, first_step, end_step, sums_TP)
        total_TP += sums_TP
    for t in range(len(x_TX)):
        finish_row(t, total_TP[t], panel * weight.width, bias_Y, scales, out_TY)


def _zeros(x_TX: Array, width: int) -> Array:
    """Sums [T, P], aligned: int32 of 8-bit numbers, float32 of others."""
    raise NotImplementedError("for compiled code")


@overload(_zeros)
def _choose_zeros(x_TX, width):  # type: ignore[no-untyped-def]
    element_type = np.int32 if x_TX.dtype == types.uint8 else np.float32

    def zeros(x_TX, width):  # type: ignore[no-untyped-def]
        size = len(x_TX) * width
        room = np.zeros(size + _ALIGNMENT, element_type)
        num_skipped = (-room.ctypes.data // 4) % (_ALIGNMENT // 4)
        return room[num_skipped : num_skipped + size].reshape(len(x_TX), width)

    return zeros


@exact_jit
def _add_span(
    x_TX: Array,
    weight: Panels,
    panel_address: int,
    first_step: int,
    end_step: int,
    sums_TP: Array,
) -> None:
    """Add the products of some of a panel's steps, chunk by chunk."""
    steps_per_chunk = _CHUNK_BYTES // weight.step_bytes
    widened_CP = np.empty((steps_per_chunk, weight.width), np.float32)
    for first_of_chunk in range(first_step, end_step, steps_per_chunk):
        chunk_address = panel_address + first_of_chunk * weight.step_bytes
        x_address = x_TX.ctypes.data + first_of_chunk * STEP_BYTES
        _add_chunk(
            len(x_TX),
            (x_address, x_TX.shape[1] * x_TX.itemsize, x_TX[0, 0]),
            (chunk_address, weight.step_bytes, weight.element),
            (sums_TP.ctypes.data, STEP_BYTES * weight.width),
            min(steps_per_chunk, end_step - first_of_chunk),
            widened_CP.ctypes.data,
        )


def _add_chunk(
    num_rows: int,
    x: tuple[int, int, Any],
    chunk: tuple[int, int, Any],
    sums: tuple[int, int],
    num_steps: int,
    widened_address: int,
) -> None:
    """Add the products with a chunk of weights, and fetch the one that follows; operands as
    `add_tile`'s. With x in float32, there is room at `widened_address` for the chunk in float32.
    """
    raise NotImplementedError("for compiled code")


@overload(_add_chunk)
def _choose_chunk(num_rows, x, chunk, sums, num_steps, widened_address):  # type: ignore[no-untyped-def]
    return _add_widened_chunk if x[2] == types.float32 else _add_packed_chunk


def _add_packed_chunk(num_rows, x, chunk, sums, num_steps, widened_address):  # type: ignore[no-untyped-def]
    add_64_columns(num_rows, x, chunk, sums, num_steps, chunk[0] + num_steps * chunk[1])


def _add_widened_chunk(num_rows, x, chunk, sums, num_steps, widened_address):  # type: ignore[no-untyped-def]
    """The first tile widens the weights, for the others too."""
    prefetch_address = chunk[0] + num_steps * chunk[1]
    num_tiles = (num_rows + _MAX_HEIGHT - 1) // _MAX_HEIGHT
    height = (num_rows + num_tiles - 1) // num_tiles
    add_tile(
        1,
        _MAX_HEIGHT,
        1,
        height,
        x,
        chunk,
        sums,
        num_steps,
        prefetch_address,
        widened_address,
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
