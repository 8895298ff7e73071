"""What a rank asks of its device besides arithmetic: asynchronous copies, events, graphs, memory
use.

`Device` is a CPU: copies are the arrays themselves and everything has happened when a call returns.
`CudaDevice` is a GPU: only methods that say so wait for it. Tests use a device of their own, which
records what only a GPU can do. One thread, except that `wait` and `seconds_between` may be called
from another.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.errors import ConfigError, StepTimeoutError
from workers.toolchain import toolchain_problems

Int32Array = npt.NDArray[np.int32]
Array = npt.NDArray[Any]
ByteArray = npt.NDArray[np.uint8]
PutFunction = Callable[[Array], Tensor]
# The parts of one upload start at multiples of 16 bytes: GPU kernels are specialized on that
# alignment.
_ALIGNMENT_BYTES = 16
# Time between checks for completion: far shorter than a step, far longer than a check takes.
_CHECK_PERIOD_S = 5e-5


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""


class Graph(Protocol):
    """Recorded work that can be replayed."""

    def replay(self) -> None:
        """Replay it on the current content of the tensors it was recorded with."""


class StepUploads:
    """What a step needs from the host: `put` all of it, then `send`, then launch the step.

    On a CPU, the arrays themselves.
    """

    def keep(self, array: Array) -> Tensor:
        """A tensor like the array, which has the array's content after each `send`. Every step
        sends the array, so its owner changes it in place. Call this before anything is put.
        """
        return torch.from_numpy(array)

    def put(self, array: Array) -> Tensor:
        """A tensor like the array, valid once sent and until the next step is put."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def send(self) -> None:
        """Copy what is kept, and what was put since the last call."""


class BufferedUploads(StepUploads):
    """Uploads everything in one copy, which `copy(target, fill)` makes: `fill` writes the bytes to
    be copied. `buffer`: bytes on the device, which never move, so a graph may read them; the arrays
    lie there one after another, those that are kept first, then in the order in which they were
    put. An array that is put and does not fit gets a tensor and a copy of its own.
    """

    def __init__(
        self, buffer: Tensor, copy: Callable[[Tensor, Callable[[ByteArray], None]], None]
    ) -> None:
        self.buffer = buffer
        self._copy = copy
        self._kept_arrays: list[tuple[int, Array]] = []
        self._put_arrays: list[tuple[int, Array]] = []
        self._kept_end = self._end = 0

    def keep(self, array: Array) -> Tensor:
        begin, end = self._end, self._end + aligned_bytes(array)
        assert not self._put_arrays and end <= len(self.buffer), (
            "what is kept comes first, and fits"
        )
        self._kept_arrays.append((begin, array))
        self._kept_end = self._end = end
        return _view_as_array(self.buffer, begin, array)

    def put(self, array: Array) -> Tensor:
        array = np.ascontiguousarray(array)
        begin, end = self._end, self._end + aligned_bytes(array)
        if end > len(self.buffer):
            buffer = torch.empty(array.nbytes, dtype=torch.uint8, device=self.buffer.device)
            self._copy(buffer, partial(_fill, [(0, array)]))
            return _view_as_array(buffer, 0, array)
        self._put_arrays.append((begin, array))
        self._end = end
        return _view_as_array(self.buffer, begin, array)

    def send(self) -> None:
        if self._end:
            self._copy(
                self.buffer[: self._end], partial(_fill, self._kept_arrays + self._put_arrays)
            )
        self._put_arrays, self._end = [], self._kept_end


def _view_as_array(buffer: Tensor, begin: int, array: Array) -> Tensor:
    """The bytes of `buffer` from `begin` on as a tensor like the array."""
    dtype = torch.from_numpy(array[:0]).dtype
    return buffer[begin : begin + array.nbytes].view(dtype).view(array.shape)


def _fill(arrays: list[tuple[int, Array]], target: ByteArray) -> None:
    for begin, array in arrays:
        target[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)


def aligned_bytes(array: Array) -> int:
    """Bytes that the array takes in an upload."""
    return -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of device memory: all of it, what is free (whoever holds the rest), and what this
    process's allocator holds.
    """

    total: int
    free: int
    reserved: int


class Device:
    """The processor and its memory."""

    has_graphs = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays on the device, in one copy."""
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def step_uploads(self, num_bytes: int) -> StepUploads:
        """Room for `num_bytes` that each step sends."""
        return StepUploads()

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory, valid after the event that is recorded next."""
        return tensor

    def record_event(self) -> Event | None:
        """The end of what was launched so far; None on a device where everything has run when a
        call returns.
        """
        return None

    def seconds_between(self, first: Event, last: Event) -> float:
        """Seconds of device time between two events that have passed. GPU only."""
        raise NotImplementedError(f"{self.torch_device} has no events")

    def wait(self, event: Event | None, limit_s: float, description: str) -> None:
        """Return when the event has completed. Raises `StepTimeoutError` after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while event is not None and not event.query():
            if time.monotonic() > deadline_s:
                raise StepTimeoutError(
                    f"{description} did not finish on {self.torch_device} within {limit_s:g} s"
                )
            time.sleep(_CHECK_PERIOD_S)

    def capture(self, run: Callable[[], object], pool_graph: Graph | None = None) -> Graph:
        """Record what `run` launches, after running it once. Only where `has_graphs`. Waits for the
        device.

        Intermediate tensors share memory with `pool_graph`: the two graphs never run at the same
        time.
        """
        raise NotImplementedError(f"{self.torch_device} has no graphs")

    def memory(self) -> DeviceMemory:
        """Memory use, after everything launched has run and unused memory has been given back. GPU
        only.
        """
        raise NotImplementedError(f"the memory of {self.torch_device} is not measured")

    def release_unused_memory(self) -> None:
        """Give back what this process's allocator holds and does not use. On a GPU only."""

    def peak_during(self, run: Callable[[], None]) -> int:
        """Peak bytes of tensors while `run` runs, beyond those alive before. GPU only."""
        raise NotImplementedError(f"the memory of {self.torch_device} is not measured")


class CudaDevice(Device):
    """One GPU, which becomes the current device of the thread that creates this object."""

    has_graphs = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        torch.cuda.set_device(torch_device)
        self._capture_stream = torch.cuda.Stream(torch_device)

    def upload(self, *arrays: Array) -> list[Tensor]:
        buffer = torch.empty(
            sum(map(aligned_bytes, arrays)), dtype=torch.uint8, device=self.torch_device
        )
        uploads = BufferedUploads(buffer, self._copy)
        tensors = [uploads.put(array) for array in arrays]
        uploads.send()
        return tensors

    def step_uploads(self, num_bytes: int) -> StepUploads:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        return BufferedUploads(buffer, self._copy)

    def _copy(self, target: Tensor, fill: Callable[[ByteArray], None]) -> None:
        staging = _pinned_tensor(target.shape, torch.uint8)
        fill(staging.numpy())
        target.copy_(staging, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return _pinned_tensor(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def record_event(self) -> Event:
        event: Event = torch.cuda.Event(enable_timing=True)
        event.record()  # type: ignore[attr-defined]
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def capture(self, run: Callable[[], object], pool_graph: Any = None) -> Graph:
        self._capture_stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._capture_stream):
            # compiles kernels, creates handles and connects ranks, none of which may happen during
            # a capture
            run()
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        # Only this thread must not synchronize: NCCL's watchdog queries its events all the time.
        pool = pool_graph.pool() if pool_graph is not None else None
        with torch.cuda.graph(
            graph, pool=pool, stream=self._capture_stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    def release_unused_memory(self) -> None:
        torch.cuda.synchronize(self.torch_device)  # what is collected may be in use until then
        gc.collect()
        torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory:
        self.release_unused_memory()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(
            total=total, free=free, reserved=torch.cuda.memory_reserved(self.torch_device)
        )

    def peak_during(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        bytes_before = torch.cuda.memory_allocated(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - bytes_before


def open_device(kind: str, index: int = 0) -> Device:
    """The device of a rank: "cpu", or "cuda", the GPU of that index among those this process sees.
    Raises `ConfigError` if it sees none, or if kernels cannot be compiled for it.
    """
    if kind != "cuda":
        return Device(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device 'cuda': torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use a GPU"
            " here. Install a torch that fits the machine's driver, or choose the device 'cpu'"
        )
    if problems := toolchain_problems():
        raise ConfigError(f"GPU kernels cannot be compiled here: {'; '.join(problems)}")
    return CudaDevice(torch.device("cuda", index))


def _pinned_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Pinned host memory, which the device can copy asynchronously.

    torch's cache hands memory out again only when the copies that used it have run, so there are as
    many buffers as steps under way.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)
