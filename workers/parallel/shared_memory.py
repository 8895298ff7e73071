"""Sums, maxima and gathers between CPU ranks of one host, through memory they have all mapped.

Owns a rank's end of the shared segment. An operation takes 5 to 100 us here and 0.4 to 2 ms with
gloo, and a step of 28 layers does 57 of them. Every rank adds in rank order, floats in float32
rounded once at the end, so every rank gets the same bits, regardless of which came first.
`advance.py` holds the loop and the ordering argument. Called by the tensor-parallel group, from one
thread; `close` may come from another.

Legend: R ranks that share the memory.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from scheduler.errors import OTHER_OPERATION_PHRASE, WorkerError
from workers.parallel import segment
from workers.parallel.advance import (
    BROADCAST,
    GATHER,
    GATHER_TO_ADD,
    GATHER_TO_COMPARE,
    LEAVE,
    OUTCOME_CLOSED,
    OUTCOME_DIFFERS,
    OUTCOME_FACTOR,
    PART_INDEX,
    SUM_BFLOAT16,
    SUM_FLOAT32,
    advance,
    compile_advance,
    segment_bytes,
)

# A waiting rank yields for this long at most, then sleeps between checks. Where the kernel shares
# the cores out by session, a yield lets only processes of the same session run: with ranks that
# yielded for 2 ms, a client in a session of its own waited up to 0.7 s for a core. A peer that
# comes later than that has lost its core, and may do so again: each such wait halves the time, and
# each shorter one doubles it.
_MAX_YIELD_S, _MIN_YIELD_S = 0.0002, 0.00001
_MAX_SLEEP_S = 0.001
_CHECK_PERIOD_S = 0.005  # how often a waiting rank checks that its peers are alive

_SUM_KINDS = {torch.float32: SUM_FLOAT32, torch.bfloat16: SUM_BFLOAT16}
_INTEGER_DTYPES = (torch.int64, torch.int32)
_REDUCIBLE_DTYPES = (*_SUM_KINDS, torch.float16, *_INTEGER_DTYPES)

Exchange = Callable[[str], list[str]]


class SharedMemoryReducer:
    """A `Transport`: one rank's end of the mapped `memory`. `join` creates one on every rank or on
    none.
    """

    name = "shared memory"

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        process_ids: list[int],
        memory: mmap.mmap,
        timeout_s: float,
        rank_label: str,
    ) -> None:
        """The end of rank `ranks[index]`, which errors call `rank_label`; `process_ids` belong to
        `ranks`. Raises `ProcessLookupError` when a peer is already dead.
        """
        self.timeout_s = timeout_s
        self.rank = ranks[index]
        self._rank_label, self._ranks = rank_label, ranks
        self._process_ids = process_ids
        self._size = len(ranks)
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self._state = np.array([self._memory.ctypes.data, index, self._size, 1, 0], np.int64)
        self._unusable_reason = ""
        self._leave_lock = threading.Lock()
        self._yield_s = _MAX_YIELD_S
        self._peer_by_pidfd: dict[int, int] = {}  # index of a rank by file descriptor
        self._poll = select.poll()
        try:
            for peer in range(self._size):
                if peer != index:
                    self._watch(peer)
        except OSError:
            self.close()
            raise

    @classmethod
    def join(
        cls, rank: int, ranks: Sequence[int], exchange: Exchange, timeout_s: float, rank_label: str
    ) -> SharedMemoryReducer | str:
        """Map a new segment on every one of `ranks`, or report on every one why that is impossible.
        `exchange`, called twice, gives each the texts of all, in the order of `ranks`; each text
        must be shorter than 1000 bytes. `timeout_s` bounds every later operation; `rank_label`
        names this rank in errors. Raises what `exchange` does.
        """
        index = ranks.index(rank)
        size = len(ranks)
        first_name = f"rank {ranks[0]}"
        compile_advance()  # nothing has to be cleaned up yet
        token = secrets.token_hex(16)
        path = ""
        reason = ""
        reasons = ["the ranks did not agree"]
        descriptor, reducer = -1, None
        try:
            if index == 0:
                try:
                    descriptor, path = segment.create(segment_bytes(size), token)
                except OSError as error:
                    reason = f"{first_name} got no shared memory: {error}"
            peer_infos = [
                json.loads(text)
                for text in exchange(json.dumps([segment.host_id(), os.getpid(), path, token]))
            ]
            if peer_infos[0][2]:
                try:
                    if index > 0:
                        descriptor = segment.open_segment(peer_infos[0], peer_infos[index])
                    memory = mmap.mmap(descriptor, segment_bytes(size))
                    process_ids = [peer_info[1] for peer_info in peer_infos]
                    reducer = cls(index, ranks, process_ids, memory, timeout_s, rank_label)
                except OSError as error:
                    reason = f"rank {rank} cannot share memory with {first_name}: {error}"
            reasons = exchange(reason)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            if path:
                segment.remove(path)
            if reducer is not None and any(reasons):
                reducer.close()
        if reducer is None or any(reasons):
            return next(filter(None, reasons))
        return reducer

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`. float32, bfloat16, float16, int64 or
        int32 of any shape, on the CPU; contiguous is fastest.

        Raises `ValueError` for another dtype. Raises `WorkerError` when a rank has died, has left,
        calls another operation or does not arrive within `timeout_s`; the group cannot be used
        afterwards.
        """
        name, kind = "all_reduce", _SUM_KINDS.get(tensor.dtype)
        if kind is not None and tensor.is_contiguous():
            address = tensor.data_ptr()
            self._run(name, address, address, tensor.nbytes, kind)
            return tensor
        _check_reducible(name, tensor.dtype)
        if tensor.dtype in _INTEGER_DTYPES:
            return tensor.copy_(self._gather(name, tensor, GATHER_TO_ADD).sum(dim=0))
        sum_dtype = torch.float32 if kind is None else tensor.dtype
        return tensor.copy_(self.all_reduce(tensor.to(sum_dtype).contiguous()))

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`. Dtypes and errors as `all_reduce`."""
        name = "all_reduce_max"
        _check_reducible(name, tensor.dtype)
        return tensor.copy_(self._gather(name, tensor, GATHER_TO_COMPARE).amax(dim=0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, *tensor.shape], in rank order. Any dtype, on the CPU. Errors as `all_reduce`."""
        return self._gather("all_gather", tensor, GATHER)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the first rank's `tensor` to that of every rank: contiguous, of any dtype, on the
        CPU. Errors as `all_reduce`.
        """
        address = tensor.data_ptr()
        self._run("broadcast", address, address, tensor.nbytes, BROADCAST)

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def close(self) -> None:
        """Leave the group; ranks that wait for this one fail at once. Never waits for a peer."""
        self._leave("has left its tensor-parallel group")

    def _gather(self, name: str, tensor: torch.Tensor, kind: int) -> torch.Tensor:
        tensor = tensor.contiguous()
        out_R = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype)
        self._run(name, tensor.data_ptr(), out_R.data_ptr(), tensor.nbytes, kind)
        return out_R

    def _run(self, name: str, source: int, target: int, num_bytes: int, kind: int) -> None:
        memory = self._memory  # this reference keeps it mapped, even if another thread closes
        if memory is None:
            raise WorkerError(f"{self._rank_label} {self._unusable_reason}")
        try:
            if advance(self._state, source, target, num_bytes, kind):
                self._wait(name, source, target, num_bytes, kind)
        except BaseException as error:  # even after an interrupt: the operation is half done
            self._leave(f"has failed before: {str(error) or type(error).__name__}")
            raise

    def _wait(self, name: str, *operation: int) -> None:
        """Continue an operation until it is done, a peer is dead or gone, or the time is up."""
        began_s = time.monotonic()
        next_check_s = _CHECK_PERIOD_S
        while code := advance(self._state, *operation):
            outcome, peer = divmod(code, OUTCOME_FACTOR)
            waited_s = time.monotonic() - began_s
            if self._memory is None:  # another thread has closed
                raise WorkerError(f"{self._rank_label} {self._unusable_reason}")
            if outcome == OUTCOME_CLOSED:
                self._fail(name, f"rank {self._ranks[peer]} has left the group")
            if outcome == OUTCOME_DIFFERS:
                difference = f"rank {self._ranks[peer]} {OTHER_OPERATION_PHRASE}"
                self._fail(name, f"{difference}, or one of another size")
            if waited_s > self.timeout_s:
                part = self._state[PART_INDEX]
                self._fail(
                    name,
                    f"part {part} of rank {self._ranks[peer]} did not come in {self.timeout_s} s:"
                    " it is gone or stuck",
                )
            if waited_s > next_check_s:
                next_check_s = waited_s + _CHECK_PERIOD_S
                dead_peer = self._dead_peer()
                if dead_peer is not None:
                    # What it published before it died may have been all that we were waiting for.
                    if not advance(self._state, *operation):
                        return
                    self._fail(name, f"{self._describe_peer(dead_peer)} has died")
            if waited_s < self._yield_s:
                os.sched_yield()
            else:
                time.sleep(min(_MAX_SLEEP_S, waited_s / 20))
        was_short_wait = time.monotonic() - began_s < _MAX_YIELD_S
        yield_s = self._yield_s * 2 if was_short_wait else self._yield_s / 2
        self._yield_s = min(max(yield_s, _MIN_YIELD_S), _MAX_YIELD_S)

    def _dead_peer(self) -> int | None:
        poll_events = self._poll.poll(0)
        # Checked second: a watch that another thread has closed is not a sign of death.
        if not poll_events or self._memory is None:
            return None
        return self._peer_by_pidfd[poll_events[0][0]]

    def _describe_peer(self, peer: int) -> str:
        return f"rank {self._ranks[peer]} (process {self._process_ids[peer]})"

    def _fail(self, name: str, reason: str) -> NoReturn:
        raise WorkerError(f"{self._rank_label}: {name} failed: {reason}")

    def _watch(self, peer: int) -> None:
        """Open a file descriptor that becomes readable when exactly this process has ended. On
        systems without such descriptors only the time limit of operations applies.
        """
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(self._process_ids[peer])
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM):
                return
            raise
        self._peer_by_pidfd[descriptor] = peer
        self._poll.register(descriptor, select.POLLIN)

    def _leave(self, reason: str) -> None:
        with self._leave_lock:
            memory, self._memory = self._memory, None
            if memory is None:
                return
            self._unusable_reason = reason
            advance(self._state, 0, 0, 0, LEAVE)
            for descriptor in self._peer_by_pidfd:
                self._poll.unregister(descriptor)
                os.close(descriptor)


def _check_reducible(name: str, dtype: torch.dtype) -> None:
    if dtype not in _REDUCIBLE_DTYPES:
        raise ValueError(
            f"{name} of {dtype} between CPU ranks is not possible; possible are"
            f" {', '.join(map(str, _REDUCIBLE_DTYPES))}"
        )
