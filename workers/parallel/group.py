"""The tensor-parallel group: the ranks that compute one model together, and their collective
operations.

Owns the transports and chooses between them. All ranks meet through a torch backend (gloo on CPU,
NCCL on CUDA), which also serves the barrier: that one may wait as long as loading takes and must
not spin. Ranks of one host then compute through memory that they share, and leave gloo once all
have loaded. A group of one rank does nothing and needs no torch.distributed. Every wait has a
limit. Layers and sampler get the group as an argument; all ranks call the same operations in the
same order, from one thread.

Legend: R ranks of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from scheduler.errors import WorkerError
from workers import faults
from workers.parallel import segment
from workers.parallel.backend import Address, TorchTransport
from workers.parallel.transport import Transport
from workers.progress import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TensorParallelGroup:
    """`size` ranks, and sums, maxima and gathers between them. `join` before the first
    operation.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.progress = progress or Progress()
        self.rank = rank
        self.size = size
        self.device = device
        self._rank_label = f"rank {rank} of {size}"
        self._address: Address | None = None
        self._backend: TorchTransport | None = None
        self._chosen_transport: Transport | None = None

    @property
    def transport(self) -> str:
        """How tensors travel: "none" (a group of one), "nccl", "gloo", "shared memory", "shared
        memory within hosts, gloo between them", or "symmetric memory up to 1 MiB, nccl above".
        """
        return "none" if self.size == 1 else self._transport.name

    def join(self, address: Address | None, timeout_s: float) -> None:
        """Meet the others at `address`; returns when every rank has joined.

        `timeout_s` bounds this and every later operation (see `set_timeout`). Raises `WorkerError`
        when a peer does not come.
        """
        if self.size == 1:
            return
        if address is None:
            raise WorkerError(f"{self._rank_label} was given no rendezvous address")
        self._address = address
        self._chosen_transport = self._backend = self._connect(range(self.size), timeout_s)
        self.barrier()

    def set_timeout(self, timeout_s: float) -> None:
        """Limit of every operation from now on."""
        for transport in self._transports():
            transport.set_timeout(timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`. The result has the same bits on every
        rank.
        """
        self.progress.num_all_reduces += 1
        faults.reach("collective", self.rank)
        return tensor if self.size == 1 else self._transport.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`."""
        return tensor if self.size == 1 else self._transport.all_reduce_max(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, *tensor.shape], in rank order."""
        return tensor.unsqueeze(0) if self.size == 1 else self._transport.all_gather(tensor)

    def barrier(self) -> None:
        """Return when every rank has called this (on CUDA: when its device has reached this point).
        While loading only: see `wait_until_loaded`.
        """
        if self.size == 1:
            return
        self._require_joined(self._backend).all_reduce(torch.zeros(1, device=self.device)).cpu()

    def claim_tasks(self, name: str, tasks: Sequence[T]) -> Iterator[T]:
        """Yields the tasks that this rank is to run: whichever rank is free takes the next one.
        Every rank passes the same tasks, while loading, once per `name`.
        """
        if self.size == 1:
            yield from tasks
            return
        backend = self._require_joined(self._backend)
        while (index := backend.next_number(name)) < len(tasks):
            yield tasks[index]

    def wait_until_loaded(self) -> None:
        """The last barrier. After it, ranks on CPUs that share memory leave the gloo of all ranks,
        whose thread wakes a hundred times per second even if there is nothing to do.
        """
        self.barrier()
        if self._backend is not self._chosen_transport and self.device.type == "cpu":
            assert self._backend is not None
            self._transport.all_reduce(torch.zeros(1))  # the others are past that barrier too
            self._backend.close()
            self._backend = None

    def close(self) -> None:
        """Leave the group; one of several ranks cannot be used afterwards. Never waits for a
        peer.
        """
        for transport in self._transports():
            transport.close()

    def share_memory(self, timeout_s: float, is_wanted: bool = True) -> None:
        """From now on, let the ranks of one host reduce through shared memory, if all of them can
        and want to; otherwise they use gloo or NCCL.

        Every rank calls this at the same time. `timeout_s` bounds later operations. Raises
        `WorkerError`.
        """
        if self.size == 1:
            return
        refusals = self._exchange(
            "" if is_wanted else f"rank {self.rank} was told not to share memory"
        )
        reason = next(filter(None, refusals), "")
        if not reason:
            on_gpus = self.transport == "nccl"
            reason = self._try_symmetric_memory() if on_gpus else self._share_memory(timeout_s)
        if self.rank == 0:
            reason_clause = f", because {reason}" if reason else ""
            logger.info("all-reduce: %s%s", self.transport, reason_clause)

    def _share_memory(self, timeout_s: float) -> str:
        """The same on every rank: why memory cannot be shared, or an empty string."""
        # Imported here because it imports numba, which a rank on a GPU does not need.
        from workers.parallel.hierarchical import HierarchicalReducer
        from workers.parallel.shared_memory import SharedMemoryReducer

        ranks_by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(self._exchange(segment.host_id())):
            ranks_by_host.setdefault(host, []).append(rank)
        host_ranks = list(ranks_by_host.values())
        if len(host_ranks) == self.size:
            return "every rank is on a host, or in a container, of its own"
        ranks_here = next(ranks for ranks in host_ranks if self.rank in ranks)

        def exchange(text: str) -> list[str]:
            texts = self._exchange(text)
            return [texts[rank] for rank in ranks_here]

        reducer = SharedMemoryReducer.join(
            self.rank, ranks_here, exchange, timeout_s, self._rank_label
        )
        failures = self._exchange(reducer if isinstance(reducer, str) else "")
        if isinstance(reducer, str) or any(failures):
            if not isinstance(reducer, str):
                reducer.close()
            return next(filter(None, failures))
        if len(host_ranks) == 1:
            self._chosen_transport = reducer
            return ""
        first_ranks = [ranks[0] for ranks in host_ranks]
        inter_host_transport = (
            self._connect(first_ranks, timeout_s) if self.rank in first_ranks else None
        )
        self._chosen_transport = HierarchicalReducer(reducer, inter_host_transport, host_ranks)
        self.barrier()  # a rank that left before its peers have connected would fail them above
        return ""

    def _try_symmetric_memory(self) -> str:
        """The same on every rank: why memory of the GPUs cannot be shared, or an empty string."""
        from workers.parallel.symmetric_memory import SymmetricMemoryReducer

        assert self._backend is not None and self._address is not None
        name = f"eagleray {self._address[0]}:{self._address[1]}"
        reducer = SymmetricMemoryReducer.join(
            self._backend, name, self.rank, self.size, self._exchange, self._rank_label
        )
        if isinstance(reducer, str):
            return reducer
        self._chosen_transport = reducer
        return ""

    @property
    def _transport(self) -> Transport:
        return self._require_joined(self._chosen_transport)

    def _require_joined(self, transport: T | None) -> T:
        if transport is None:
            raise WorkerError(f"{self._rank_label} has not joined its tensor-parallel group")
        return transport

    def _transports(self) -> list[Transport]:
        """Every transport, once: the barrier's may also be the chosen one."""
        transports = dict.fromkeys((self._chosen_transport, self._backend))
        return [transport for transport in transports if transport is not None]

    def _connect(self, ranks: Sequence[int], timeout_s: float) -> TorchTransport:
        assert self._address is not None
        try:
            return TorchTransport.connect(
                ranks, self.rank, self._address, self.device, timeout_s, self._rank_label
            )
        except RuntimeError as error:
            rendezvous_text = f"{self._address[0]}:{self._address[1]} in {timeout_s} s"
            raise WorkerError(
                f"{self._rank_label} did not find all of its peers at {rendezvous_text}: {error}"
            ) from None

    def _exchange(self, text: str) -> list[str]:
        """The first 1000 bytes of each rank's text, in rank order."""
        own_bytes = torch.frombuffer(
            bytearray(text.encode()[:1000].ljust(1000, b"\0")), dtype=torch.uint8
        )
        return [
            bytes(bytes_of_rank.tolist()).rstrip(b"\0").decode(errors="replace")
            for bytes_of_rank in self._transport.all_gather(own_bytes.to(self.device)).cpu()
        ]
