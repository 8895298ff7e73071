"""Products with a weight on a CPU, in oneDNN's blocked layout.

Packing once saves oneDNN from reordering the weight at every call, about half the time for a decode
batch. float32 is packed on x86, where the library that torch would use otherwise is two to four
times slower for few rows on processors that are not Intel's. bfloat16 is packed where the processor
has instructions for it.

For a decode batch in bfloat16, alone or beside a piece of a prompt, oneDNN's own product neither
reads at memory speed nor computes at full speed. Where the processor and the layout allow it,
`linear_of_few_rows` reads the same packed weight (`packed.py`) instead.

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

import functools
import platform
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.jit import Array, as_array, exact_entry_jit
from kernels.cpu.packed import PANEL_FEATURES, max_few_rows, packed_address, row_bytes
from kernels.cpu.panel import multiply_unwidened_panel
from kernels.cpu.parallel import parallel_for
from kernels.cpu.pool import put_helpers_to_sleep
from kernels.cpu.recording import contiguous, empty, refuse_recording
from kernels.cpu.tensor_bytes import panel_address, set_panel_address
from kernels.cpu.tile import has_dot_products

# The number of rows for which the layout is chosen; measured to make no difference from 1 to 64.
_ROWS_HINT = 16
# oneDNN adds the products of a row in spans of this many. Where registers hold sixteen floats, it
# adds those of a row that is alone without spans, which rounds differently.
_PRODUCTS_PER_SPAN = 1024
_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


@functools.cache
def packs_dtype(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are packed on this processor."""
    if dtype is torch.float32:
        return torch.backends.mkldnn.is_available() and platform.machine() == "x86_64"
    # Whether oneDNN has fast products in bfloat16 for this processor.
    return dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight_YX: Tensor) -> Tensor:
    """The weight as `linear` needs it: a copy in oneDNN's layout, which only `linear` can read, or
    the same tensor.
    """
    if not packs_dtype(weight_YX.dtype):
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
        refuse_recording()
        return functional.linear(x_TX, packed_YX, bias_Y)
    address = panel_address(packed_YX)
    if address is not None and len(x_TX) <= max_few_rows(x_TX.shape[1], len(packed_YX)):
        return linear_of_few_rows(x_TX, address, len(packed_YX), bias_Y)
    if len(x_TX) == 1 and x_TX.shape[1] > _PRODUCTS_PER_SPAN and x_TX.dtype is torch.float32:
        # As two rows, which takes as long, since the weight is read once.
        return linear(x_TX.expand(2, -1), packed_YX, bias_Y)[:1]
    put_helpers_to_sleep()
    refuse_recording()
    product = torch.ops.mkldnn._linear_pointwise(x_TX, packed_YX, bias_Y, "none", [], "")
    return cast(Tensor, product)


def linear_of_few_rows(x_TX: Tensor, address: int, size_out: int, bias_Y: Tensor | None) -> Tensor:
    """x @ weight.T + bias, [T, Y], fast for T up to `packed.max_few_rows`; `address` from
    `packed.packed_address`.
    """
    out_TY = empty((len(x_TX), size_out), torch.bfloat16)
    bias = as_array(_NO_BIAS if bias_Y is None else bias_Y)
    panel_bytes = PANEL_FEATURES * row_bytes(2 * x_TX.shape[1])
    _multiply_few_rows(as_array(contiguous(x_TX)), address, panel_bytes, bias, as_array(out_TY))
    return out_TY


@exact_entry_jit
def _multiply_few_rows(
    x_TX: Array, address: int, panel_bytes: int, bias_Y: Array, out_TY: Array
) -> None:
    arguments = (x_TX, (address, panel_bytes, np.uint16(0)), bias_Y, (), out_TY)
    parallel_for(
        (out_TY.shape[1] + PANEL_FEATURES - 1) // PANEL_FEATURES,
        multiply_unwidened_panel,
        arguments,
    )


def run_once() -> None:
    """Compile the kernel of few rows, or load it from the cache."""
    weight = torch.zeros(PANEL_FEATURES, PANEL_FEATURES, dtype=torch.bfloat16)
    linear_of_few_rows(weight[:1], weight.data_ptr(), PANEL_FEATURES, None)
