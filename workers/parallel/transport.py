"""How the tensors of a tensor-parallel group travel: what every transport does.

`backend.py` has gloo (CPU) and NCCL (CUDA), `shared_memory.py` serves ranks of one host,
`hierarchical.py` ranks on several hosts with several ranks on some, and `symmetric_memory.py` GPUs
of one node. All ranks call the same operations in the same order, from one thread; `close` may come
from another. Legend: R ranks of the group.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Transport(Protocol):
    """Operations between ranks. Each raises `WorkerError` when a peer has died, has left or does
    not arrive in time; the transport cannot be used afterwards.
    """

    @property
    def name(self) -> str: ...

    def all_reduce(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`, with the same bits on every rank."""

    def all_reduce_max(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`."""

    def all_gather(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """[R, *tensor.shape], in rank order."""

    def set_timeout(self, timeout_s: float, /) -> None:
        """Limit of every operation from now on."""

    def close(self) -> None:
        """Leave the group. Never waits for a peer."""
