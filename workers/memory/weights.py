"""The weights of a CPU rank in memory that outlives it, which its standby has open too: two
processes, or more, that hold the same weights once.

The memory is a file (`lasting.py`): each tensor of the model as it is in use, packed or not, from
the first byte of a page on; then the rest of the model, pickled, with numbers instead of tensors;
then the number of bytes of that. Every process maps the tensors for reading only, and the file is
sealed before another can see it: whoever writes where it should not, through a stray pointer or on
purpose, gets an error or a SIGSEGV, and the weights stay what they were.

The processes must run the same code with the same libraries, as those of one engine do.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.model import ModelConfig
from kernels.cpu.tensor_bytes import (
    TensorLayout,
    move_tensor,
    tensor_bytes,
    tensor_from_buffer,
    tensor_layout,
    tensor_place,
)
from kernels.interface import Kernels
from workers.memory.huge_pages import map_aligned, use_huge_pages
from workers.memory.lasting import LastingMemory, is_supported
from workers.models.qwen3 import Qwen3
from workers.models.weights import release_freed_memory
from workers.parallel.group import TensorParallelGroup

_PAGE = mmap.PAGESIZE
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


def keep_weights(model: Qwen3, name: str) -> LastingMemory:
    """Move the weights of a packed model to new memory, whose card is for `adopt_weights`. The
    model itself goes on with it. All of the new memory is taken from the machine before the first
    tensor is moved: at that moment it needs twice the weights.

    name: at most 249 bytes of the kernel's lists. Raises `OSError` where this is not possible: not
    Linux, a GPU, no memory, a torch without the interface. The model can be used all the same.
    """
    if not is_supported():
        raise OSError("this system has no memory that outlives a process")
    contents, tensors = _take_apart(model)
    described = pickle.dumps(contents)
    end_of_tensors = _end_of(contents.tensors)
    memory = LastingMemory.create(name, end_of_tensors + len(described) + _LENGTH_BYTES)
    try:
        memory_B = _map(memory)
        _move(contents.tensors, tensors, memory_B, memory.descriptor)
        length = len(described).to_bytes(_LENGTH_BYTES, "little")
        _write(memory.descriptor, end_of_tensors, memoryview(described + length))
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, seals)
        with suppress(OSError):  # this kernel does not do it
            use_huge_pages(memory.descriptor, memory.num_bytes)
        _touch(memory_B)
    except OSError:
        memory.close()
        raise
    return memory


def adopt_weights(
    memory: LastingMemory, config: ModelConfig, group: TensorParallelGroup, kernels: Kernels
) -> Qwen3:
    """The model whose weights another process has put into `memory` by `keep_weights`, which is
    open in this one. It computes with `group` and `kernels`, and outlives the other process.

    Raises `ValueError` if the memory holds another model, or the weights of another rank; `OSError`
    if this torch cannot use it.
    """
    contents = _read_contents(memory)
    owner = _owner(group, kernels)
    if contents.owner != owner:
        raise ValueError(f"the memory holds the weights of {contents.owner}, not of {owner}")
    memory_B = _map(memory)
    tensors = [
        tensor_from_buffer(_bytes_of(piece, memory_B), piece.layout) for piece in contents.tensors
    ]
    parts = _shared_parts(kernels, group)
    model = _ModelUnpickler(contents.pickled_model, tensors, parts).load()
    assert isinstance(model, Qwen3)
    if model.model_config != config:
        raise ValueError(f"the memory holds the weights of {model.model_config}, not of {config}")
    _touch(memory_B)
    return model


def _owner(group: TensorParallelGroup, kernels: Kernels) -> str:
    return f"rank {group.rank} of {group.size} with {kernels.capabilities.description}"


def _shared_parts(kernels: Kernels, group: TensorParallelGroup) -> dict[str, object]:
    """What a model refers to, but each process has its own of."""
    quantized = {"int8": kernels.int8, "int4": kernels.int4, "fp8": kernels.fp8}
    return {"group": group, "kernels": kernels, "mixed": kernels.mixed} | quantized


# -- a model without its tensors -------------------------------------------------------------------


class _ModelPickler(pickle.Pickler):
    """Leaves out tensors, which it lists, and `parts`, whose names it writes."""

    def __init__(self, file: io.BytesIO, parts: dict[str, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # by the identity of a tensor
        self._names = {id(part): name for name, part in parts.items() if part is not None}

    def persistent_id(self, obj: Any) -> int | str | None:
        if not isinstance(obj, Tensor):
            return self._names.get(id(obj))
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _ModelUnpickler(pickle.Unpickler):
    """Puts in the tensors, and the parts of this process."""

    def __init__(self, pickled: bytes, tensors: list[Tensor], parts: dict[str, object]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors, self._parts = tensors, parts

    def persistent_load(self, pid: Any) -> Any:
        return self._parts[pid] if isinstance(pid, str) else self._tensors[pid]


def _take_apart(model: Qwen3) -> tuple[_Contents, list[Tensor]]:
    """What the file is to say, and the tensors in the order in which it says it."""
    file = io.BytesIO()
    pickler = _ModelPickler(file, _shared_parts(model.kernels, model.group))
    pickler.dump(model)
    stored: list[_StoredTensor] = []
    first_bytes: dict[tuple[int, int], int] = {}  # by where the bytes are now
    for tensor in pickler.tensors:
        place = tensor_place(tensor)
        first_byte = first_bytes.setdefault(place, _end_of(stored))
        stored.append(
            _StoredTensor(first_byte=first_byte, num_bytes=place[1], layout=tensor_layout(tensor))
        )
    contents = _Contents(
        owner=_owner(model.group, model.kernels),
        tensors=tuple(stored),
        pickled_model=file.getvalue(),
    )
    return contents, pickler.tensors


# -- the file --------------------------------------------------------------------------------------


def _end_of(tensors: tuple[_StoredTensor, ...] | list[_StoredTensor]) -> int:
    """The first page after these tensors."""
    end = max((tensor.first_byte + tensor.num_bytes for tensor in tensors), default=0)
    return -(-end // _PAGE) * _PAGE


def _move(
    stored: tuple[_StoredTensor, ...], tensors: list[Tensor], memory_B: Tensor, descriptor: int
) -> None:
    """Write the tensors one after the other, and let each go on with what is in the file."""
    written = set()
    for piece, tensor in zip(stored, tensors, strict=True):
        if piece.first_byte not in written:
            _write(descriptor, piece.first_byte, tensor_bytes(tensor))
            written.add(piece.first_byte)
        move_tensor(tensor, _bytes_of(piece, memory_B))
        release_freed_memory()


def _bytes_of(piece: _StoredTensor, memory_B: Tensor) -> Tensor:
    return memory_B[piece.first_byte : piece.first_byte + piece.num_bytes]


def _map(memory: LastingMemory) -> Tensor:
    """The whole file, uint8, for reading only. A private mapping, because a sealed file may have no
    shared one before Linux 6.7.
    """
    pages = map_aligned(
        memory.descriptor, memory.num_bytes, flags=mmap.MAP_PRIVATE, protection=mmap.PROT_READ
    )
    return torch.frombuffer(pages, dtype=torch.uint8)


def _touch(memory_B: Tensor) -> None:
    """Read a byte of each page, so that no step has to wait until the kernel has mapped it."""
    memory_B[::_PAGE].sum()


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _read_contents(memory: LastingMemory) -> _Contents:
    end = memory.num_bytes - _LENGTH_BYTES
    num_bytes = int.from_bytes(os.pread(memory.descriptor, _LENGTH_BYTES, end), "little")
    contents = pickle.loads(os.pread(memory.descriptor, num_bytes, end - num_bytes))
    assert isinstance(contents, _Contents)
    return contents
