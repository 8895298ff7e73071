"""Memory of a GPU without one: `fake_cuda.c` in place of CUDA's driver, and tensors of the host in
place of those that torch would make of its addresses. Weights and KV caches of this process go
there.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from workers.memory import cuda_driver
from workers.memory.gpu import SharedGpuMemory
from workers.memory.weight_stores import GpuStore

TOTAL_BYTES = 2**34


def build(folder: Path) -> str:
    """Compile the library, and return where it is."""
    library = folder / "libfake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True
    )
    return str(library)


@contextmanager
def installed(library: str) -> Iterator[None]:
    """Use it in this process, as GPU 0."""
    cuda_driver._library.cache_clear()
    with (
        mock.patch.object(cuda_driver, "LIBRARY_NAME", library),
        mock.patch("workers.memory.gpu._current_device_index", lambda: 0),
        mock.patch("workers.memory.gpu._tensor_at", _host_tensor_at),
        mock.patch("workers.memory.weights.HostStore", lambda _, progress: GpuStore(progress)),
        mock.patch("workers.batch.kv_cache._lasting_memory", _cache_memory),
        mock.patch("torch.cuda.mem_get_info", lambda: (TOTAL_BYTES, TOTAL_BYTES)),
        mock.patch("torch.cuda.empty_cache", lambda: None),
    ):
        yield
    cuda_driver._library.cache_clear()


def _cache_memory(_: torch.device, num_bytes: int, __: object) -> SharedGpuMemory:
    return SharedGpuMemory.create(num_bytes)


def _host_tensor_at(address: int, num_bytes: int, mapping: Any) -> torch.Tensor:
    array: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    array.mapping = mapping  # as torch keeps the object that it got the memory from
    return torch.frombuffer(array, dtype=torch.uint8)
