"""What torch tells about packed tensors only through its C interface, which it keeps stable for
compiled models: where their data lies, and how to make one of data that is there already.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def data_pointer(tensor: Tensor) -> int | None:
    """The address of the data, because Python has no access to the memory of a packed tensor. None
    if this torch does not have that interface.
    """
    library = _torch_library()
    if not hasattr(torch._C, "_aoti") or not hasattr(library, "aoti_torch_get_data_ptr"):
        return None
    make_handles: Any = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    [capsule] = make_handles([tensor])
    address = ctypes.c_void_p()
    tensor_handle = ctypes.c_void_p(_capsule_functions()[0](capsule, None))
    error_code = library.aoti_torch_get_data_ptr(tensor_handle, ctypes.byref(address))
    library.aoti_torch_delete_tensor_object(tensor_handle)
    if error_code or address.value is None:
        raise RuntimeError("torch does not say where a packed weight lies")
    return address.value


def packed_tensor(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, description: bytes
) -> Tensor:
    """A tensor that oneDNN has packed, whose data lies at `address` as long as the tensor is used.
    description: oneDNN's, of the packing. Raises `OSError` if this torch cannot make one.
    """
    library = _torch_library()
    if not hasattr(torch._C, "_aoti") or not hasattr(
        library, "aoti_torch_create_tensor_from_blob_v2"
    ):
        raise OSError("this torch cannot make a packed tensor of data that is there already")
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    tensor_handle = ctypes.c_void_p()
    error_code = library.aoti_torch_create_tensor_from_blob_v2(
        *(ctypes.c_void_p(address), ctypes.c_int64(len(shape)), sizes),
        *(sizes, ctypes.c_int64(0)),  # strides and offset: a packed tensor has none
        getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")(),
        *(library.aoti_torch_device_type_cpu(), 0, ctypes.byref(tensor_handle)),
        library.aoti_torch_layout__mkldnn(),
        *(description, ctypes.c_int64(len(description))),
    )
    if error_code:
        raise OSError(f"torch makes no packed tensor of {shape} and {dtype} of this data")
    capsule = _capsule_functions()[1](tensor_handle, None, None)
    # Not the function for one tensor, which never lets it be freed.
    make_tensors: Any = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
    [tensor] = make_tensors([capsule])
    assert isinstance(tensor, Tensor)
    return tensor


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _capsule_functions() -> tuple[Any, Any]:
    """Python's functions that take a pointer out of a capsule, and put one into it."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    new_capsule = ctypes.pythonapi.PyCapsule_New
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return pointer_of, new_capsule
