"""Memory of a GPU that outlives the process that made it: it stays while any process has it open.

As `lasting.py`, but with physical memory of CUDA. That cannot grow, so it consists of pieces, each
kept by a file descriptor and mapped behind the one before.
"""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workers.memory import cuda_driver
from workers.memory.descriptors import DescriptorServer, close_all, take_descriptors
from workers.memory.huge_pages import round_up
from workers.parallel.segment import host_id

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryHandle:
    """Where other processes get the memory, as long as this one lives. host: `host_id` of the
    processes that can; address: of a `DescriptorServer`; piece_bytes: of each piece; identity: the
    same for all who have this memory open.
    """

    host: str
    address: str
    piece_bytes: tuple[int, ...]
    identity: int

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(self.piece_bytes)


class SharedGpuMemory:
    """Such memory, open in this process until `close`, or until nobody refers to this object; once
    others have been told where it is, a little longer. It is mapped for the GPU that is current
    when it is made or first used.
    """

    def __init__(
        self, identity: int, piece_bytes: list[int], descriptors: list[int], max_bytes: int
    ) -> None:
        """max_bytes: it never gets longer."""
        self._identity = identity
        self._piece_bytes = piece_bytes
        self._descriptors = descriptors
        self._max_bytes = max_bytes
        self._mapping: _Mapping | None = None
        self._server: DescriptorServer | None = None
        # From then on, this process keeps the memory only as long as a tensor of it.
        self.close = weakref.finalize(self, close_all, descriptors)

    @classmethod
    def create(cls, num_bytes: int, max_bytes: int | None = None) -> SharedGpuMemory:
        """New memory, of undefined content, which this process can write. Raises `OSError`."""
        memory = cls(secrets.randbits(62), [], [], num_bytes if max_bytes is None else max_bytes)
        memory.grow(num_bytes)
        return memory

    @classmethod
    def open(cls, handle: GpuMemoryHandle) -> SharedGpuMemory:
        """The memory of another process, which may end from then on. Raises `OSError` if it is out
        of reach or gone. Needs no GPU.
        """
        if handle.host != host_id():
            raise OSError("it is on another host or in another container")
        descriptors = take_descriptors(handle.address, len(handle.piece_bytes))
        return cls(handle.identity, list(handle.piece_bytes), descriptors, handle.num_bytes)

    @property
    def num_bytes(self) -> int:
        """All that it has, or more than was asked for."""
        return sum(self._piece_bytes)

    @property
    def handle(self) -> GpuMemoryHandle:
        """For others, who have to open it while this process lives. It does not grow afterwards."""
        if self._server is None:
            self._server = DescriptorServer(self._descriptors)
        return GpuMemoryHandle(
            host=host_id(),
            address=self._server.address,
            piece_bytes=tuple(self._piece_bytes),
            identity=self._identity,
        )

    @property
    def address(self) -> int:
        """The first address of all that it has, and of what it will get, in this process."""
        return self._map().address

    def grow(self, num_bytes: int, progress: Progress | None = None) -> None:
        """Make it at least so long; `progress` counts the bytes. Raises as `create`, and then it is
        as long as before.
        """
        assert self._server is None, "others know how long it is"
        missing = num_bytes - self.num_bytes
        if missing <= 0:
            return
        mapping = self._map()
        piece_bytes = round_up(missing, mapping.granularity)
        piece = cuda_driver.allocate(piece_bytes, mapping.device_index)
        try:
            descriptor = cuda_driver.export_memory(piece)
            try:
                mapping.append(piece, piece_bytes, cuda_driver.READ_WRITE)
            except OSError:
                os.close(descriptor)
                raise
        finally:
            cuda_driver.release(piece)
        self._descriptors.append(descriptor)
        self._piece_bytes.append(piece_bytes)
        if progress is not None:
            progress.allocated_bytes += piece_bytes

    def tensor(self, first_byte: int = 0, num_bytes: int | None = None) -> Tensor:
        """These bytes, or all, uint8, shared with every process that has the memory open. Whoever
        has opened it can read them, and write after `allow_writing`. Raises `OSError`.
        """
        mapping = self._map()
        if num_bytes is None:
            num_bytes = self.num_bytes - first_byte
        return _tensor_at(mapping.address + first_byte, num_bytes, mapping)

    def allow_writing(self) -> None:
        """Let this process write, through tensors that are in use too."""
        self._map().allow(cuda_driver.READ_WRITE)

    def forbid_writing(self) -> None:
        """From now on, a kernel of this process that writes to it fails, as all after it. Those
        that write have to be done.
        """
        self._map().allow(cuda_driver.READ)

    def _map(self) -> _Mapping:
        if self._mapping is None:
            mapping = _Mapping(_current_device_index(), self._max_bytes)
            for descriptor, num_bytes in zip(self._descriptors, self._piece_bytes, strict=True):
                piece = cuda_driver.import_memory(descriptor)
                try:
                    mapping.append(piece, num_bytes, cuda_driver.READ)
                finally:
                    cuda_driver.release(piece)
            self._mapping = mapping
        return self._mapping


class _Mapping:
    """Addresses of this process, from `address` on, and what is mapped there until nobody refers to
    this object.
    """

    def __init__(self, device_index: int, max_bytes: int) -> None:
        self.device_index = device_index
        self.granularity = cuda_driver.granularity(device_index)
        self._reserved_bytes = round_up(max_bytes, self.granularity)
        self.address = cuda_driver.reserve(self._reserved_bytes)
        self._pieces: list[tuple[int, int]] = []  # address and number of bytes
        finalizer = weakref.finalize(self, _unmap, self.address, self._reserved_bytes, self._pieces)
        finalizer.atexit = False  # the driver does it, and may be gone by then

    def append(self, piece: int, num_bytes: int, access: int) -> None:
        """Map a piece, given by its handle, behind the others. Raises `OSError`, and then nothing
        has changed.
        """
        start = sum(piece_bytes for _, piece_bytes in self._pieces)
        if start + num_bytes > self._reserved_bytes:
            raise OSError(errno.ENOMEM, f"only {self._reserved_bytes} addresses are reserved")
        address = self.address + start
        cuda_driver.map_memory(piece, address, num_bytes)
        try:
            cuda_driver.allow(access, address, num_bytes, self.device_index)
        except OSError:
            cuda_driver.unmap(address, num_bytes)
            raise
        self._pieces.append((address, num_bytes))

    def allow(self, access: int) -> None:
        """Change what kernels of this process may do with all pieces."""
        for address, num_bytes in self._pieces:
            cuda_driver.allow(access, address, num_bytes, self.device_index)


class _CudaArray:
    """Memory as torch takes it from another library, whose object it keeps:
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, address: int, num_bytes: int, mapping: _Mapping) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def lies_on_gpu(device: torch.device) -> bool:
    """Whether tensors of this device can lie in such memory."""
    return device.type == "cuda"


@contextmanager
def errors_of_torch() -> Iterator[None]:
    """Turns those about a GPU and its memory into `OSError`, so that whoever can do without memory
    that outlives a process goes on.
    """
    import torch  # here, because a process opens memory before it has imported torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OSError(errno.ENOMEM, str(error)) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise OSError(errno.EIO, str(error)) from error


def _current_device_index() -> int:
    import torch

    with errors_of_torch():
        torch.cuda.synchronize()  # makes a context, which calls of the driver need
        return torch.cuda.current_device()


def _tensor_at(address: int, num_bytes: int, mapping: _Mapping) -> Tensor:
    import torch

    device = torch.device("cuda", mapping.device_index)
    with errors_of_torch():
        return torch.as_tensor(_CudaArray(address, num_bytes, mapping), device=device)


def _unmap(address: int, reserved_bytes: int, pieces: list[tuple[int, int]]) -> None:
    """Kernels that use it have run."""
    with suppress(OSError):  # after a fault of the GPU, every call fails
        for piece_address, num_bytes in pieces:
            cuda_driver.unmap(piece_address, num_bytes)
        cuda_driver.free_addresses(address, reserved_bytes)
