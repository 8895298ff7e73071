"""Products of few rows with a bfloat16 weight in oneDNN's layout, by dot products of pairs.

For a decode batch, alone or beside a piece of a prompt, oneDNN's own product neither reads at
memory speed nor computes at full speed. This one reads the same packed weight (`packed.py`). Sums
of a row are taken in the same order whatever the number of rows.

Legend: T tokens, X features in, Y features out, P output features of a panel.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.dot_tile import PAIR, add_rows
from kernels.cpu.jit import Array, as_array, exact_entry_jit, exact_jit, narrow, widen
from kernels.cpu.packed import PANEL, add_panel, row_bytes
from kernels.cpu.parallel import parallel_for

_ALIGNMENT = 64


def linear(
    x_TX: torch.Tensor, address: int, size_out: int, bias_Y: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias, [T, Y], fast for T up to `packed.max_rows`; `address` from
    `packed.packed_address`.
    """
    out_TY = torch.empty(len(x_TX), size_out, dtype=torch.bfloat16)
    bias_tensor = _NO_BIAS if bias_Y is None else bias_Y
    row_stride = row_bytes(2 * x_TX.shape[1])
    _linear(
        as_array(x_TX.contiguous()), address, row_stride, as_array(bias_tensor), as_array(out_TY)
    )
    return out_TY


_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


@exact_jit
def _multiply_panel(
    panel: int, x_TX: Array, address: int, row_stride: int, bias_Y: Array, out_TY: Array
) -> None:
    num_rows, size_out = out_TY.shape
    size_in = x_TX.shape[1]
    sums_buffer = np.zeros(num_rows * PANEL + _ALIGNMENT, np.float32)
    num_skipped = (-sums_buffer.ctypes.data // 4) % (_ALIGNMENT // 4)
    sums_TP = sums_buffer[num_skipped : num_skipped + num_rows * PANEL].reshape(num_rows, PANEL)
    panel_address = address + panel * PANEL * row_stride
    x_address, sums_address = np.int64(x_TX.ctypes.data), np.int64(sums_TP.ctypes.data)
    add_panel(
        add_rows, x_address, 2 * size_in, panel_address, sums_address, num_rows, size_in // PAIR
    )
    # Unsigned, because an index that may be negative keeps a loop from being vectorized.
    first_feature = np.uint64(panel * PANEL)
    num_features = min(np.uint64(PANEL), np.uint64(size_out) - first_feature)
    for t in range(num_rows):
        for p in range(num_features):
            value = sums_TP[t, p]
            if len(bias_Y):
                value += widen(bias_Y[first_feature + p])
            out_TY[t, first_feature + p] = narrow(value, out_TY[0, 0])


@exact_entry_jit
def _linear(x_TX: Array, address: int, row_stride: int, bias_Y: Array, out_TY: Array) -> None:
    num_panels = (out_TY.shape[1] + PANEL - 1) // PANEL
    parallel_for(num_panels, _multiply_panel, (x_TX, address, row_stride, bias_Y, out_TY))


def run_once() -> None:
    """Compile the kernel, or load it from the cache."""
    weight = torch.zeros(PANEL, PANEL, dtype=torch.bfloat16)
    linear(weight[:1], weight.data_ptr(), PANEL, None)
