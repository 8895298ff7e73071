"""The tensor-parallel group: the ranks that compute one model together, and their collective
operations.

Owns one torch backend (gloo on CPU, NCCL on CUDA) built directly over a TCPStore, never
torch.distributed's default process group: nothing here is global, so any number of engines live on
one machine or in one process. CPU ranks that all share a host meet through gloo and then compute
through shared memory; gloo still serves the barrier, which may wait as long as loading takes and
must not spin. A group of one rank does nothing and needs no torch.distributed. Every wait has a
limit. Layers and sampler get the group as an argument; all ranks call the same operations in the
same order, from one thread.

Legend: R ranks of the group.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from scheduler.errors import WorkerError
from workers import faults
from workers.progress import Progress

if TYPE_CHECKING:
    from workers.parallel.shared_memory import SharedMemoryReducer

logger = logging.getLogger(__name__)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one group meet. It exists as long as this object, which rank 0 keeps."""

    host: str
    port: int
    store: Any

    @property
    def address(self) -> Address:
        return self.host, self.port


def open_rendezvous(host: str, timeout_s: float) -> Rendezvous:
    """Listen on `host` only, on a port the system picks and this process keeps from then on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family, backlog=128) as listener:
            port = int(listener.getsockname()[1])
            store = _distributed().TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
    except OSError as error:
        raise WorkerError(f"rank 0 cannot listen on {host!r} for its peers: {error}") from None
    return Rendezvous(host=host, port=port, store=store)


class TensorParallelGroup:
    """`size` ranks, and sums, maxima and gathers between them. `join` before the first operation;
    `create` does both; `alone` is a group of one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        progress: Progress | None = None,
        backend: Any = None,
    ) -> None:
        """`backend`: that of torch.distributed, where it is there already."""
        self.progress = progress or Progress()
        self.rank = rank
        self.size = size
        self.device = device
        self._backend = backend
        self._reducer: SharedMemoryReducer | None = None

    @property
    def transport(self) -> str:
        """How tensors travel: "none" (a group of one), "nccl", "shared memory" or "gloo"."""
        if self.size == 1:
            return "none"
        if self.device.type == "cuda":
            return "nccl"
        return "gloo" if self._reducer is None else "shared memory"

    @classmethod
    def alone(cls, device: torch.device) -> TensorParallelGroup:
        return cls(0, 1, device)

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        address: Address | None,
        device: torch.device,
        timeout_s: float,
    ) -> TensorParallelGroup:
        """A group that has met; see `join`."""
        group = cls(rank, size, device)
        group.join(address, timeout_s)
        return group

    def join(self, address: Address | None, timeout_s: float) -> None:
        """Meet the others at `address`; returns when every rank has joined.

        `timeout_s` bounds this and every later operation (see `set_timeout`). Raises `WorkerError`
        when a peer does not come.
        """
        if self.size == 1:
            return
        who = f"rank {self.rank} of {self.size}"
        if address is None:
            raise WorkerError(f"{who} was given no rendezvous address")
        limit = timedelta(seconds=timeout_s)
        try:
            self._backend = _connect(self.rank, self.size, address, self.device, limit)
            self.barrier()
        except RuntimeError as error:
            where = f"{address[0]}:{address[1]} in {timeout_s} s"
            raise WorkerError(f"{who} did not find all of its peers at {where}: {error}") from None

    def set_timeout(self, timeout_s: float) -> None:
        """Limit of every operation from now on."""
        if self._backend is not None:
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))
        if self._reducer is not None:
            self._reducer.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`. The result has the same bits on every
        rank.
        """
        self.progress.num_collectives += 1
        faults.reach("collective", self.rank)
        if self._reducer is not None:
            return self._reducer.all_reduce(tensor)
        return self._reduce(tensor, "SUM")

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`."""
        if self._reducer is not None:
            return self._reducer.all_reduce_max(tensor)
        return self._reduce(tensor, "MAX")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, *tensor.shape], in rank order."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if self._reducer is not None:
            return self._reducer.all_gather(tensor)
        out_R = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._gather(tensor, out_R)
        return out_R

    def barrier(self) -> None:
        """Return when every rank is here (on CUDA: when its device is)."""
        self._reduce(torch.zeros(1, device=self.device), "SUM").cpu()

    def close(self) -> None:
        """Leave the group; one of several ranks cannot be used afterwards. Never waits for a
        peer.
        """
        if self._reducer is not None:
            self._reducer.close()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort() if self.device.type == "cuda" else backend.shutdown()

    def share_memory(self, timeout_s: float, wanted: bool = True) -> None:
        """Let CPU ranks reduce through shared memory from now on if all of them can and want to;
        otherwise they use gloo.

        Every rank calls this at the same time. `timeout_s` bounds later operations. Raises
        `WorkerError`.
        """
        if self.size == 1 or self.device.type != "cpu":
            return
        reason = next(
            filter(
                None,
                self._exchange("" if wanted else f"rank {self.rank} was told not to share memory"),
            ),
            "",
        )
        if not reason:
            # Imported here because it imports numba, which a rank on a GPU does not need.
            from workers.parallel.shared_memory import SharedMemoryReducer

            joined = SharedMemoryReducer.join(self.rank, self.size, self._exchange, timeout_s)
            if isinstance(joined, SharedMemoryReducer):
                self._reducer = joined
            else:
                reason = joined
        if self.rank == 0:
            logger.info("all-reduce: %s", f"gloo, because {reason}" if reason else "shared memory")

    def _exchange(self, text: str) -> list[str]:
        """The first 1000 bytes of what each rank says, in rank order."""
        mine = torch.frombuffer(
            bytearray(text.encode()[:1000].ljust(1000, b"\0")), dtype=torch.uint8
        )
        return [
            bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")
            for said in self.all_gather(mine)
        ]

    def _reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        if self.size > 1:
            distributed = _distributed()
            options = distributed.AllreduceOptions()
            options.reduceOp = getattr(distributed.ReduceOp, operation)
            options.asyncOp = False  # on CUDA: in the step's own stream
            self._run("all_reduce", lambda b: b.allreduce([tensor], options))
        return tensor

    def _gather(self, tensor: torch.Tensor, out_R: torch.Tensor) -> None:
        options = _distributed().distributed_c10d.AllgatherOptions()
        options.asyncOp = False  # as in `_reduce`
        self._run(
            "all_gather", lambda b: b._allgather_base(out_R, tensor.contiguous()[None], options)
        )

    def _run(self, name: str, start: Callable[[Any], Any]) -> None:
        """Start an operation of the backend and wait for it (on CUDA only the stream does)."""
        who = f"rank {self.rank} of {self.size}"
        if self._backend is None:
            raise WorkerError(f"{who} has left its tensor-parallel group")
        try:
            work = start(self._backend)
            if work is not None:  # NCCL returns None if only the stream has to wait
                work.wait()
        except RuntimeError as error:
            raise WorkerError(f"{who}: {name} failed, a peer is gone or stuck: {error}") from None


def _distributed() -> Any:
    """torch.distributed, imported only where there is more than one rank; its classes have no
    static types.
    """
    return importlib.import_module("torch.distributed")


def _connect(
    rank: int, size: int, address: Address, device: torch.device, timeout: timedelta
) -> Any:
    distributed = _distributed()
    store = distributed.TCPStore(address[0], address[1], is_master=False, timeout=timeout)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    # Use the interface that reaches rank 0. The one that the host name resolves to may be wrong or
    # missing.
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_own_address(address))]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _own_address(peer: Address) -> str:
    """The local address from which packets to `peer` are sent. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
