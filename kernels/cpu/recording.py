"""Kernels that are called once and then replayed, as a GPU's graphs are.

With few rows, what Python does around a kernel takes as long as a small kernel runs. But all that a
kernel of this backend computes are loops over tasks (`parallel.py`), and the arguments of a loop
are addresses, shapes and numbers. So a recording is the list of loops, written down as they begin,
between calls of Python that were handed to `call`; and the memory in which they read and write,
which stays where it is. Replaying runs the loops on what the memory contains then.

Results of kernels are allocated by `empty`, during a recording in memory of its own, which is used
again for a later result once nobody has the tensor any more: a replay does everything in the same
order. What else a kernel makes for a loop, it must `keep`. What is no loop is not recorded: a
product of oneDNN's says so with `refuse_recording`, and other operations of torch must go through
`call`, with the tensors that they compute with. One thread makes recordings and calls kernels
meanwhile.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import Array
from kernels.cpu.pool import record_loops_into, replay_loops

_MAX_WORDS = 1 << 15  # of the loops between two calls; a layer has some 600

_current_recordings: list[Recording] = []  # at most one


class Recording:
    """As a context, records the kernels that are called; then `replay` can be called."""

    def __init__(self) -> None:
        self.is_complete = True
        self._parts: list[Callable[[], object]] = []
        self._kept_arrays: list[Array] = []
        self._free_arrays: defaultdict[int, list[Array]] = defaultdict(list)  # by number of bytes
        self._memory = np.empty(0, np.int64)  # of loops, while they are recorded

    def __enter__(self) -> Recording:
        assert not _current_recordings, "a recording within another"
        _current_recordings.append(self)
        self._memory = np.empty(_MAX_WORDS, np.int64)
        record_loops_into(self._memory)
        return self

    def __exit__(self, *_: object) -> None:
        _current_recordings.clear()
        try:
            self._end_part()
        finally:
            record_loops_into(None)
            self._memory = np.empty(0, np.int64)

    def replay(self) -> None:
        """Run everything again. Raises `RuntimeError` if a task does."""
        assert self.is_complete, "what was refused would be missing"
        for part in self._parts:
            part()

    def keep(self, array: Array) -> None:
        """Keep the memory of an array as long as this recording."""
        self._kept_arrays.append(array)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose memory is kept, for other tensors later."""
        free_arrays = self._free_arrays[math.prod(shape) * dtype.itemsize]
        if not free_arrays:
            free_arrays.append(np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
            self.keep(free_arrays[0])
        memory = free_arrays.pop()
        lent_array = memory.view()  # ends with the last tensor made from it
        weakref.finalize(lent_array, free_arrays.append, memory).atexit = False
        return torch.from_numpy(lent_array).view(dtype).view(shape)

    def add_call(self, function: Callable[..., object], *tensors: Tensor) -> None:
        """Have the replay call the function with these tensors at this point."""
        self._end_part()
        self._parts.append(partial(function, *map(self._without_claim, tensors)))

    def _without_claim(self, tensor: Tensor) -> Tensor:
        """The same memory in a tensor that leaves it to later ones, if it is this recording's."""
        for memory in self._kept_arrays:
            if memory.ctypes.data == tensor.data_ptr():
                return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
        return tensor

    def _end_part(self) -> None:
        num_bytes = record_loops_into(self._memory) - self._memory.ctypes.data
        if num_bytes:
            loops = self._memory[: num_bytes // 8].copy()
            self._parts.append(partial(_run, loops, loops.ctypes.data, loops.nbytes))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for the result of a kernel."""
    for recording in _current_recordings:
        return recording.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def keep(array: Array) -> Array:
    """The array, which a recording keeps."""
    for recording in _current_recordings:
        recording.keep(array)
    return array


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, copied if need be, which is no loop."""
    if not tensor.is_contiguous():
        refuse_recording()
    return tensor.contiguous()


def call(function: Callable[..., object], *tensors: Tensor) -> None:
    """Call a function, which calls no kernels, now and, if a recording is being made, at this point
    of each replay.
    """
    for recording in _current_recordings:
        recording.add_call(function, *tensors)
    function(*tensors)


def refuse_recording() -> None:
    """The recording that is being made, if any, lacks what follows."""
    for recording in _current_recordings:
        recording.is_complete = False


def run_once() -> None:
    """Compile what replays, or load it from the cache."""
    replay_loops(0, 0)


def _run(_loops: object, address: int, num_bytes: int) -> None:
    if replay_loops(address, address + num_bytes):
        raise RuntimeError("a task of a recorded loop raised an error")
