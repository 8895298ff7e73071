"""Products of float32 with bfloat16 weights: each weight is widened while it is multiplied with
the first rows, and kept for the other rows.

A processor without instructions for bfloat16 computes in float32; weights held in bfloat16 take
half as many bytes to store and to read, and the results are the same. A weight is panels of 16
output features, [Y / 16, X, 16], in the memory that its rows [Y, X] had. Each sum is taken in one
order, along X, so a row's results do not depend on the other rows or on the number of threads.

Legend: T tokens, X features in, Y features out, P output features of a panel, N panels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kernels.cpu.jit import Array, as_array, exact_entry_jit, exact_jit
from kernels.cpu.matmul_tile import LANES, add_panel_product, has_wide_registers
from kernels.cpu.parallel import parallel_for

PANEL = LANES
_WEIGHT_BYTES, _FLOAT_BYTES = 2, 4  # bytes of a weight, and of everything else
# Weights of an output feature that are read at a time: 8 KiB of a panel, 16 widened.
_WEIGHTS_PER_CHUNK = 256
_CACHED_ROWS = 256  # rows of x that stay in the second-level cache from panel to panel
# Products added in one sum; longer rows add several such sums, which is more accurate.
_PRODUCTS_PER_SPAN = 1024
# Rows of a tile. Six times two registers of sums, two of weights and one of x fill a register file
# of sixteen; where one register holds a panel, eight sums keep two multipliers busy.
_MAX_HEIGHT = 8 if has_wide_registers() else 6
# The fewest rows of the first one, and of the others, of several tiles of nearly the same height.
_MIN_FIRST_HEIGHT, _MIN_OTHER_HEIGHT = (_MAX_HEIGHT + 2) // 2, (_MAX_HEIGHT + 1) // 2
_NO_BIAS = torch.empty(0)


class CpuMixed:
    """`MixedKernels` in numba."""

    panel = PANEL

    def first_step(self) -> list[Callable[[], object]]:
        """Packing, and a product."""
        weight = torch.zeros(PANEL, 1, dtype=torch.bfloat16)
        return [partial(self.linear, torch.zeros(1, 1), self.pack_weight(weight), PANEL, None)]

    def pack_weight(self, weight_YX: torch.Tensor, /) -> torch.Tensor:
        """See `MixedKernels`."""
        size_out, size_in = weight_YX.shape
        panels_NXP = weight_YX.view(size_out // PANEL, size_in, PANEL)
        _transpose_panels(as_array(panels_NXP))
        return panels_NXP

    def rows(self, panels_NXP: torch.Tensor, ids_T: torch.Tensor, /) -> torch.Tensor:
        """See `MixedKernels`."""
        return panels_NXP[ids_T // PANEL, :, ids_T % PANEL].to(torch.float32)

    def linear(
        self,
        x_TX: torch.Tensor,
        panels_NXP: torch.Tensor,
        size_out: int,
        bias_Y: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        """See `MixedKernels`."""
        out_TY = torch.empty(len(x_TX), size_out)
        x, panels, out = as_array(x_TX.contiguous()), as_array(panels_NXP), as_array(out_TY)
        bias = as_array(_NO_BIAS if bias_Y is None else bias_Y)
        for first in range(0, len(x), _CACHED_ROWS):
            _linear(
                x[first : first + _CACHED_ROWS], panels, bias, out[first : first + _CACHED_ROWS]
            )
        return out_TY


@exact_jit
def _transpose_panel(panel: int, panels_NXP: Array) -> None:
    size_in, panel_size = panels_NXP.shape[1:]
    panel_rows_PX = panels_NXP[panel].copy().reshape(panel_size, size_in)
    for x in range(size_in):
        for p in range(panel_size):
            panels_NXP[panel, x, p] = panel_rows_PX[p, x]


@exact_entry_jit
def _transpose_panels(panels_NXP: Array) -> None:
    """Transpose the rows of each panel, in place."""
    parallel_for(len(panels_NXP), _transpose_panel, (panels_NXP,))


@exact_jit
def _multiply_panel(
    panel: int, x_TX: Array, panels_NXP: Array, bias_Y: Array, out_TY: Array
) -> None:
    (num_rows, size_in), size_out = x_TX.shape, out_TY.shape[1]
    totals_TP = np.zeros((num_rows, PANEL), np.float32)
    sums_TP = np.empty((num_rows, PANEL), np.float32)
    widened_CP = np.empty((_WEIGHTS_PER_CHUNK, PANEL), np.float32)
    for first_of_span in range(0, size_in, _PRODUCTS_PER_SPAN):
        sums_TP[:] = 0
        for first_of_chunk in range(
            first_of_span, min(first_of_span + _PRODUCTS_PER_SPAN, size_in), _WEIGHTS_PER_CHUNK
        ):
            depth = min(_WEIGHTS_PER_CHUNK, size_in - first_of_chunk)
            x_address = x_TX.ctypes.data + _FLOAT_BYTES * first_of_chunk
            chunk_address = panels_NXP.ctypes.data + _WEIGHT_BYTES * PANEL * (
                panel * size_in + first_of_chunk
            )
            sums_address, widened_address = sums_TP.ctypes.data, widened_CP.ctypes.data
            _add_chunk(
                x_address, size_in, chunk_address, sums_address, num_rows, depth, widened_address
            )
        totals_TP += sums_TP
    # Unsigned, because an index that may be negative keeps a loop from being vectorized.
    first_feature = np.uint64(panel * PANEL)
    num_features = min(np.uint64(PANEL), np.uint64(size_out) - first_feature)
    for t in range(num_rows):
        for p in range(num_features):
            value = totals_TP[t, p]
            if len(bias_Y):
                value += bias_Y[first_feature + p]
            out_TY[t, first_feature + p] = value


@exact_entry_jit
def _linear(x_TX: Array, panels_NXP: Array, bias_Y: Array, out_TY: Array) -> None:
    parallel_for(len(panels_NXP), _multiply_panel, (x_TX, panels_NXP, bias_Y, out_TY))


@exact_jit
def _add_chunk(
    x_address: int,
    size_in: int,
    chunk_address: int,
    sums_address: int,
    num_rows: int,
    depth: int,
    widened_address: int,
) -> None:
    """Add the products with `depth` weights of each output feature of a panel to the sums, [rows,
    PANEL], in tiles of nearly the same height: a low tile has too few sums to keep the multipliers
    busy. The first tile widens the weights, for the others too, to `widened_address`, where there
    is room for the chunk in float32. The chunk that follows is fetched.
    """
    prefetch_address = chunk_address + _WEIGHT_BYTES * PANEL * depth
    like_bfloat16, like_float32 = np.uint16(0), np.float32(0)
    if num_rows <= _MAX_HEIGHT:
        add_panel_product(
            1,
            _MAX_HEIGHT,
            num_rows,
            x_address,
            size_in,
            chunk_address,
            sums_address,
            depth,
            prefetch_address,
            like_bfloat16,
            0,
        )
        return
    num_tiles = (num_rows + _MAX_HEIGHT - 1) // _MAX_HEIGHT
    height = (num_rows + num_tiles - 1) // num_tiles
    add_panel_product(
        _MIN_FIRST_HEIGHT,
        _MAX_HEIGHT,
        height,
        x_address,
        size_in,
        chunk_address,
        sums_address,
        depth,
        prefetch_address,
        like_bfloat16,
        widened_address,
    )
    for num_tiles_left in range(num_tiles - 1, 0, -1):
        num_rows -= height
        x_address += _FLOAT_BYTES * size_in * height
        sums_address += _FLOAT_BYTES * PANEL * height
        height = (num_rows + num_tiles_left - 1) // num_tiles_left
        add_panel_product(
            _MIN_OTHER_HEIGHT,
            _MAX_HEIGHT,
            height,
            x_address,
            size_in,
            widened_address,
            sums_address,
            depth,
            prefetch_address,
            like_float32,
            0,
        )
