"""GPU ranks of one node: small sums in one launch, through memory that every rank maps.

A decode step sums small tensors often: with 28 layers, 57 times 1 MiB or less. NCCL takes 12 to 24
µs for 512 KiB on NVLink, while a kernel that reads what the other ranks have written takes 7 to 11
(vLLM's figures). torch has such kernels over its symmetric memory. With two or four ranks, each
rank adds all parts itself, in the order of the ranks. With eight, each rank lets the switch add one
part of the tensor and hands the sum to all. Either way the bits are the same on every rank. (Eight
ranks that each let the switch add everything might not get the same bits.) Larger tensors, and
those of other dtypes, go through NCCL.

A kernel whose peer has died waits for it forever. The process is then ended, either because
`Device.wait` reaches its limit or because the driver has learned of the death.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from scheduler.errors import WorkerError
from workers.parallel import segment
from workers.parallel.backend import TorchTransport

MAX_TENSOR_BYTES = 2**20
_ONE_SHOT_RANK_COUNTS, _MULTIMEM_RANK_COUNTS = (2, 4), (8,)
_DTYPES = (torch.bfloat16, torch.float32)
# Addresses and sizes must be multiples of this; those of torch's allocations are.
_ALIGNMENT_BYTES = 16


class SymmetricMemoryReducer:
    """A `Transport` that adds small tensors through symmetric memory and leaves the rest to NCCL.
    `join` creates one.
    """

    name = "symmetric memory up to 1 MiB, nccl above"

    def __init__(self, nccl: TorchTransport, size: int, group: str, rank_label: str) -> None:
        """Meets the other ranks, which make this call at the same time. `group`: the name by which
        torch knows them. Raises `RuntimeError` where torch cannot share memory between their GPUs.
        """
        self._nccl = nccl
        self._size = size
        self._group = group
        self._rank_label = rank_label
        library = _library()
        self._symmetric_buffer = library.empty(
            MAX_TENSOR_BYTES, dtype=torch.uint8, device=nccl.device
        )
        memory = library.rendezvous(self._symmetric_buffer, group)
        if size in _MULTIMEM_RANK_COUNTS and not memory.multicast_ptr:
            raise RuntimeError("the GPUs have no switch that adds (multicast)")

    @classmethod
    def join(
        cls,
        nccl: TorchTransport,
        group: str,
        rank: int,
        size: int,
        exchange: Callable[[str], list[str]],
        rank_label: str,
    ) -> SymmetricMemoryReducer | str:
        """Called by all ranks at the same time. `group`: a name that nothing else in these
        processes has. `exchange` tells each rank what every rank says. Returns the same on every
        rank: a reducer, or why there is none.
        """
        peer_infos = exchange(f"{segment.host_id()} {nccl.device.index}")
        if refusal_reason := _first_reason(
            exchange(_refusal_reason(nccl.device, peer_infos, size))
        ):
            return refusal_reason
        reducer = None
        try:
            _library()._SymmetricMemory.set_group_info(group, rank, size, nccl.store)
            reducer = cls(nccl, size, group, rank_label)
            failure = ""
        except (RuntimeError, ImportError, AttributeError) as error:
            failure = str(error) or type(error).__name__
        if (refusal_reason := _first_reason(exchange(failure))) or reducer is None:
            return refusal_reason
        return _first_reason(exchange(reducer.self_test(rank))) or reducer

    def self_test(self, rank: int) -> str:
        """Sums tensors whose result is known. Returns what is wrong with it, or an empty string.
        Every rank calls it at the same time.
        """
        wrong_sums = []
        try:
            for dtype in _DTYPES:
                for count in (8, 1000, MAX_TENSOR_BYTES // dtype.itemsize):
                    # Sums of at most 216, which bfloat16 holds exactly.
                    ramp = torch.arange(count, device=self._nccl.device) % 7
                    addend = (ramp * (rank + 1)).to(dtype)
                    expected_sum = (ramp * (self._size * (self._size + 1) // 2)).to(dtype)
                    if not torch.equal(self._sum(addend), expected_sum):
                        wrong_sums.append(f"{count} numbers in {dtype}")
        except RuntimeError as error:
            return str(error)
        return f"wrong sums of {', '.join(wrong_sums)}" if wrong_sums else ""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._fits(tensor):
            return self._nccl.all_reduce(tensor)
        try:
            return self._sum(tensor)
        except RuntimeError as error:
            raise WorkerError(f"{self._rank_label}: all_reduce failed: {error}") from None

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_reduce_max(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_gather(tensor)

    def set_timeout(self, timeout_s: float) -> None:
        """Limit of every NCCL operation from now on; the other kernels have none (see the top)."""
        self._nccl.set_timeout(timeout_s)

    def close(self) -> None:
        self._nccl.close()

    def _fits(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.dtype in _DTYPES
            and 0 < tensor.nbytes <= MAX_TENSOR_BYTES
            and tensor.nbytes % _ALIGNMENT_BYTES == tensor.data_ptr() % _ALIGNMENT_BYTES == 0
            and tensor.is_contiguous()
        )

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        shared_tensor = (
            self._symmetric_buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        )
        operations: Any = torch.ops.symm_mem
        if self._size in _ONE_SHOT_RANK_COUNTS:
            # One kernel: each thread copies elements to `shared_tensor`, waits for the other ranks,
            # and writes the sums of the same elements. It ends when all have read.
            operations.one_shot_all_reduce_copy_out(
                shared_tensor, tensor, "sum", self._group, tensor
            )
            return tensor
        shared_tensor.copy_(tensor)
        return tensor.copy_(operations.multimem_all_reduce_(shared_tensor, "sum", self._group))


def _refusal_reason(device: torch.device, peer_infos: list[str], size: int) -> str:
    """Why this rank cannot take part; empty if it can. `peer_infos`: host and GPU of each rank."""
    hosts, indexes = zip(*(peer_info.rsplit(" ", 1) for peer_info in peer_infos), strict=True)
    if size not in _ONE_SHOT_RANK_COUNTS + _MULTIMEM_RANK_COUNTS:
        return f"{size} ranks are not 2, 4 or 8"
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if len(set(indexes)) < size:
        return "the ranks do not see each other's GPUs"
    for index in map(int, indexes):
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"GPU {device.index} cannot reach the memory of GPU {index}"
    return ""


def _first_reason(reasons: list[str]) -> str:
    return next(filter(None, reasons), "")


def _library() -> Any:
    """torch's symmetric memory, imported only where GPU ranks meet; it has no static types."""
    return importlib.import_module("torch.distributed._symmetric_memory")
