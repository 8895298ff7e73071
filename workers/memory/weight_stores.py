"""Where weights lie that outlive their rank: in a memory file, or in memory of a GPU.

Legend: B bytes of the memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.tensor_bytes import tensor_bytes
from workers.memory.gpu import SharedGpuMemory, errors_of_torch
from workers.memory.huge_pages import HUGE_PAGE_BYTES, map_aligned, round_up
from workers.memory.inheritance import LastingMemory
from workers.memory.lasting import SharedMemfd, physical_bytes
from workers.progress import Progress

# Weights of a GPU are at most so many pieces, each of which is a file descriptor; half of the last
# is wasted.
_MAX_GPU_PIECES = 128
_GPU_ALIGNMENT_BYTES = 512  # as torch allocates, and more than kernels need


class WeightStore(Protocol):
    """New memory that grows. alignment_bytes: tensors begin at multiples of it; address: of the
    memory in this process. Every method raises `OSError`.
    """

    alignment_bytes: int
    address: int

    @property
    def memory(self) -> LastingMemory: ...

    def grow_to(self, num_bytes: int) -> int:
        """Make it at least so long. Returns its length."""

    def write(self, first_byte: int, tensor: Tensor) -> None:
        """Write the bytes of a tensor there."""

    def write_bytes(self, first_byte: int, data: bytes) -> None:
        """Write these bytes there."""

    def bytes_at(self, first_byte: int, num_bytes: int) -> Tensor:
        """A view of what is written, uint8."""

    def seal(self) -> None:
        """Let nobody write from then on."""

    def note_moved(self) -> None:
        """The tensors of a part have moved: what they had is free."""


class HostStore:
    """A memory file."""

    alignment_bytes = mmap.PAGESIZE

    def __init__(self, name: str, progress: Progress) -> None:
        """name: in the kernel's lists, at most 249 bytes."""
        self._progress = progress
        self.memory = SharedMemfd.create(name, HUGE_PAGE_BYTES, progress)
        # The file grows into these addresses, as many as the machine has memory: what is free now
        # grows with each part that moves.
        self._memory_B = _map(self.memory, physical_bytes())
        self.address = self._memory_B.data_ptr()

    def grow_to(self, num_bytes: int) -> int:
        if num_bytes > self.memory.num_bytes:
            rounded_bytes = round_up(num_bytes, HUGE_PAGE_BYTES)
            if rounded_bytes > len(self._memory_B):
                raise OSError(errno.ENOMEM, "the weights are larger than the machine's memory")
            self.memory.grow(rounded_bytes, self._progress)
        return self.memory.num_bytes

    def write(self, first_byte: int, tensor: Tensor) -> None:
        self._write(first_byte, tensor_bytes(tensor))

    def write_bytes(self, first_byte: int, data: bytes) -> None:
        self._write(first_byte, memoryview(data))

    def bytes_at(self, first_byte: int, num_bytes: int) -> Tensor:
        return self._memory_B[first_byte : first_byte + num_bytes]

    def seal(self) -> None:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.memory.descriptor, fcntl.F_ADD_SEALS, seals)
        _touch(self._memory_B[: self.memory.num_bytes])

    def note_moved(self) -> None:
        """Nothing: whoever loads gives freed memory back."""

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self.memory.descriptor, data, offset)
            data, offset = data[written:], offset + written


class GpuStore:
    """Memory of the GPU that is current."""

    alignment_bytes = _GPU_ALIGNMENT_BYTES

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        with errors_of_torch():
            _, total_bytes = torch.cuda.mem_get_info()
        self._piece_bytes = total_bytes // _MAX_GPU_PIECES
        self.memory = SharedGpuMemory.create(0, total_bytes)
        self.address = self.memory.address

    def grow_to(self, num_bytes: int) -> int:
        if num_bytes > self.memory.num_bytes:
            self.memory.grow(round_up(num_bytes, self._piece_bytes), self._progress)
        return self.memory.num_bytes

    def write(self, first_byte: int, tensor: Tensor) -> None:
        memory_B = self.bytes_at(first_byte, tensor.nbytes)
        with errors_of_torch():
            memory_B.copy_(tensor.view(-1).view(torch.uint8))

    def write_bytes(self, first_byte: int, data: bytes) -> None:
        self.write(first_byte, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def bytes_at(self, first_byte: int, num_bytes: int) -> Tensor:
        return self.memory.tensor(first_byte, num_bytes)

    def seal(self) -> None:
        with errors_of_torch():
            torch.cuda.synchronize()  # until what was written is there
        self.memory.forbid_writing()

    def note_moved(self) -> None:
        torch.cuda.empty_cache()


def map_weights(memory: LastingMemory) -> Tensor:
    """All that another process has put there, uint8, for reading only."""
    if isinstance(memory, SharedGpuMemory):
        return memory.tensor()
    memory_B = _map(memory, memory.num_bytes)
    _touch(memory_B)
    return memory_B


def _map(memory: SharedMemfd, num_bytes: int) -> Tensor:
    """So many bytes of the file, uint8, for reading only. A private mapping, because a sealed file
    may have no shared one before Linux 6.7.
    """
    pages = map_aligned(
        memory.descriptor, num_bytes, flags=mmap.MAP_PRIVATE, protection=mmap.PROT_READ
    )
    return torch.frombuffer(pages, dtype=torch.uint8)


def _touch(memory_B: Tensor) -> None:
    """Read a byte of each page, so that no step has to wait until the kernel has mapped it."""
    memory_B[:: mmap.PAGESIZE].sum()
