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

import torch
from torch import Tensor

from kernels.cpu.jit import Array, as_array, exact_entry_jit, exact_jit
from kernels.cpu.panel import CACHED_ROWS, multiply_widened_panel
from kernels.cpu.parallel import parallel_for
from kernels.cpu.recording import contiguous, empty
from kernels.cpu.tile import LANES

PANEL_FEATURES = LANES
_NO_BIAS = torch.empty(0)


class CpuMixedPrecision:
    """`MixedPrecisionKernels` in numba."""

    panel_features = PANEL_FEATURES

    def warmup_calls(self) -> list[Callable[[], object]]:
        """Packing, and a product."""
        weight = torch.zeros(PANEL_FEATURES, 1, dtype=torch.bfloat16)
        return [
            partial(self.linear, torch.zeros(1, 1), self.pack_weight(weight), PANEL_FEATURES, None)
        ]

    def pack_weight(self, weight_YX: Tensor, /) -> Tensor:
        size_out, size_in = weight_YX.shape
        panels_NXP = weight_YX.view(size_out // PANEL_FEATURES, size_in, PANEL_FEATURES)
        transpose_panels(as_array(panels_NXP))
        return panels_NXP

    def rows(self, panels_NXP: Tensor, ids_T: Tensor, /) -> Tensor:
        return panels_NXP[ids_T // PANEL_FEATURES, :, ids_T % PANEL_FEATURES].to(torch.float32)

    def linear(
        self, x_TX: Tensor, panels_NXP: Tensor, size_out: int, bias_Y: Tensor | None, /
    ) -> Tensor:
        out_TY = empty((len(x_TX), size_out), torch.float32)
        x = as_array(contiguous(x_TX))
        panels = as_array(panels_NXP)
        out = as_array(out_TY)
        bias = as_array(_NO_BIAS if bias_Y is None else bias_Y)
        for first_row in range(0, len(x), CACHED_ROWS):
            rows = slice(first_row, first_row + CACHED_ROWS)
            _linear(x[rows], panels, bias, out[rows])
        return out_TY


@exact_jit
def _transpose_panel(panel: int, panels_NXP: Array) -> None:
    size_in, panel_size = panels_NXP.shape[1:]
    panel_rows_PX = panels_NXP[panel].copy().reshape(panel_size, size_in)
    for x in range(size_in):
        for p in range(panel_size):
            panels_NXP[panel, x, p] = panel_rows_PX[p, x]


@exact_entry_jit
def transpose_panels(panels_NXP: Array) -> None:
    """Turn the rows of each panel, [P, X], into its columns, [X, P], in place."""
    parallel_for(len(panels_NXP), _transpose_panel, (panels_NXP,))


@exact_entry_jit
def _linear(x_TX: Array, panels_NXP: Array, bias_Y: Array, out_TY: Array) -> None:
    panel_bytes = panels_NXP.itemsize * panels_NXP.shape[1] * PANEL_FEATURES
    weight = panels_NXP.ctypes.data, panel_bytes, panels_NXP[0, 0, 0]
    arguments = (x_TX, weight, bias_Y, (), out_TY)
    parallel_for(len(panels_NXP), multiply_widened_panel, arguments)
