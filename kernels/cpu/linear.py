"""Products with a weight on a CPU, in oneDNN's blocked layout.

Packing once saves oneDNN from reordering the weight at every call, about half the time for a decode
batch. float32 is packed on x86, where the library that torch would use otherwise is two to four
times slower for few rows on processors that are not Intel's. bfloat16 is packed where the processor
has instructions for it. Its products of few rows are our own where the processor and the layout
allow it (`few_rows.py`).
"""

from __future__ import annotations

import functools
import platform
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import few_rows
from kernels.cpu.packed import max_rows, packed_address
from kernels.cpu.pool import leave_cores
from kernels.cpu.tensor_bytes import panel_address, set_panel_address
from kernels.cpu.tile import has_dot_products

# The number of rows for which the layout is chosen; measured to make no difference from 1 to 64.
_ROWS_HINT = 16
# oneDNN adds the products of a row in spans of this many. Where registers hold sixteen floats, it
# adds those of a row that is alone without spans, which rounds differently.
_PRODUCTS_PER_SPAN = 1024


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are packed on this processor."""
    if dtype is torch.float32:
        return torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"
    # Whether oneDNN multiplies in bfloat16 with the processor's own instructions.
    return dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight_YX: Tensor) -> Tensor:
    """The weight as `linear` needs it: a copy in oneDNN's layout, which only `linear` can read, or
    the same tensor.
    """
    if not packs(weight_YX.dtype):
        return weight_YX
    packed_YX = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight_YX, _ROWS_HINT))
    if weight_YX.dtype is torch.bfloat16 and has_dot_products():
        set_panel_address(packed_YX, packed_address(weight_YX, packed_YX))
    return packed_YX


def linear(x_TX: Tensor, packed_YX: Tensor, bias_Y: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [T, Y]. With packed float32 weights, a row has the same bits in any
    batch.
    """
    if not packed_YX.is_mkldnn:
        return functional.linear(x_TX, packed_YX, bias_Y)
    address = panel_address(packed_YX)
    if address is not None and len(x_TX) <= max_rows(x_TX.shape[1], len(packed_YX)):
        return few_rows.linear(x_TX, address, len(packed_YX), bias_Y)
    if len(x_TX) == 1 and x_TX.shape[1] > _PRODUCTS_PER_SPAN and x_TX.dtype is torch.float32:
        # As two rows, which takes as long, since the weight is read once.
        return linear(x_TX.expand(2, -1), packed_YX, bias_Y)[:1]
    leave_cores()
    product = torch.ops.mkldnn._linear_pointwise(x_TX, packed_YX, bias_Y, "none", [], "")
    return cast(Tensor, product)
