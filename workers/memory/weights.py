"""The weights of a rank in memory that outlives it, which its standby has open too: two processes,
or more, that hold the same weights once.

The memory (`weight_stores.py`) holds each tensor of the model as it is in use, packed or not; at
its end the rest of the model, pickled, with numbers instead of tensors, and the number of bytes of
that. Every process maps it for reading only, and a file is sealed before another can see it:
whoever writes where it should not, through a stray pointer or on purpose, gets an error or a
SIGSEGV (a GPU: a fault that ends all its work), and the weights stay what they were.

The processes must run the same code with the same libraries, as those of one engine do.

Legend: B bytes of the memory.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from configs.model import ModelConfig
from kernels.cpu.tensor_bytes import (
    TensorLayout,
    move_tensor,
    tensor_address_range,
    tensor_from_buffer,
    tensor_layout,
)
from kernels.interface import Kernels
from workers.memory.gpu import lies_on_gpu
from workers.memory.huge_pages import round_up
from workers.memory.inheritance import LastingMemory
from workers.memory.weight_stores import (
    GpuStore,
    HostStore,
    WeightStore,
    map_weights,
)
from workers.models.qwen3 import Qwen3
from workers.models.weights import release_freed_memory
from workers.parallel.group import TensorParallelGroup

_LENGTH_BYTES = 8  # of the number at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTensor:
    """`first_byte`: in the memory. Two tensors may be the same bytes."""

    first_byte: int
    num_bytes: int
    layout: TensorLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What the memory says of itself. owner: the rank; pickled_model: with the places of `tensors`
    in their stead.
    """

    owner: str
    tensors: tuple[_StoredTensor, ...]
    pickled_model: bytes


class WeightsFile:
    """New memory to which the weights of a model move, part by part, so that no more than one part
    is held twice. The model itself goes on with it.

    Where this is not possible (no memory, a torch or a driver without the interface), nothing moves
    from then on, and the model can be used all the same. On a CPU only where the system
    `has_memfds`.
    """

    def __init__(self, name: str, group: TensorParallelGroup, kernels: Kernels) -> None:
        """name: of the memory of a CPU, as in `HostStore`."""
        self._owner = _owner(group, kernels)
        self._own_objects = _objects_of_own_process(kernels, group)
        self._end = 0  # of what is written
        self._error: OSError | None = None
        try:
            self._store: WeightStore = (
                GpuStore(group.progress)
                if lies_on_gpu(group.device)
                else HostStore(name, group.progress)
            )
        except OSError as error:
            self._error = error

    def move(self, part: object) -> None:
        """Move the tensors of a part of the model, once it is packed."""
        if self._error is None:
            try:
                self._move(part)
            except OSError as error:
                self._error = error
                self._store.memory.close()

    def finish(self, model: Qwen3) -> LastingMemory:
        """Move what has not moved yet. Returns the memory, whose handle is for `adopt_weights`.
        Raises what went wrong, also in an earlier move: `OSError`.
        """
        if self._error is not None:
            raise self._error
        try:
            contents = pickle.dumps(self._move(model))
            contents += len(contents).to_bytes(_LENGTH_BYTES, "little")
            end = self._store.grow_to(self._end + len(contents))
            self._store.write_bytes(end - len(contents), contents)
            self._store.seal()
        except OSError:
            self._store.memory.close()
            raise
        release_freed_memory()
        return self._store.memory

    def _move(self, part: object) -> _Contents:
        file = io.BytesIO()
        pickler = _ModelPickler(file, self._own_objects)
        pickler.dump(part)
        first_bytes: dict[tuple[int, int], int] = {}  # by where the bytes were
        stored_tensors = []
        for tensor in pickler.tensors:
            address, num_bytes = place = tensor_address_range(tensor)
            first_byte = address - self._store.address
            has_moved = 0 <= first_byte < self._end
            if not has_moved:
                if place not in first_bytes:
                    first_bytes[place] = self._append(tensor, num_bytes)
                first_byte = first_bytes[place]
            piece = _StoredTensor(
                first_byte=first_byte, num_bytes=num_bytes, layout=tensor_layout(tensor)
            )
            if not has_moved:
                move_tensor(tensor, self._store.bytes_at(first_byte, num_bytes))
            stored_tensors.append(piece)
        self._store.note_moved()
        return _Contents(
            owner=self._owner, tensors=tuple(stored_tensors), pickled_model=file.getvalue()
        )

    def _append(self, tensor: Tensor, num_bytes: int) -> int:
        """Write its bytes behind the others. Returns the first one."""
        first_byte = self._end
        self._store.grow_to(first_byte + num_bytes)
        self._store.write(first_byte, tensor)
        self._end = round_up(first_byte + num_bytes, self._store.alignment_bytes)
        return first_byte


def adopt_weights(
    memory: LastingMemory, config: ModelConfig, group: TensorParallelGroup, kernels: Kernels
) -> Qwen3:
    """The model whose weights another process has put into `memory` by `WeightsFile`, which is
    open in this one. It computes with `group` and `kernels`, and outlives the other process.

    Raises `ValueError` if the memory holds another model, or the weights of another rank; `OSError`
    if this torch cannot use it.
    """
    memory_B = map_weights(memory)
    contents = _read_contents(memory_B)
    owner = _owner(group, kernels)
    if contents.owner != owner:
        raise ValueError(f"the memory holds the weights of {contents.owner}, not of {owner}")
    tensors = [
        tensor_from_buffer(
            memory_B[piece.first_byte : piece.first_byte + piece.num_bytes], piece.layout
        )
        for piece in contents.tensors
    ]
    own_objects = _objects_of_own_process(kernels, group)
    model = _ModelUnpickler(contents.pickled_model, tensors, own_objects).load()
    assert isinstance(model, Qwen3)
    if model.model_config != config:
        raise ValueError(f"the memory holds the weights of {model.model_config}, not of {config}")
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


# -- the memory ------------------------------------------------------------------------------------


def _read_contents(memory_B: Tensor) -> _Contents:
    length = int.from_bytes(_read(memory_B[-_LENGTH_BYTES:]), "little")
    contents = pickle.loads(_read(memory_B[-_LENGTH_BYTES - length : -_LENGTH_BYTES]))
    assert isinstance(contents, _Contents)
    return contents


def _read(bytes_B: Tensor) -> bytes:
    return bytes_B.cpu().numpy().tobytes()
