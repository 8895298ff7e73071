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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding as llvm
from torch import Tensor

from kernels.cpu.jit import as_array

PANEL = 64
_LANE_BYTES = 4

_ROW_MULTIPLE_BYTES = 64


@functools.cache
def max_rows() -> int:
    """Products of more rows than this are about as fast by oneDNN, or faster. With matrix
    instructions (AMX) oneDNN computes faster, so our kernels pay off only for so few rows that
    memory is the limit.
    """
    return 8 if llvm.get_host_cpu_features().get("amx-bf16") else 96


def packed_address(weight_YX: Tensor, packed_YX: Tensor) -> int | None:
    """Where the elements of a packed weight, bfloat16 or int8, begin, if they lie as described
    above. `weight_YX`: the same weight, not packed.
    """
    (size_out, size_in), element_bytes = weight_YX.shape, weight_YX.itemsize
    lane_elements, padded_rows = _LANE_BYTES // element_bytes, _padded(size_out, PANEL)
    bytes_per_row = row_bytes(size_in * element_bytes)
    # The sum of each row of codes follows the codes.
    num_bytes = padded_rows * bytes_per_row + (
        0 if weight_YX.dtype is torch.bfloat16 else 4 * padded_rows
    )
    if size_in % lane_elements or torch.ops.mkldnn._nbytes(packed_YX) != num_bytes:
        return None
    address = _data_pointer(packed_YX)
    if address is None:
        return None
    weight_array_YX = as_array(weight_YX)
    packed_bytes = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (padded_rows * bytes_per_row)).from_address(address)
    )
    panels = packed_bytes.view(weight_array_YX.dtype).reshape(
        padded_rows // PANEL, -1, PANEL, lane_elements
    )
    # The first and the last panel show the order of all of them.
    for panel_index in {0, len(panels) - 1}:
        expected_rows = weight_array_YX[panel_index * PANEL : (panel_index + 1) * PANEL]
        packed_rows = panels[panel_index, : size_in // lane_elements, : len(expected_rows)]
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


def _data_pointer(tensor: Tensor) -> int | None:
    """The address of the data, through torch's C interface, because Python has no access to the
    memory of a packed weight. None if this torch does not have that interface.
    """
    library = _torch_library()
    if not hasattr(torch._C, "_aoti") or not hasattr(library, "aoti_torch_get_data_ptr"):
        return None
    make_handles: Any = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    [capsule] = make_handles([tensor])
    data_pointer = ctypes.c_void_p()
    tensor_handle = ctypes.c_void_p(_capsule_pointer()(capsule, None))
    error_code = library.aoti_torch_get_data_ptr(tensor_handle, ctypes.byref(data_pointer))
    library.aoti_torch_delete_tensor_object(tensor_handle)
    if error_code or data_pointer.value is None:
        raise RuntimeError("torch does not say where a packed weight lies")
    return data_pointer.value


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _capsule_pointer() -> Any:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return function
