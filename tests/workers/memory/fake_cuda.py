"""Memory of a GPU without one: `fake_cuda.c` in place of CUDA's driver, and tensors of the host in
place of those that torch would make of its addresses. Weights and KV caches of this process go
there.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.reference.backend import REFERENCE_KERNELS
from tests.workers.fake_gpu import FakeGpu
from workers.memory import cuda_driver

TOTAL_BYTES = 2**34
is_possible = shutil.which("gcc") is not None and hasattr(os, "memfd_create")


@contextmanager
def installed() -> Iterator[None]:
    """Use it in this process, as GPU 0."""
    with (
        mock.patch.object(cuda_driver, "_library", _library),
        mock.patch("workers.memory.gpu._current_device_index", lambda: 0),
        mock.patch("workers.memory.gpu._tensor_at", _host_tensor_at),
        mock.patch("workers.memory.weights.lies_on_gpu", lambda _: True),
        mock.patch("workers.batch.kv_cache.lies_on_gpu", lambda _: True),
        mock.patch("torch.cuda.mem_get_info", lambda: (TOTAL_BYTES, TOTAL_BYTES)),
        mock.patch("torch.cuda.empty_cache", lambda: None),
        mock.patch("torch.cuda.synchronize", lambda: None),
    ):
        yield


@contextmanager
def running_on_fake_gpu() -> Iterator[FakeGpu]:
    """Workers of this process run the reference kernels on one that has such memory."""
    from workers import worker  # here, because an actor sees to what happens before that

    gpu = FakeGpu(total=TOTAL_BYTES, free=TOTAL_BYTES)
    kernels = gpu.recordable(REFERENCE_KERNELS)
    with (
        installed(),
        mock.patch.object(worker, "_launch_test_kernel", lambda *_: None),
        mock.patch.object(worker, "open_device", lambda *_: gpu),
        mock.patch.object(worker, "find_kernels", lambda _: kernels),
    ):
        yield gpu


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("fake_cuda.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libfake_cuda.so"
        command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source]
        subprocess.run([*map(str, command)], check=True)
        return ctypes.CDLL(str(library))


def _host_tensor_at(address: int, num_bytes: int, mapping: Any) -> torch.Tensor:
    array: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    array.mapping = mapping  # as torch keeps the object that it got the memory from
    return torch.frombuffer(array, dtype=torch.uint8)
