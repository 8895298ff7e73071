"""The virtual memory of CUDA: calls of its driver that torch does not show.

Physical memory can be held by an open file, which keeps it alive in whichever process has it open,
and mapped into addresses that were reserved. Source of every call and constant:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import Any

READ, READ_WRITE = 1, 3  # CUmemAccess_flags
_OUT_OF_MEMORY = 2
_PINNED_MEMORY, _ON_DEVICE, _FILE_DESCRIPTOR, _SMALLEST_GRANULARITY = 1, 1, 1, 0


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("device_index", c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_metadata", c_void_p),
        ("compression_type", c_ubyte),
        ("is_gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


def granularity(device_index: int) -> int:
    """Bytes of which every size and address below must be a multiple."""
    size = c_size_t()
    properties = _properties(device_index)
    _call(
        "cuMemGetAllocationGranularity",
        byref(size),
        byref(properties),
        c_int(_SMALLEST_GRANULARITY),
    )
    return size.value


def allocate(num_bytes: int, device_index: int) -> int:
    """A handle of new physical memory of a GPU, of undefined content. `release` it."""
    handle, properties = c_ulonglong(), _properties(device_index)
    _call("cuMemCreate", byref(handle), c_size_t(num_bytes), byref(properties), c_ulonglong(0))
    return handle.value


def export_memory(handle: int) -> int:
    """A file descriptor that keeps the memory, in whichever process has it open."""
    descriptor = c_int(-1)
    _call(
        "cuMemExportToShareableHandle",
        byref(descriptor),
        c_ulonglong(handle),
        c_int(_FILE_DESCRIPTOR),
        c_ulonglong(0),
    )
    os.set_inheritable(descriptor.value, False)  # else a program started meanwhile keeps it
    return descriptor.value


def import_memory(descriptor: int) -> int:
    """A handle of the memory that a file descriptor keeps, which stays open. `release` it."""
    handle = c_ulonglong()
    _call(
        "cuMemImportFromShareableHandle",
        byref(handle),
        c_void_p(descriptor),
        c_int(_FILE_DESCRIPTOR),
    )
    return handle.value


def release(handle: int) -> None:
    """Give up a handle. Memory that is mapped, or kept by a descriptor, stays."""
    _call("cuMemRelease", c_ulonglong(handle))


def reserve(num_bytes: int) -> int:
    """Addresses to which memory can be mapped; returns the first."""
    address = c_ulonglong()
    _call(
        "cuMemAddressReserve",
        byref(address),
        c_size_t(num_bytes),
        c_size_t(0),
        c_ulonglong(0),
        c_ulonglong(0),
    )
    return address.value


def map_memory(handle: int, address: int, num_bytes: int) -> None:
    """Map all of some memory to reserved addresses, from `address` on. It cannot be accessed before
    `allow`.
    """
    _call(
        "cuMemMap",
        c_ulonglong(address),
        c_size_t(num_bytes),
        c_size_t(0),
        c_ulonglong(handle),
        c_ulonglong(0),
    )


def allow(access: int, address: int, num_bytes: int, device_index: int) -> None:
    """Let kernels of this process READ, or READ_WRITE, what is mapped there. One that does anything
    else fails, and with it everything that this process does on the GPU.
    """
    description = _Access(_Location(_ON_DEVICE, device_index), access)
    _call(
        "cuMemSetAccess",
        c_ulonglong(address),
        c_size_t(num_bytes),
        byref(description),
        c_size_t(1),
    )


def unmap(address: int, num_bytes: int) -> None:
    """The addresses remain reserved."""
    _call("cuMemUnmap", c_ulonglong(address), c_size_t(num_bytes))


def free_addresses(address: int, num_bytes: int) -> None:
    """All that `reserve` gave, and nothing is mapped there any more."""
    _call("cuMemAddressFree", c_ulonglong(address), c_size_t(num_bytes))


def _properties(device_index: int) -> _AllocationProperties:
    return _AllocationProperties(
        type=_PINNED_MEMORY,
        handle_types=_FILE_DESCRIPTOR,
        location=_Location(_ON_DEVICE, device_index),
    )


def _call(name: str, *arguments: Any) -> None:
    """Raises `OSError` with what the driver says, ENOMEM where memory is lacking."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        text = c_char_p()
        library.cuGetErrorString(c_int(status), byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        number = errno.ENOMEM if status == _OUT_OF_MEMORY else errno.EIO
        raise OSError(number, f"CUDA driver error: {name}: {reason}")


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises `OSError` where there is no driver."""
    return ctypes.CDLL("libcuda.so.1")
