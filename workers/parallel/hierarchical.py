"""CPU ranks on several hosts, with several ranks on some: shared memory within a host, gloo between
the first ranks of the hosts.

What crosses the network goes once per host instead of once per rank, and ranks of one host do not
take turns at its sockets. Sums stay in float32 until the end and are rounded once, as in shared
memory. Every rank gets what its host's first rank got from gloo, so the bits are the same on all.
Legend: R ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.parallel.backend import TorchTransport
from workers.parallel.shared_memory import SharedMemoryReducer

Operation = Callable[[torch.Tensor], torch.Tensor]


class HierarchicalReducer:
    """A `Transport`. `within`: the ranks of this host; `between`: the first ranks of all hosts,
    only on these ranks; `hosts`: the ranks of each host, in the order of `between`.
    """

    name = "shared memory within hosts, gloo between them"

    def __init__(
        self,
        within: SharedMemoryReducer,
        between: TorchTransport | None,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        self._within, self._between = within, between
        self._largest = max(map(len, hosts))
        # Where each rank's part is when the padded parts of the hosts follow one another.
        row_of_rank = {
            rank: host * self._largest + index
            for host, ranks in enumerate(hosts)
            for index, rank in enumerate(ranks)
        }
        self._order_R = torch.tensor([row_of_rank[rank] for rank in range(len(row_of_rank))])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`. Dtypes as `SharedMemoryReducer`."""
        between = None if self._between is None else self._between.all_reduce
        return self._reduce(tensor, self._within.all_reduce, between)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`."""
        between = None if self._between is None else self._between.all_reduce_max
        return self._reduce(tensor, self._within.all_reduce_max, between)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, *tensor.shape], in rank order. Any dtype, on the CPU."""
        own_bytes = tensor.contiguous().view(-1).view(torch.uint8)
        bytes_of_host = self._within.all_gather(own_bytes)
        out_R = torch.empty((len(self._order_R), len(own_bytes)), dtype=torch.uint8)
        if self._between is not None:
            padded = torch.zeros((self._largest, len(own_bytes)), dtype=torch.uint8)
            padded[: len(bytes_of_host)] = bytes_of_host
            out_R = self._cross(self._between.all_gather, padded).flatten(0, 1)[self._order_R]
        self._within.broadcast(out_R)
        return out_R.view(-1).view(tensor.dtype).view(len(out_R), *tensor.shape)

    def set_timeout(self, timeout_s: float) -> None:
        """Limit of every operation from now on."""
        self._within.set_timeout(timeout_s)
        if self._between is not None:
            self._between.set_timeout(timeout_s)

    def close(self) -> None:
        """Leave the group; ranks that wait for this one fail at once."""
        self._within.close()
        if self._between is not None:
            self._between.close()

    def _reduce(
        self, tensor: torch.Tensor, within: Operation, between: Operation | None
    ) -> torch.Tensor:
        wide = torch.float32 if tensor.is_floating_point() else torch.int64
        result = within(tensor.to(wide).contiguous())
        if between is not None:
            self._cross(between, result)
        self._within.broadcast(result)
        return tensor.copy_(result)

    def _cross(self, operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
        """An operation between hosts. If it fails, the other ranks of this host do not wait for
        its result.
        """
        try:
            return operation(tensor)
        except BaseException:
            self._within.close()
            raise
