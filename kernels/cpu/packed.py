"""Weights in the layout in which oneDNN has packed them, read by kernels of our own.

A packed weight is panels of 64 output features, [Y / 64, X / lane, 64, lane], where a lane is the 4
bytes of two bfloat16 or four 8-bit numbers; Y is padded with zeros to a multiple of 64, and the
bytes of X to one of 64. oneDNN does not promise that layout, so `packed_address` checks whether a
packed weight has it. A panel is read in chunks, each once from memory and then, for every four
rows, from the first-level cache, while the next one is fetched.

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding as llvm

from kernels.cpu.jit import as_array, inlined_jit

PANEL = 64
ROW_BYTES = 4 * PANEL  # bytes of one row's sums in a panel
_LANE_BYTES = 4
_DOT_BYTES = _LANE_BYTES * PANEL  # what one dot product of every output feature reads
_BLOCK_BYTES = 64
_CHUNK = 32  # dot products: 8 KiB of weights


@functools.cache
def max_rows() -> int:
    """Products of more rows than this are about as fast by oneDNN, or faster. With matrix
    instructions (AMX) oneDNN computes faster, so our kernels pay off only for so few rows that
    memory is the limit.
    """
    return 8 if llvm.get_host_cpu_features().get("amx-bf16") else 96


def packed_address(weight_YX: torch.Tensor, packed_YX: torch.Tensor) -> int | None:
    """Where the elements of a packed weight, bfloat16 or int8, begin, if they lie as described
    above. `weight_YX`: the same weight, not packed.
    """
    (size_out, size_in), item = weight_YX.shape, weight_YX.itemsize
    lane, rows, columns = _LANE_BYTES // item, _padded(size_out, PANEL), row_bytes(size_in * item)
    # The sum of each row of codes follows the codes.
    num_bytes = rows * columns + (0 if weight_YX.dtype is torch.bfloat16 else 4 * rows)
    if size_in % lane or torch.ops.mkldnn._nbytes(packed_YX) != num_bytes:
        return None
    address = _data_pointer(packed_YX)
    if address is None:
        return None
    ours_YX = as_array(weight_YX)
    stored = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * columns)).from_address(address))
    panels = stored.view(ours_YX.dtype).reshape(rows // PANEL, -1, PANEL, lane)
    # The first and the last panel show the order of all of them.
    for panel in {0, len(panels) - 1}:
        ours = ours_YX[panel * PANEL : (panel + 1) * PANEL]
        theirs = panels[panel, : size_in // lane, : len(ours)]
        if not np.array_equal(theirs.transpose(1, 0, 2).reshape(ours.shape), ours):
            return None
    return address


def row_bytes(num_bytes: int) -> int:
    """Bytes that an output feature takes in a panel, from the bytes of its weights."""
    return _padded(num_bytes, _BLOCK_BYTES)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _data_pointer(tensor: torch.Tensor) -> int | None:
    """The address of the data, through torch's C interface, because Python has no access to the
    memory of a packed weight. None if this torch does not have that interface.
    """
    library = _torch_library()
    if not hasattr(torch._C, "_aoti") or not hasattr(library, "aoti_torch_get_data_ptr"):
        return None
    allocate: Any = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    [handle] = allocate([tensor])
    pointer, held = ctypes.c_void_p(), ctypes.c_void_p(_capsule_pointer()(handle, None))
    failed = library.aoti_torch_get_data_ptr(held, ctypes.byref(pointer))
    library.aoti_torch_delete_tensor_object(held)
    if failed or pointer.value is None:
        raise RuntimeError("torch does not say where a packed weight lies")
    return pointer.value


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _capsule_pointer() -> Any:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return function


@inlined_jit
def add_panel(
    add: Callable[..., None], x: int, x_bytes: int, panel: int, sums: int, rows: int, num_dots: int
) -> None:
    """Add a panel's products to `sums`: float32 [rows, 64] of bfloat16 if `add` is `add_rows`,
    int32 of 8-bit numbers if it is `add_int8_rows`. `x_bytes` is the distance between rows of x.
    All arguments but sizes are addresses.
    """
    for first in range(0, num_dots, _CHUNK):
        count = min(_CHUNK, num_dots - first)
        chunk = panel + first * _DOT_BYTES
        ahead = chunk + count * _DOT_BYTES
        at_x = x + _LANE_BYTES * first
        add(at_x, x_bytes, chunk, _DOT_BYTES, sums, ROW_BYTES, rows, count, ahead)
