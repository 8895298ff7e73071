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
    bias = _NO_BIAS if bias_Y is None else bias_Y
    stride = row_bytes(2 * x_TX.shape[1])
    _linear(as_array(x_TX.contiguous()), address, stride, as_array(bias), as_array(out_TY))
    return out_TY


_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


@exact_jit
def _multiply_panel(
    panel: int, x_TX: Array, address: int, stride: int, bias_Y: Array, out_TY: Array
) -> None:
    rows, size_out = out_TY.shape
    size_in = x_TX.shape[1]
    room = np.zeros(rows * PANEL + _ALIGNMENT, np.float32)
    skipped = (-room.ctypes.data // 4) % (_ALIGNMENT // 4)
    sums_TP = room[skipped : skipped + rows * PANEL].reshape(rows, PANEL)
    start = address + panel * PANEL * stride
    x, sums = np.int64(x_TX.ctypes.data), np.int64(sums_TP.ctypes.data)
    add_panel(add_rows, x, 2 * size_in, start, sums, rows, size_in // PAIR)
    # Unsigned, because an index that may be negative keeps a loop from being vectorized.
    first = np.uint64(panel * PANEL)
    count = min(np.uint64(PANEL), np.uint64(size_out) - first)
    for t in range(rows):
        for p in range(count):
            value = sums_TP[t, p]
            if len(bias_Y):
                value += widen(bias_Y[first + p])
            out_TY[t, first + p] = narrow(value, out_TY[0, 0])


@exact_entry_jit
def _linear(x_TX: Array, address: int, stride: int, bias_Y: Array, out_TY: Array) -> None:
    num_panels = (out_TY.shape[1] + PANEL - 1) // PANEL
    parallel_for(num_panels, _multiply_panel, (x_TX, address, stride, bias_Y, out_TY))


def run_once() -> None:
    """Compile the kernel, or load it from the cache."""
    weight = torch.zeros(PANEL, PANEL, dtype=torch.bfloat16)
    linear(weight[:1], weight.data_ptr(), PANEL, None)
