"""The weights of a CPU rank in memory that outlives it, which its standby has open too: two
processes, or more, that hold the same weights once.

The memory is a file (`lasting.py`): each tensor of the model as it is in use, packed or not, from
the first byte of a page on; then the rest of the model, pickled, with numbers instead of tensors;
then the number of bytes of that. Every process maps the tensors for reading only, and the file is
sealed before another can see it: whoever writes where it should not, through a stray pointer or on
purpose, gets an error or a SIGSEGV, and the weights stay what they were.

The processes must run the same code with the same libraries, as those of one engine do.

Legend: B bytes of the file.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.model import ModelConfig
from kernels.cpu.tensor_bytes import (
    TensorLayout,
    move_tensor,
    tensor_address_range,
    tensor_bytes,
    tensor_from_buffer,
    tensor_layout,
)
from kernels.interface import Kernels
from workers.memory.huge_pages import HUGE_PAGE_BYTES, map_aligned
from workers.memory.lasting import SharedMemfd, physical_bytes
from workers.models.qwen3 import Qwen3
from workers.models.weights import release_freed_memory
from workers.parallel.group import TensorParallelGroup

_LENGTH_BYTES = 8  # of the number at the end of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTensor:
    """`first_byte`: in the file, the first of a page. Two tensors may be the same bytes."""

    first_byte: int
    num_bytes: int
    layout: TensorLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What the file says of itself. owner: the rank; pickled_model: with the places of `tensors`
    in their stead.
    """

    owner: str
    tensors: tuple[_StoredTensor, ...]
    pickled_model: bytes


class WeightsFile:
    """New memory to which the weights of a model move, part by part, so that no more than one part
    is held twice. The model itself goes on with it.

    Where this is not possible (a GPU, no memory, a torch without the interface), nothing moves from
    then on, and the model can be used all the same. Only where the system
    `has_memfds`.
    """

    def __init__(self, name: str, group: TensorParallelGroup, kernels: Kernels) -> None:
        """name: in the kernel's lists, at most 249 bytes."""
        self._owner = _owner(group, kernels)
        self._own_objects = _objects_of_own_process(kernels, group)
        self._progress = group.progress
        self._end = 0  # of what is written
        self._error: OSError | None = None
        try:
            self._memory = SharedMemfd.create(name, HUGE_PAGE_BYTES, self._progress)
            # The file grows into these addresses, as many as the machine has memory: what is free
            # now grows with each part that moves.
            self._memory_B = _map(self._memory, physical_bytes())
        except OSError as error:
            self._error = error

    def move(self, part: object) -> None:
        """Move the tensors of a part of the model, once it is packed."""
        if self._error is None:
            try:
                self._move(part)
            except OSError as error:
                self._error = error
                self._memory.close()

    def finish(self, model: Qwen3) -> SharedMemfd:
        """Move what has not moved yet. Returns the memory, whose handle is for `adopt_weights`.
        Raises what went wrong, also in an earlier move: `OSError`.
        """
        if self._error is not None:
            raise self._error
        try:
            pickled_contents = pickle.dumps(self._move(model))
            pickled_contents += len(pickled_contents).to_bytes(_LENGTH_BYTES, "little")
            end = self._grow_to(self._end + len(pickled_contents))
            self._write(end - len(pickled_contents), memoryview(pickled_contents))
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._memory.descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            self._memory.close()
            raise
        release_freed_memory()
        _touch(self._memory_B[:end])
        return self._memory

    def _move(self, part: object) -> _Contents:
        file = io.BytesIO()
        pickler = _ModelPickler(file, self._own_objects)
        pickler.dump(part)
        first_bytes: dict[tuple[int, int], int] = {}  # by where the bytes were
        stored_tensors = []
        for tensor in pickler.tensors:
            address, num_bytes = place = tensor_address_range(tensor)
            first_byte = address - self._memory_B.data_ptr()
            has_moved = 0 <= first_byte < self._end
            if not has_moved:
                if place not in first_bytes:
                    first_bytes[place] = self._append(tensor_bytes(tensor))
                first_byte = first_bytes[place]
            piece = _StoredTensor(
                first_byte=first_byte, num_bytes=num_bytes, layout=tensor_layout(tensor)
            )
            if not has_moved:
                move_tensor(tensor, _bytes_of(piece, self._memory_B))
            stored_tensors.append(piece)
        return _Contents(
            owner=self._owner, tensors=tuple(stored_tensors), pickled_model=file.getvalue()
        )

    def _append(self, data: memoryview) -> int:
        """Write it to the next page. Returns the first byte."""
        first_byte = self._end
        self._grow_to(first_byte + len(data))
        self._write(first_byte, data)
        self._end = _round_up(first_byte + len(data), mmap.PAGESIZE)
        return first_byte

    def _grow_to(self, num_bytes: int) -> int:
        """Make the file at least so long. Returns its length, of whole huge pages."""
        if num_bytes > self._memory.num_bytes:
            rounded_bytes = _round_up(num_bytes, HUGE_PAGE_BYTES)
            if rounded_bytes > len(self._memory_B):
                raise OSError(errno.ENOMEM, "the weights are larger than the machine's memory")
            self._memory.grow(rounded_bytes, self._progress)
        return self._memory.num_bytes

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._memory.descriptor, data, offset)
            data, offset = data[written:], offset + written


def adopt_weights(
    memory: SharedMemfd, config: ModelConfig, group: TensorParallelGroup, kernels: Kernels
) -> Qwen3:
    """The model whose weights another process has put into `memory` by `WeightsFile`, which is
    open in this one. It computes with `group` and `kernels`, and outlives the other process.

    Raises `ValueError` if the memory holds another model, or the weights of another rank; `OSError`
    if this torch cannot use it.
    """
    contents = _read_contents(memory)
    owner = _owner(group, kernels)
    if contents.owner != owner:
        raise ValueError(f"the memory holds the weights of {contents.owner}, not of {owner}")
    memory_B = _map(memory, memory.num_bytes)
    tensors = [
        tensor_from_buffer(_bytes_of(piece, memory_B), piece.layout) for piece in contents.tensors
    ]
    own_objects = _objects_of_own_process(kernels, group)
    model = _ModelUnpickler(contents.pickled_model, tensors, own_objects).load()
    assert isinstance(model, Qwen3)
    if model.model_config != config:
        raise ValueError(f"the memory holds the weights of {model.model_config}, not of {config}")
    _touch(memory_B)
    return model


def _owner(group: TensorParallelGroup, kernels: Kernels) -> str:
    return f"rank {group.rank} of {group.size} with {kernels.capabilities.description}"


def _objects_of_own_process(kernels: Kernels, group: TensorParallelGroup) -> dict[str, object]:
    """What a model refers to, but each process has its own of."""
    return {
        "group": group,
        "kernels": kernels,
        "mixed_precision": kernels.mixed_precision,
        **kernels.quantized,
    }


# -- a model without its tensors -------------------------------------------------------------------


class _ModelPickler(pickle.Pickler):
    """Leaves out tensors, which it lists, and `own_objects`, whose names it writes."""

    def __init__(self, file: io.BytesIO, own_objects: dict[str, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # by the identity of a tensor
        self._names = {id(each): name for name, each in own_objects.items() if each is not None}

    def persistent_id(self, obj: Any) -> int | str | None:
        if not isinstance(obj, Tensor):
            return self._names.get(id(obj))
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _ModelUnpickler(pickle.Unpickler):
    """Puts in the tensors, and the objects of this process."""

    def __init__(
        self, pickled: bytes, tensors: list[Tensor], own_objects: dict[str, object]
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors, self._own_objects = tensors, own_objects

    def persistent_load(self, pid: Any) -> Any:
        return self._own_objects[pid] if isinstance(pid, str) else self._tensors[pid]


# -- the file --------------------------------------------------------------------------------------


def _bytes_of(piece: _StoredTensor, memory_B: Tensor) -> Tensor:
    return memory_B[piece.first_byte : piece.first_byte + piece.num_bytes]


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


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def _read_contents(memory: SharedMemfd) -> _Contents:
    end = memory.num_bytes - _LENGTH_BYTES
    num_bytes = int.from_bytes(os.pread(memory.descriptor, _LENGTH_BYTES, end), "little")
    contents = pickle.loads(os.pread(memory.descriptor, num_bytes, end - num_bytes))
    assert isinstance(contents, _Contents)
    return contents
