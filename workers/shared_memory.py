"""Sums, maxima and gathers between CPU ranks of one host, through memory they all have mapped.

Owns the shared segment and the loop that runs in it. gloo takes 0.4 to 2 ms for what takes 5 to 100 us here, and a
step of 28 layers does 57 of them. Every rank adds in rank order, floats in float32 rounded once at the end, so every
rank ends with the same bits whoever came first. Called by the tensor-parallel group, from one thread; `close` may come
from another.

Segment: a token that tells it from any other; for each rank its words `published` and `closed`, on cache lines of their
own; for each rank two slots, each a label and one part of a tensor. Parts of all operations are numbered 1, 2, ...,
and part n uses slot n mod 2. For each part, a rank

  1. writes its input and label to its own slot,
  2. stores n to its `published` (release),
  3. loads every `published` until all are n or more (acquire),
  4. reads the slots of all ranks and writes the result to the tensor of its own.

Who reads sees what was written: the write (1) is before the release (2), which the acquire (3) of the reader meets, and
that is before its read (4). Two slots and one word suffice: a rank writes part n + 2 over part n after it has seen
`published` >= n + 1 of every rank (3), and a rank releases n + 1 only after all its reads of part n, which come before
it in program order; so nobody reads what is overwritten, and nobody is two parts ahead. Read-modify-write is never
needed: each word has one writer. `closed` is stored (release) after the last part its rank published: who sees a rank
closed and then still finds no part n of it will never get one. A rank leaves an operation only when all ranks have
published the last part of it, so a peer that goes right after an operation fails nobody who is still inside.

Nothing stays behind, whatever dies: on Linux the segment has no name (memfd; the others open it through /proc), else
its file is removed when all have mapped it. It is written full before it is mapped, so that a lack of memory is an
error there and not a SIGBUS later.

Legend: R ranks of the group.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import platform
import secrets
import select
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.jit import exact_jit, narrow, widen
from scheduler.errors import WorkerError

PART_BYTES = 128 * 1024
_LINE = 128  # two cache lines: processors fetch them in pairs
_SLOT_BYTES = _LINE + PART_BYTES
_TILE = 1024  # elements added at a time, so that the float32 sums stay in the first-level cache

_SPINS = 40  # about 1 us; then Python looks around
_YIELD_S = 0.002  # for so long a rank that waits only yields, then it sleeps between looks
_MAX_SLEEP_S = 0.001
_LOOK_S = 0.005  # between looks whether the peers live

# What `_advance` comes to: one of these, and the rank it is about, as `outcome * _OUTCOME + rank`.
_OUTCOME = 1 << 16
_WAITS, _CLOSED, _DIFFERS = 1, 2, 3

# The state of a rank that `_advance` keeps between calls.
_BASE, _RANK, _SIZE, _PART, _OFFSET, _STATE_SIZE = range(6)

_GATHER, _SUM_FLOAT32, _SUM_BFLOAT16, _SUM_INT64, _MAX_FLOAT32, _MAX_INT64, _LEAVE = range(7)
_SUMS = {torch.float32: _SUM_FLOAT32, torch.bfloat16: _SUM_BFLOAT16, torch.int64: _SUM_INT64}
_MAXIMA = {torch.float32: _MAX_FLOAT32, torch.int64: _MAX_INT64}
_THROUGH = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int32: torch.int64}

Exchange = Callable[[str], list[str]]


class SharedMemoryReducer:
    """Rank `rank` of the ranks that have mapped `memory`, one process id a rank. `join` makes one on every rank or on
    none. Raises `ProcessLookupError` when a peer is dead already."""

    def __init__(self, rank: int, process_ids: list[int], memory: mmap.mmap, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(process_ids)
        self.timeout_s = timeout_s
        self._process_ids = process_ids
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(memory, np.uint8)
        self._state = np.array([self._memory.ctypes.data, rank, self.size, 1, 0], np.int64)
        self._unusable = ""
        self._leaving = threading.Lock()
        self._watched: dict[int, int] = {}  # rank by file descriptor
        self._poll = select.poll()
        try:
            for peer in range(self.size):
                if peer != rank:
                    self._watch(peer)
        except OSError:
            self.close()
            raise

    @classmethod
    def join(cls, rank: int, size: int, exchange: Exchange, timeout_s: float) -> SharedMemoryReducer | str:
        """Map a new segment on every rank, or say on every rank why that cannot be. `exchange` gives every rank the
        texts of all, in rank order; they have less than 1000 bytes. `timeout_s` bounds every later operation.
        Raises what `exchange` does."""
        _advance(np.zeros(_STATE_SIZE, np.int64), 0, 0, 0, _GATHER)  # compiled before anything is to be removed
        token, path, reason, reasons = secrets.token_hex(16), "", "", ["the ranks did not agree"]
        descriptor, reducer = -1, None
        try:
            if rank == 0:
                try:
                    descriptor, path = _create(_segment_bytes(size), token)
                except OSError as error:
                    reason = f"rank 0 got no shared memory: {error}"
            cards = [json.loads(card) for card in exchange(json.dumps([_host(), os.getpid(), path, token]))]
            if cards[0][2]:
                try:
                    descriptor = _open(cards[0], cards[rank]) if rank else descriptor
                    memory = mmap.mmap(descriptor, _segment_bytes(size))
                    reducer = cls(rank, [card[1] for card in cards], memory, timeout_s)
                except OSError as error:
                    reason = f"rank {rank} cannot share memory with rank 0: {error}"
            reasons = exchange(reason)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
            if path:
                _remove(path)
            if reducer is not None and any(reasons):
                reducer.close()
        if reducer is None or any(reasons):
            return next(filter(None, reasons))
        return reducer

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns `tensor`. float32, bfloat16, float16, int64 or int32 of any shape, on
        the CPU; contiguous is fastest.

        Raises `ValueError` for another dtype. Raises `WorkerError` when a rank has died, has left, asks for something
        else or does not come within `timeout_s`; nothing works afterwards."""
        return self._reduce("all_reduce", tensor, _SUMS)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks, in place; returns `tensor`. Dtypes and errors as `all_reduce`."""
        return self._reduce("all_reduce_max", tensor, _MAXIMA)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[R, *tensor.shape], in rank order. Any dtype, on the CPU. Errors as `all_reduce`."""
        tensor = tensor.contiguous()
        out_R = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self._run("all_gather", tensor.data_ptr(), out_R.data_ptr(), tensor.nbytes, _GATHER)
        return out_R

    def close(self) -> None:
        """Leave; ranks that wait for this one fail at once. Never waits for a peer."""
        self._leave("has left its tensor-parallel group")

    def _reduce(self, name: str, tensor: torch.Tensor, kinds: dict[torch.dtype, int]) -> torch.Tensor:
        kind = kinds.get(tensor.dtype)
        if kind is None or not tensor.is_contiguous():
            through = tensor.dtype if kind is not None else _THROUGH.get(tensor.dtype)
            if through is None:
                possible = ", ".join(map(str, {*kinds, *_THROUGH}))
                raise ValueError(f"{name} of {tensor.dtype} between CPU ranks is not possible; possible are {possible}")
            return tensor.copy_(self._reduce(name, tensor.to(through).contiguous(), kinds))
        address = tensor.data_ptr()
        self._run(name, address, address, tensor.nbytes, kind)
        return tensor

    def _run(self, name: str, source: int, target: int, num_bytes: int, kind: int) -> None:
        memory = self._memory  # mapped as long as we are inside, whoever closes
        if memory is None:
            raise WorkerError(f"rank {self.rank} of {self.size} {self._unusable}")
        try:
            if _advance(self._state, source, target, num_bytes, kind):
                self._wait(name, source, target, num_bytes, kind)
        except BaseException as error:  # an interrupt as well: the operation is half done
            self._leave(f"has failed before: {str(error) or type(error).__name__}")
            raise

    def _wait(self, name: str, *operation: int) -> None:
        """Go on with an operation until it is done, a peer is dead or gone, or time is up."""
        started = time.monotonic()
        next_look_s = _LOOK_S
        while code := _advance(self._state, *operation):
            outcome, peer = divmod(code, _OUTCOME)
            waited_s = time.monotonic() - started
            if self._memory is None:  # another thread has closed
                raise WorkerError(f"rank {self.rank} of {self.size} {self._unusable}")
            if outcome == _CLOSED:
                self._fail(name, f"rank {peer} has left the group")
            if outcome == _DIFFERS:
                self._fail(name, f"rank {peer} runs another operation, or one of another size")
            if waited_s > self.timeout_s:
                part = self._state[_PART]
                self._fail(name, f"part {part} of rank {peer} did not come in {self.timeout_s} s: it is gone or stuck")
            if waited_s > next_look_s:
                next_look_s = waited_s + _LOOK_S
                dead = self._dead_peer()
                if dead is not None:
                    # What it has published before it died may have been all we waited for.
                    if not _advance(self._state, *operation):
                        return
                    self._fail(name, f"rank {dead} (process {self._process_ids[dead]}) has died")
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min(_MAX_SLEEP_S, waited_s / 20))

    def _dead_peer(self) -> int | None:
        ended = self._poll.poll(0)
        # Looked at second: a watch that another thread has closed is no sign of death.
        return self._watched[ended[0][0]] if ended and self._memory is not None else None

    def _fail(self, name: str, why: str) -> NoReturn:
        raise WorkerError(f"rank {self.rank} of {self.size}: {name} failed: {why}")

    def _watch(self, peer: int) -> None:
        """Have a file descriptor that can be read once this very process has ended. Where the system knows no such
        thing, only the time limit of operations counts."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(self._process_ids[peer])
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM):
                return
            raise
        self._watched[descriptor] = peer
        self._poll.register(descriptor, select.POLLIN)

    def _leave(self, why: str) -> None:
        with self._leaving:
            memory, self._memory = self._memory, None
            if memory is None:
                return
            self._unusable = why
            _advance(self._state, 0, 0, 0, _LEAVE)
            for descriptor in self._watched:
                self._poll.unregister(descriptor)
                os.close(descriptor)


# -- the segment ----------------------------------------------------------------------------------------------------


def _segment_bytes(size: int) -> int:
    return int(_slot(0, size, size, 0))


def _create(num_bytes: int, token: str) -> tuple[int, str]:
    """(file descriptor, path) of a new segment of zeros that starts with the token."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("eagleray-all-reduce")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="eagleray-all-reduce-")
    try:
        # Zeros too: a hole gets its memory only when it is touched.
        if os.write(descriptor, token.encode().ljust(num_bytes, b"\0")) < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.close(descriptor)
        _remove(path)
        raise
    return descriptor, path


def _remove(path: str) -> None:
    if not path.startswith("/proc/"):
        Path(path).unlink()


def _open(theirs: list[Any], mine: list[Any]) -> int:
    """The file descriptor of rank 0's segment, by its card and this rank's. Raises `OSError` if it is out of reach."""
    if mine[0] != theirs[0]:
        raise OSError("it runs on another host or in another container")
    path, token = theirs[2:]
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(descriptor, len(token), 0) != token.encode():
        os.close(descriptor)
        raise OSError(f"{path} is something else")
    return descriptor


def _host() -> str:
    """The same for processes that see each other in /proc: of one kernel and one namespace of process ids."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


# -- compiled -------------------------------------------------------------------------------------------------------


@intrinsic
def _load_acquire(typing_context: Any, address: Any) -> Any:
    """The int64 at an address; what follows in program order stays behind it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def _store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store an int64 at an address; what precedes in program order stays before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        void, word = ir.VoidType(), ir.IntType(32)
        if platform.machine() in ("x86_64", "AMD64"):
            function = ir.FunctionType(void, [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        elif platform.machine() in ("aarch64", "arm64"):
            function = ir.FunctionType(void, [word])
            isb = cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.isb")
            builder.call(isb, [ir.Constant(word, 15)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@exact_jit
def _published(base: int, rank: int) -> int:
    return base + _LINE * (1 + 2 * rank)


@exact_jit
def _closed(base: int, rank: int) -> int:
    return base + _LINE * (2 + 2 * rank)


@exact_jit
def _slot(base: int, size: int, rank: int, part: int) -> int:
    return base + _LINE * (1 + 2 * size) + _SLOT_BYTES * (2 * rank + part % 2)


@exact_jit
def _advance(state: Any, source: int, target: int, num_bytes: int, kind: int) -> int:
    """Go on with an operation from `source` to `target` (addresses), waiting at most `_SPINS` turns. 0 when it is done,
    else an outcome; called again with the same arguments it goes on where it was."""
    base, rank, size, spins = state[_BASE], state[_RANK], state[_SIZE], _SPINS
    if kind == _LEAVE:
        _store_release(_closed(base, rank), 1)
        return 0  # another thread may be inside an operation: its state stays
    label = num_bytes * 8 + kind
    while state[_OFFSET] < num_bytes:
        part, offset = state[_PART], state[_OFFSET]
        length = min(PART_BYTES, num_bytes - offset)
        if _load_acquire(_published(base, rank)) < part:
            slot = _slot(base, size, rank, part)
            _copy(source + offset, slot + _LINE, length)
            numba.carray(_pointer(slot), 1, np.int64)[0] = label
            _store_release(_published(base, rank), part)
        for peer in range(size):
            while _load_acquire(_published(base, peer)) < part:
                if spins <= 0:
                    return _why_waiting(base, size, peer, part)  # type: ignore[no-any-return]
                spins -= 1
                _pause()
        for peer in range(size):
            if numba.carray(_pointer(_slot(base, size, peer, part)), 1, np.int64)[0] != label:
                return _DIFFERS * _OUTCOME + peer
        _combine(base, size, part, target + offset, length, num_bytes, kind)
        state[_PART] += 1
        state[_OFFSET] += length
    state[_OFFSET] = 0
    return 0


@exact_jit
def _why_waiting(base: int, size: int, awaited: int, part: int) -> int:
    for peer in range(size):
        if _load_acquire(_closed(base, peer)) and _load_acquire(_published(base, peer)) < part:
            return _CLOSED * _OUTCOME + peer
    return _WAITS * _OUTCOME + awaited


@exact_jit
def _copy(source: int, target: int, num_bytes: int) -> None:
    source_bytes = numba.carray(_pointer(source), num_bytes, np.uint8)
    target_bytes = numba.carray(_pointer(target), num_bytes, np.uint8)
    for i in range(num_bytes):
        target_bytes[i] = source_bytes[i]


@exact_jit
def _combine(base: int, size: int, part: int, target: int, length: int, stride: int, kind: int) -> None:
    first, step = _slot(base, size, 0, part) + _LINE, 2 * _SLOT_BYTES
    maximum = kind in (_MAX_FLOAT32, _MAX_INT64)
    if kind == _GATHER:
        for peer in range(size):
            _copy(first + step * peer, target + stride * peer, length)
    elif kind == _SUM_BFLOAT16:
        _fold(first, step, size, target, length, np.uint16, np.float32, maximum)
    elif kind in (_SUM_INT64, _MAX_INT64):
        _fold(first, step, size, target, length, np.int64, np.int64, maximum)
    else:
        _fold(first, step, size, target, length, np.float32, np.float32, maximum)


@exact_jit
def _fold(first: int, step: int, size: int, target: int, length: int, dtype: Any, wide: Any, maximum: bool) -> None:
    """The sum or maximum, in rank order, of `size` arrays of `length` bytes that lie `step` bytes apart."""
    folded = np.empty(_TILE, wide)
    item_bytes = np.empty(0, dtype).itemsize
    for start in range(0, length, _TILE * item_bytes):
        count = min(_TILE, (length - start) // item_bytes)
        for peer in range(size):
            theirs = numba.carray(_pointer(first + step * peer + start), count, dtype)
            if peer == 0:
                for i in range(count):
                    folded[i] = widen(theirs[i])
            elif maximum:
                for i in range(count):
                    folded[i] = max(folded[i], widen(theirs[i]))
            else:
                for i in range(count):
                    folded[i] += widen(theirs[i])
        out = numba.carray(_pointer(target + start), count, dtype)
        for i in range(count):
            out[i] = narrow(folded[i], out[0])
