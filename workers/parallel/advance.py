"""The compiled loop of the shared-memory all-reduce, and the reason why it needs no locks.

The segment holds a token that identifies it; two words per rank, `published` and `closed`, each on
cache lines of its own; and two buffers per rank, each with a label and room for one part of a
tensor. The parts of all operations are numbered 1, 2, ..., and part n uses buffer n mod 2. For each
part, a rank

  1. writes its input and label to its own buffer,
  2. stores n to its `published` (release),
  3. loads every `published` until all are at least n (acquire),
  4. reads the buffers of all ranks and writes the result to its own tensor.

A reader sees what was written: the write (1) happens before the release (2), which synchronizes
with the reader's acquire (3), which happens before its read (4). Two buffers and one word are
enough: a rank writes part n + 2 over part n only after it has seen `published` >= n + 1 from every
rank (3), and a rank releases n + 1 only after all of its reads of part n, which precede it in
program order. So nobody reads what is being overwritten, and nobody is two parts ahead. No
read-modify-write is needed, because each word has one writer. `closed` is stored (release) after
the last part its rank published: a rank that sees a peer closed and then still finds no part n from
it will never get one. A rank leaves an operation only once all ranks have published its last part,
so a peer that leaves right after an operation does not make it fail for those still inside it. Here
ranks are numbered from 0 within the segment, whatever their ranks in the group are.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.atomics import load_acquire, pause, store_release
from kernels.cpu.jit import exact_entry_jit, exact_jit, inlined_jit, narrow, widen

PART_BYTES = 128 * 1024
_LINE_BYTES = 128  # two cache lines: processors fetch them in pairs
BUFFER_BYTES = _LINE_BYTES + PART_BYTES
# Elements added at a time, so that the float32 sums stay in the first-level cache.
_TILE_ELEMENTS = 1024
_MAX_SPINS = 40  # about 1 us; then Python checks peers and the time limit

# What `advance` returns when it is not done: a code of one of these outcomes and the rank it is
# about, as `outcome * OUTCOME_FACTOR + rank`.
OUTCOME_FACTOR = 1 << 16
OUTCOME_WAITS, OUTCOME_CLOSED, OUTCOME_DIFFERS = 1, 2, 3

# Places in the state of a rank, which `advance` keeps between calls: address of the segment, rank,
# number of ranks, number of the part in work, and bytes of the operation before that part.
BASE_INDEX, RANK_INDEX, SIZE_INDEX, PART_INDEX, OFFSET_INDEX, STATE_SIZE = range(6)

# Kinds of operations. Two of them gather what the caller then adds or compares, under a label of
# their own.
GATHER, GATHER_TO_ADD, GATHER_TO_COMPARE, BROADCAST, SUM_FLOAT32, SUM_BFLOAT16, LEAVE = range(7)


def compile_advance() -> None:
    """Compile `advance`, or load it from the cache."""
    advance(np.zeros(STATE_SIZE, np.int64), 0, 0, 0, GATHER)


def segment_bytes(size: int) -> int:
    """Length of a segment for `size` ranks."""
    return int(_buffer_address.py_func(0, size, size, 0))


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@inlined_jit
def _published_address(base: int, rank: int) -> int:
    return base + _LINE_BYTES * (1 + 2 * rank)


@inlined_jit
def _closed_address(base: int, rank: int) -> int:
    return base + _LINE_BYTES * (2 + 2 * rank)


@inlined_jit
def _buffer_address(base: int, size: int, rank: int, part: int) -> int:
    return base + _LINE_BYTES * (1 + 2 * size) + BUFFER_BYTES * (2 * rank + part % 2)


@exact_entry_jit
def advance(state: Any, source: int, target: int, num_bytes: int, kind: int) -> int:
    """Continue an operation from `source`, where `num_bytes` are, to `target` (addresses), waiting
    for at most `_MAX_SPINS` turns.

    Returns 0 when it is done, otherwise a code; called again with the same arguments, it
    continues where it was.
    """
    base, rank, size, spins = state[BASE_INDEX], state[RANK_INDEX], state[SIZE_INDEX], _MAX_SPINS
    if kind == LEAVE:
        store_release(_closed_address(base, rank), 1)
        return 0  # another thread may be inside an operation, so its state is kept
    label = num_bytes * 8 + kind
    while state[OFFSET_INDEX] < num_bytes:
        part, offset = state[PART_INDEX], state[OFFSET_INDEX]
        length = min(PART_BYTES, num_bytes - offset)
        if load_acquire(_published_address(base, rank)) < part:
            buffer = _buffer_address(base, size, rank, part)
            if rank == 0 or kind != BROADCAST:
                _copy(source + offset, buffer + _LINE_BYTES, length)
            numba.carray(_pointer(buffer), 1, np.int64)[0] = label
            store_release(_published_address(base, rank), part)
        for peer in range(size):
            while load_acquire(_published_address(base, peer)) < part:
                if spins <= 0:
                    return _waiting_code(base, size, peer, part)  # type: ignore[no-any-return]
                spins -= 1
                pause()
        for peer in range(size):
            if (
                numba.carray(_pointer(_buffer_address(base, size, peer, part)), 1, np.int64)[0]
                != label
            ):
                return OUTCOME_DIFFERS * OUTCOME_FACTOR + peer
        _combine(base, size, part, target + offset, length, num_bytes, kind)
        state[PART_INDEX] += 1
        state[OFFSET_INDEX] += length
    state[OFFSET_INDEX] = 0
    return 0


@inlined_jit
def _waiting_code(base: int, size: int, awaited_peer: int, part: int) -> int:
    for peer in range(size):
        if (
            load_acquire(_closed_address(base, peer))
            and load_acquire(_published_address(base, peer)) < part
        ):
            return OUTCOME_CLOSED * OUTCOME_FACTOR + peer
    return OUTCOME_WAITS * OUTCOME_FACTOR + awaited_peer


@inlined_jit
def _copy(source: int, target: int, num_bytes: int) -> None:
    source_bytes = numba.carray(_pointer(source), num_bytes, np.uint8)
    target_bytes = numba.carray(_pointer(target), num_bytes, np.uint8)
    for i in range(num_bytes):
        target_bytes[i] = source_bytes[i]


@inlined_jit
def _combine(
    base: int, size: int, part: int, target: int, length: int, stride: int, kind: int
) -> None:
    first, step = _buffer_address(base, size, 0, part) + _LINE_BYTES, 2 * BUFFER_BYTES
    if kind == SUM_BFLOAT16:
        _sum(first, step, size, target, length, np.uint16, 2)
    elif kind == SUM_FLOAT32:
        _sum(first, step, size, target, length, np.float32, 4)
    elif kind == BROADCAST:
        _copy(first, target, length)
    else:
        for peer in range(size):
            _copy(first + step * peer, target + stride * peer, length)


@exact_jit
def _sum(
    first: int, step: int, size: int, target: int, length: int, dtype: Any, item_bytes: int
) -> None:
    """The sum, in rank order, of `size` arrays of `length` bytes that lie `step` bytes apart."""
    total = np.empty(_TILE_ELEMENTS, np.float32)
    for start in range(0, length, _TILE_ELEMENTS * item_bytes):
        count = min(_TILE_ELEMENTS, (length - start) // item_bytes)
        for peer in range(size):
            peer_values = numba.carray(_pointer(first + step * peer + start), count, dtype)
            if peer == 0:
                for i in range(count):
                    total[i] = widen(peer_values[i])
            else:
                for i in range(count):
                    total[i] += widen(peer_values[i])
        out = numba.carray(_pointer(target + start), count, dtype)
        for i in range(count):
            out[i] = narrow(total[i], out[0])
