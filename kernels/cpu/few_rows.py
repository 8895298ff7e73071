"""Products of few rows with a bfloat16 weight in oneDNN's layout, by dot products of pairs.

For a decode batch oneDNN's own product neither reads at memory speed nor computes at full speed.
This one reads the same packed weight: panels of 64 output features, [Y / 64, X / 2, 64, 2], with Y
padded with zeros to a multiple of 64 and X of 32. That layout is oneDNN's business, so
`packed_address` looks whether a packed weight has it. A panel is read in chunks, each once from
memory and then, for every four rows, from the first-level cache, while the next one is fetched.
Sums of a row are taken in the same order whatever the number of rows.

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding as llvm

from kernels.cpu.dot_tile import PAIR, add_rows
from kernels.cpu.jit import Array, as_array, exact_jit, exact_parallel_jit, narrow, widen

_PANEL, _BLOCK = 64, 32
_PAIR_BYTES = 2 * PAIR * _PANEL  # of one pair of input features in a panel
_CHUNK = 32  # pairs: 8 KiB of weights
_ROW_BYTES = 4 * _PANEL
_ALIGNMENT = 64


@functools.cache
def max_rows() -> int:
    """Products of more rows than this are as fast, or faster, by oneDNN. With matrix instructions
    (AMX) it computes faster, so only what memory bounds is left.
    """
    return 8 if llvm.get_host_cpu_features().get("amx-bf16") else 32


def packed_address(weight_YX: torch.Tensor, packed_YX: torch.Tensor) -> int | None:
    """Where the elements of a packed weight begin, if they lie as this kernel reads them.
    `weight_YX`: the same, not packed.
    """
    size_out, size_in = weight_YX.shape
    rows, columns = _padded(size_out, _PANEL), _padded(size_in, _BLOCK)
    if size_in % PAIR or torch.ops.mkldnn._nbytes(packed_YX) != 2 * rows * columns:
        return None
    address = _data_pointer(packed_YX)
    if address is None:
        return None
    stored = np.ctypeslib.as_array((ctypes.c_uint16 * (rows * columns)).from_address(address))
    panels = stored.reshape(rows // _PANEL, columns // PAIR, _PANEL, PAIR)
    # The first and the last panel show the order of all of them.
    for panel in {0, len(panels) - 1}:
        ours = as_array(weight_YX[panel * _PANEL : (panel + 1) * _PANEL])
        theirs = panels[panel, : size_in // PAIR, : len(ours)]
        if not np.array_equal(theirs.transpose(1, 0, 2).reshape(ours.shape), ours):
            return None
    return address


def linear(
    x_TX: torch.Tensor, address: int, size_out: int, bias_Y: torch.Tensor | None
) -> torch.Tensor:
    """x @ weight.T + bias, [T, Y], fast for T up to `max_rows`; `address` from
    `packed_address`.
    """
    out_TY = torch.empty(len(x_TX), size_out, dtype=torch.bfloat16)
    bias = _NO_BIAS if bias_Y is None else bias_Y
    _linear(as_array(x_TX.contiguous()), address, as_array(bias), as_array(out_TY))
    return out_TY


_NO_BIAS = torch.empty(0, dtype=torch.bfloat16)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _data_pointer(tensor: torch.Tensor) -> int | None:
    """Through torch's C interface: Python has no access to the memory of a packed weight. None if
    this torch does not have that interface.
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


@exact_jit
def _add_panel(x: int, row_bytes: int, panel: int, sums: int, rows: int, num_pairs: int) -> None:
    """Add a panel's products to `sums`, float32 [rows, 64]. All but sizes are addresses."""
    for first in range(0, num_pairs, _CHUNK):
        count = min(_CHUNK, num_pairs - first)
        chunk = panel + first * _PAIR_BYTES
        ahead = chunk + count * _PAIR_BYTES
        at_x = x + 2 * PAIR * first
        add_rows(at_x, row_bytes, chunk, _PAIR_BYTES, sums, _ROW_BYTES, rows, count, ahead)


@exact_parallel_jit
def _linear(x_TX: Array, address: int, bias_Y: Array, out_TY: Array) -> None:
    rows, size_out = out_TY.shape
    size_in = x_TX.shape[1]
    panel_bytes = (size_in + _BLOCK - 1) // _BLOCK * _BLOCK // PAIR * _PAIR_BYTES
    for index in numba.prange((size_out + _PANEL - 1) // _PANEL):
        panel = np.int64(index)
        room = np.zeros(rows * _PANEL + _ALIGNMENT, np.float32)
        skipped = (-room.ctypes.data // 4) % (_ALIGNMENT // 4)
        sums_TP = room[skipped : skipped + rows * _PANEL].reshape(rows, _PANEL)
        start = address + panel * panel_bytes
        _add_panel(x_TX.ctypes.data, 2 * size_in, start, sums_TP.ctypes.data, rows, size_in // PAIR)
        first = panel * _PANEL
        count = min(_PANEL, size_out - first)
        if len(bias_Y):
            for t in range(rows):
                for y in range(count):
                    sums_TP[t, y] += widen(bias_Y[first + y])
        for t in range(rows):
            for y in range(count):
                out_TY[t, first + y] = narrow(sums_TP[t, y], out_TY[0, 0])


def run_once() -> None:
    """Have it compiled, or loaded from the cache."""
    weight = torch.zeros(_PANEL, _PANEL, dtype=torch.bfloat16)
    linear(weight[:1], weight.data_ptr(), _PANEL, None)
