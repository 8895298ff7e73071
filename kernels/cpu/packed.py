"""Weights in the layout in which oneDNN has packed them, read by kernels of our own.

A packed weight is panels of 64 output features, [Y / 64, X / lane, 64, lane], where a lane is the 4
bytes of two bfloat16 or four 8-bit numbers; Y is padded with zeros to a multiple of 64, and the
bytes of X to one of 64. oneDNN does not promise that layout, so `packed_address` checks whether a
packed weight has it.

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from llvmlite import binding as llvm
from torch import Tensor

from kernels.cpu.jit import as_array
from kernels.cpu.torch_c import data_pointer

PANEL_FEATURES = 64
_LANE_BYTES = 4

_ROW_MULTIPLE_BYTES = 64
_SMALL_PRODUCT = 1 << 27  # multiplications; about 1 ms on one thread


@functools.cache
def max_few_rows(size_in: int, size_out: int) -> int:
    """Products of more rows than this are about as fast by oneDNN, or faster. It needs torch's
    threads, which sleep meanwhile: waking them takes a tenth of a small product. With matrix
    instructions (AMX) oneDNN computes faster, so our kernels pay off only for so few rows that
    memory is the limit.
    """
    if llvm.get_host_cpu_features().get("amx-bf16"):
        return 8
    return max(96, min(256, _SMALL_PRODUCT // (size_in * size_out)))


def packed_address(weight_YX: Tensor, packed_YX: Tensor) -> int | None:
    """Where the elements of a packed weight, bfloat16 or int8, begin, if they lie as described
    above. `weight_YX`: the same weight, not packed.
    """
    (size_out, size_in), element_bytes = weight_YX.shape, weight_YX.itemsize
    elements_per_lane, num_padded_rows = (
        _LANE_BYTES // element_bytes,
        _padded(size_out, PANEL_FEATURES),
    )
    bytes_per_row = row_bytes(size_in * element_bytes)
    # The sum of each row of codes follows the codes.
    num_bytes = num_padded_rows * bytes_per_row + (
        0 if weight_YX.dtype is torch.bfloat16 else 4 * num_padded_rows
    )
    if size_in % elements_per_lane or torch.ops.mkldnn._nbytes(packed_YX) != num_bytes:
        return None
    address = data_pointer(packed_YX)
    if address is None:
        return None
    weight_array_YX = as_array(weight_YX)
    packed_bytes = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (num_padded_rows * bytes_per_row)).from_address(address)
    )
    panels = packed_bytes.view(weight_array_YX.dtype).reshape(
        num_padded_rows // PANEL_FEATURES, -1, PANEL_FEATURES, elements_per_lane
    )
    # The first and the last panel show the order of all of them.
    for panel_index in {0, len(panels) - 1}:
        expected_rows = weight_array_YX[
            panel_index * PANEL_FEATURES : (panel_index + 1) * PANEL_FEATURES
        ]
        packed_rows = panels[panel_index, : size_in // elements_per_lane, : len(expected_rows)]
        if not np.array_equal(
            packed_rows.transpose(1, 0, 2).reshape(expected_rows.shape), expected_rows
        ):
            return None
    return address


def row_bytes(num_bytes: int) -> int:
    """Bytes that an output feature takes in a panel, from the bytes of its weights."""
    return _padded(num_bytes, _ROW_MULTIPLE_BYTES)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
