"""The bytes of a tensor, and a tensor made of bytes, also where oneDNN has packed it.

A packed tensor is opaque: torch shows neither its memory nor its layout. What our kernels know of
one, the address of its panels (`packed.py`), is kept as an attribute of the tensor. Legend: B
bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.torch_c import data_pointer, packed_tensor

_ADDRESS_ATTRIBUTE = "panel_address"  # attributes of a packed tensor
_MEMORY_ATTRIBUTE = "memory_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """All of a tensor but its bytes. packing: oneDNN's description of how it has packed the tensor;
    None if the elements follow one another. has_panels: whether `panel_address` is known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    packing: bytes | None
    has_panels: bool


def set_panel_address(packed_weight: Tensor, address: int | None) -> None:
    """Note where the panels of a packed weight begin; None if its layout is not the known one."""
    vars(packed_weight)[_ADDRESS_ATTRIBUTE] = address


def panel_address(packed_weight: Tensor) -> int | None:
    """What `set_panel_address` noted."""
    address: int | None = vars(packed_weight).get(_ADDRESS_ATTRIBUTE)
    return address


def tensor_layout(tensor: Tensor) -> TensorLayout:
    """The layout of a tensor that is contiguous or packed."""
    packing = None
    if tensor.is_mkldnn:
        packing = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).numpy().tobytes()
    return TensorLayout(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        packing=packing,
        has_panels=panel_address(tensor) is not None,
    )


def tensor_address_range(tensor: Tensor) -> tuple[int, int]:
    """(address, number of bytes). Raises `OSError` if this process cannot tell."""
    if tensor.is_mkldnn:
        address = data_pointer(tensor)
        if address is None:
            raise OSError("this torch does not say where a packed weight lies")
        return address, torch.ops.mkldnn._nbytes(tensor)
    if tensor.device.type not in ("cpu", "cuda") or not tensor.is_contiguous():
        raise OSError(f"the bytes of {tensor.device} cannot be read here, or are not in one piece")
    return tensor.data_ptr(), tensor.nbytes


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes, to be used while the tensor lives. Raises `OSError`, as `tensor_address_range`,
    and for a tensor of a GPU.
    """
    if tensor.device.type != "cpu":
        raise OSError(f"the bytes of {tensor.device} cannot be read here")
    address, num_bytes = tensor_address_range(tensor)
    return memoryview((ctypes.c_uint8 * num_bytes).from_address(address))


def tensor_from_buffer(memory_B: Tensor, layout: TensorLayout) -> Tensor:
    """The tensor of these bytes: all of `memory_B`, uint8, as `tensor_bytes` gave them. Raises
    `OSError` if this torch cannot make a packed tensor.
    """
    if layout.packing is None:
        return memory_B.view(layout.dtype).view(layout.shape)
    address = memory_B.data_ptr()
    packed_weight = packed_tensor(address, layout.shape, layout.dtype, layout.packing)
    vars(packed_weight)[_MEMORY_ATTRIBUTE] = memory_B  # torch does not know whose memory it is
    set_panel_address(packed_weight, address if layout.has_panels else None)
    return packed_weight


def move_tensor(tensor: Tensor, memory_B: Tensor) -> None:
    """Give a tensor, for everyone who holds it, other memory that has the same bytes. What it had
    is freed. Raises `OSError`, as `tensor_from_buffer`; the tensor is then as before.
    """
    moved_tensor = tensor_from_buffer(memory_B, tensor_layout(tensor))
    tensor.data = moved_tensor
    vars(tensor).update(vars(moved_tensor))
