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
    """A `Transport`. `intra_host_reducer`: the ranks of this host; `inter_host_transport`: the
    first ranks of all hosts, only on these ranks; `host_ranks`: the ranks of each host, in the
    order of `inter_host_transport`. Dtypes as `SharedMemoryReducer`. Ranks that wait for one that
    closes fail at once.
    """

    name = "shared memory within hosts, gloo between them"

    def __init__(
        self,
        intra_host_reducer: SharedMemoryReducer,
        inter_host_transport: TorchTransport | None,
        host_ranks: Sequence[Sequence[int]],
    ) -> None:
        self._intra_host_reducer = intra_host_reducer
        self._inter_host_transport = inter_host_transport
        self._max_ranks_per_host = max(map(len, host_ranks))
        # Where each rank's part is when the padded parts of the hosts follow one another.
        row_of_rank = {
            rank: host * self._max_ranks_per_host + index
            for host, ranks in enumerate(host_ranks)
            for index, rank in enumerate(ranks)
        }
        self._padded_row_R = torch.tensor([row_of_rank[rank] for rank in range(len(row_of_rank))])

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        transport = self._inter_host_transport
        inter_host = None if transport is None else transport.all_reduce
        return self._reduce(tensor, self._intra_host_reducer.all_reduce, inter_host)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        transport = self._inter_host_transport
        inter_host = None if transport is None else transport.all_reduce_max
        return self._reduce(tensor, self._intra_host_reducer.all_reduce_max, inter_host)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        own_bytes = tensor.contiguous().view(-1).view(torch.uint8)
        bytes_of_host = self._intra_host_reducer.all_gather(own_bytes)
        out_R = torch.empty((len(self._padded_row_R), len(own_bytes)), dtype=torch.uint8)
        if self._inter_host_transport is not None:
            padded_bytes = torch.zeros(
                (self._max_ranks_per_host, len(own_bytes)), dtype=torch.uint8
            )
            padded_bytes[: len(bytes_of_host)] = bytes_of_host
            out_R = self._run_between_hosts(
                self._inter_host_transport.all_gather, padded_bytes
            ).flatten(0, 1)[self._padded_row_R]
        self._intra_host_reducer.broadcast(out_R)
        return out_R.view(-1).view(tensor.dtype).view(len(out_R), *tensor.shape)

    def set_timeout(self, timeout_s: float) -> None:
        self._intra_host_reducer.set_timeout(timeout_s)
        if self._inter_host_transport is not None:
            self._inter_host_transport.set_timeout(timeout_s)

    def close(self) -> None:
        self._intra_host_reducer.close()
        if self._inter_host_transport is not None:
            self._inter_host_transport.close()

    def _reduce(
        self, tensor: torch.Tensor, intra_host: Operation, inter_host: Operation | None
    ) -> torch.Tensor:
        wide_dtype = torch.float32 if tensor.is_floating_point() else torch.int64
        result = intra_host(tensor.to(wide_dtype).contiguous())
        if inter_host is not None:
            self._run_between_hosts(inter_host, result)
        self._intra_host_reducer.broadcast(result)
        return tensor.copy_(result)

    def _run_between_hosts(self, operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
        """An operation between hosts. If it fails, the other ranks of this host do not wait for
        its result.
        """
        try:
            return operation(tensor)
        except BaseException:
            self._intra_host_reducer.close()
            raise
