"""Ranks that reach each other through a torch backend: gloo on CPU, NCCL on CUDA.

Built directly over a TCPStore, never torch.distributed's default process group: nothing here is
global, so any number of engines can run on one machine or in one process. Legend: R ranks.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from scheduler.errors import WorkerError

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
            store = _torch_distributed().TCPStore(
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


class TorchTransport:
    """A `Transport` over gloo or NCCL. `connect` creates one."""

    def __init__(
        self, backend: Any, store: Any, num_ranks: int, device: torch.device, rank_label: str
    ) -> None:
        """`backend`: that of torch.distributed, between `num_ranks` ranks that met at `store`.
        `rank_label` names this rank in errors.
        """
        self._backend, self.store, self._size = backend, store, num_ranks
        self.device, self._rank_label = device, rank_label

    @classmethod
    def connect(
        cls,
        ranks: Sequence[int],
        rank: int,
        address: Address,
        device: torch.device,
        timeout_s: float,
        rank_label: str,
    ) -> TorchTransport:
        """Meet the other `ranks` at the store at `address`, which may serve several sets of ranks.
        Raises `RuntimeError` when one of them does not come.
        """
        distributed = _torch_distributed()
        timeout = timedelta(seconds=timeout_s)
        store = distributed.PrefixStore(
            f"ranks {','.join(map(str, ranks))}",
            distributed.TCPStore(address[0], address[1], is_master=False, timeout=timeout),
        )
        group_position = store, ranks.index(rank), len(ranks)
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = distributed.ProcessGroupNCCL(*group_position, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._timeout = timeout
            # Use the interface that reaches rank 0. The one that the host name resolves to may be
            # wrong or missing.
            own_address = _own_address(address)
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own_address)]
            backend = distributed.ProcessGroupGloo(*group_position, options)
        return cls(backend, store, len(ranks), device, rank_label)

    @property
    def name(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, "SUM")

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, "MAX")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out_R = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        options = _torch_distributed().distributed_c10d.AllgatherOptions()
        options.asyncOp = False  # as in `_reduce`
        self._run(
            "all_gather", lambda b: b._allgather_base(out_R, tensor.contiguous()[None], options)
        )
        return out_R

    def next_number(self, name: str) -> int:
        """0, 1, 2, ...: every call with this `name`, by whichever rank, gets the next number."""
        try:
            return int(self.store.add(name, 1)) - 1
        except RuntimeError as error:
            raise WorkerError(f"{self._rank_label}: rank 0 is gone: {error}") from None

    def set_timeout(self, timeout_s: float) -> None:
        if self._backend is not None:
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort() if self.device.type == "cuda" else backend.shutdown()

    def _reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        distributed = _torch_distributed()
        options = distributed.AllreduceOptions()
        options.reduceOp = getattr(distributed.ReduceOp, operation)
        options.asyncOp = False  # on CUDA: in the step's own stream
        self._run("all_reduce", lambda b: b.allreduce([tensor], options))
        return tensor

    def _run(self, name: str, start: Callable[[Any], Any]) -> None:
        """Start an operation and wait (on CUDA the stream does). Its own error has the `name`."""
        if self._backend is None:
            raise WorkerError(f"{self._rank_label} has left its tensor-parallel group")
        try:
            work = start(self._backend)
            if work is not None:  # NCCL returns None if only the stream has to wait
                work.wait()
        except RuntimeError as error:
            raise WorkerError(
                f"{self._rank_label}: {name} failed, a peer is gone or stuck: {error}"
            ) from None


def _torch_distributed() -> Any:
    """torch.distributed, imported only where there is more than one rank; its classes have no
    static types.
    """
    return importlib.import_module("torch.distributed")


def _own_address(peer: Address) -> str:
    """The local address from which packets to `peer` are sent. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
