"""Kernels that are called once and then replayed, as a GPU's graphs are.

With few rows, what Python does around a kernel takes as long as a small kernel runs. But all that a
kernel of this backend computes are loops over tasks (`parallel.py`), and the arguments of a loop
are addresses, shapes and numbers. So a recording is the list of loops, written down as they begin,
between calls of Python that were handed to `call`; and the tensors in which they read and write,
which stay where they are. Replaying runs the loops on what the tensors contain then.

What is no loop is not recorded: a product of oneDNN's says so with `refuse`, and other operations
of torch must go through `call`. One thread makes recordings and calls kernels meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from kernels.cpu.jit import kept_tensors
from kernels.cpu.pool import run_again, write_down

_MAX_WORDS = 1 << 15  # of the loops between two calls; a layer has some 600

_current: list[Recording] = []  # at most one


class Recording:
    """As a context, records the kernels that are called; then `replay` can be called."""

    def __init__(self) -> None:
        self.is_complete = True
        self._parts: list[Callable[[], object]] = []
        self._tensors: list[Tensor] = []
        self._memory = np.empty(_MAX_WORDS, np.int64)

    def __enter__(self) -> Recording:
        assert not _current, "a recording within another"
        _current.append(self)
        kept_tensors.append(self._tensors)
        write_down(self._memory)
        return self

    def __exit__(self, *_: object) -> None:
        _current.clear()
        kept_tensors.clear()
        self._end_part()
        write_down(None)

    def replay(self) -> None:
        """Run everything again. Raises `RuntimeError` if a task does."""
        for part in self._parts:
            part()

    def then(self, function: Callable[[], object]) -> None:
        """Have the replay call the function at this point."""
        self._end_part()
        self._parts.append(function)

    def _end_part(self) -> None:
        num_bytes = write_down(self._memory) - self._memory.ctypes.data
        if num_bytes:
            loops = self._memory[: num_bytes // 8].copy()
            self._parts.append(partial(_run, loops, loops.ctypes.data, loops.nbytes))


def call(function: Callable[[], object]) -> None:
    """Call a function now and, if a recording is being made, at this point of each replay."""
    for recording in _current:
        recording.then(function)
    function()


def refuse() -> None:
    """The recording that is being made, if any, lacks what follows."""
    for recording in _current:
        recording.is_complete = False


def run_once() -> None:
    """Compile what replays, or load it from the cache."""
    run_again(0, 0)


def _run(_loops: object, address: int, num_bytes: int) -> None:
    if run_again(address, address + num_bytes):
        raise RuntimeError("a task of a recorded loop raised an error")
