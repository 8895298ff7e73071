"""Products of few rows with a bfloat16 weight in oneDNN's layout, by dot products of pairs.

For a decode batch, alone or beside a piece of a prompt, oneDNN's own product neither reads at
memory speed nor computes at full speed. This one reads the same packed weight (`packed.py`).

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import Array, as_array, exact_entry_jit
from kernels.cpu.packed import PANEL, row_bytes
from kernels.cpu.panel import multiply_bfloat16_panel
from kernels.cpu.parallel import parallel_for

_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


def linear(x_TX: Tensor, address: int, size_out: int, bias_Y: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [T, Y], fast for T up to `packed.max_rows`; `address` from
    `packed.packed_address`.
    """
    out_TY = torch.empty(len(x_TX), size_out, dtype=torch.bfloat16)
    bias = as_array(_NO_BIAS if bias_Y is None else bias_Y)
    panel_bytes = PANEL * row_bytes(2 * x_TX.shape[1])
    _linear(as_array(x_TX.contiguous()), address, panel_bytes, bias, as_array(out_TY))
    return out_TY


@exact_entry_jit
def _linear(x_TX: Array, address: int, panel_bytes: int, bias_Y: Array, out_TY: Array) -> None:
    arguments = (x_TX, (address, panel_bytes, np.uint16(0)), bias_Y, (), out_TY)
    parallel_for((out_TY.shape[1] + PANEL - 1) // PANEL, multiply_bfloat16_panel, arguments)


def run_once() -> None:
    """Compile the kernel, or load it from the cache."""
    weight = torch.zeros(PANEL, PANEL, dtype=torch.bfloat16)
    linear(weight[:1], weight.data_ptr(), PANEL, None)
