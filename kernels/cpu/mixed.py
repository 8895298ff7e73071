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
_ITEM, _SINGLE = 2, 4  # bytes of a weight, and of everything else
_CHUNK = 256  # weights of an output feature that are read at a time: 8 KiB of a panel, 16 widened
_ROWS = 256  # rows of x that stay in the second-level cache from panel to panel
_SPAN = 1024  # products added in one sum; longer rows add several such sums, which is more accurate
# Rows of a tile. Six times two registers of sums, two of weights and one of x fill a register file
# of sixteen; where one register holds a panel, eight sums keep two multipliers busy.
_TALLEST = 8 if has_wide_registers() else 6
# The fewest rows of the first one, and of the others, of several tiles of nearly the same height.
_FEWEST_FIRST, _FEWEST_OTHER = (_TALLEST + 2) // 2, (_TALLEST + 1) // 2
_NO_BIAS = torch.empty(0)


class CpuMixed:
    """`MixedKernels` in numba."""

    panel = PANEL

    def first_step(self) -> list[Callable[[], object]]:
        """Packing, and a product."""
        weight = torch.zeros(PANEL, 1, dtype=torch.bfloat16)
        return [partial(self.linear, torch.zeros(1, 1), self.pack(weight), PANEL, None)]

    def pack(self, weight_YX: torch.Tensor, /) -> torch.Tensor:
        """See `MixedKernels`."""
        size_out, size_in = weight_YX.shape
        panels_NXP = weight_YX.view(size_out // PANEL, size_in, PANEL)
        _pack(as_array(panels_NXP))
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
        for first in range(0, len(x), _ROWS):
            _linear(x[first : first + _ROWS], panels, bias, out[first : first + _ROWS])
        return out_TY


@exact_jit
def _pack_panel(panel: int, panels_NXP: Array) -> None:
    size_in, size = panels_NXP.shape[1:]
    rows_PX = panels_NXP[panel].copy().reshape(size, size_in)
    for i in range(size_in):
        for p in range(size):
            panels_NXP[panel, i, p] = rows_PX[p, i]


@exact_entry_jit
def _pack(panels_NXP: Array) -> None:
    """Transpose the rows of each panel, in place."""
    parallel_for(len(panels_NXP), _pack_panel, (panels_NXP,))


@exact_jit
def _multiply_panel(
    panel: int, x_TX: Array, panels_NXP: Array, bias_Y: Array, out_TY: Array
) -> None:
    (rows, size_in), size_out = x_TX.shape, out_TY.shape[1]
    totals_TP = np.zeros((rows, PANEL), np.float32)
    sums_TP = np.empty((rows, PANEL), np.float32)
    widened_CP = np.empty((_CHUNK, PANEL), np.float32)
    for first_of_span in range(0, size_in, _SPAN):
        sums_TP[:] = 0
        for first in range(first_of_span, min(first_of_span + _SPAN, size_in), _CHUNK):
            depth = min(_CHUNK, size_in - first)
            x = x_TX.ctypes.data + _SINGLE * first
            chunk = panels_NXP.ctypes.data + _ITEM * PANEL * (panel * size_in + first)
            sums, widened = sums_TP.ctypes.data, widened_CP.ctypes.data
            _add_chunk(x, size_in, chunk, sums, rows, depth, widened)
        totals_TP += sums_TP
    # Unsigned, because an index that may be negative keeps a loop from being vectorized.
    start = np.uint64(panel * PANEL)
    width = min(np.uint64(PANEL), np.uint64(size_out) - start)
    for t in range(rows):
        for p in range(width):
            value = totals_TP[t, p]
            if len(bias_Y):
                value += bias_Y[start + p]
            out_TY[t, start + p] = value


@exact_entry_jit
def _linear(x_TX: Array, panels_NXP: Array, bias_Y: Array, out_TY: Array) -> None:
    parallel_for(len(panels_NXP), _multiply_panel, (x_TX, panels_NXP, bias_Y, out_TY))


@exact_jit
def _add_chunk(
    x: int, size_in: int, chunk: int, sums: int, rows: int, depth: int, widened: int
) -> None:
    """Add the products with `depth` weights of each output feature of a panel to the sums, [rows,
    PANEL], in tiles of nearly the same height: a low tile has too few sums to keep the multipliers
    busy. The first tile widens the weights, for the others too. `x`, `chunk`, `sums` and `widened`,
    which has room for the chunk in float32, are addresses; the chunk that follows is fetched.
    """
    ahead = chunk + _ITEM * PANEL * depth
    half, single = np.uint16(0), np.float32(0)
    if rows <= _TALLEST:
        add_panel_product(1, _TALLEST, rows, x, size_in, chunk, sums, depth, ahead, half, 0)
        return
    tiles = (rows + _TALLEST - 1) // _TALLEST
    height = (rows + tiles - 1) // tiles
    add_panel_product(
        _FEWEST_FIRST, _TALLEST, height, x, size_in, chunk, sums, depth, ahead, half, widened
    )
    for others in range(tiles - 1, 0, -1):
        rows -= height
        x += _SINGLE * size_in * height
        sums += _SINGLE * PANEL * height
        height = (rows + others - 1) // others
        add_panel_product(
            _FEWEST_OTHER, _TALLEST, height, x, size_in, widened, sums, depth, ahead, single, 0
        )
