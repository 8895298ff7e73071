"""The numbers of `kernels/reference/fp8.py` in numba: what a cache of 8-bit numbers keeps, and how
it is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from kernels.cpu.jit import Array, narrow, widen
from kernels.reference.fp8 import from_fp8

# Every number, by its code.
_FLOAT32 = from_fp8(torch.arange(256, dtype=torch.uint8)).numpy()
_BFLOAT16 = torch.from_numpy(_FLOAT32).to(torch.bfloat16).view(torch.uint16).numpy()


def stored_as(value: Any, like: Any) -> Any:
    """An element of a kernel's array as an element of a cache that holds `like`."""
    raise NotImplementedError("for compiled code")


@overload(stored_as, inline="always")  # the signatures must match exactly, so none is annotated
def _stored_as(value, like):  # type: ignore[no-untyped-def]
    if like == types.uint8:
        return lambda value, like: narrow(widen(value), like)
    return lambda value, like: value


def loaded(block: Array, like: Array) -> Array:
    """A block of a cache with elements as in `like`, contiguous; the block itself if it has
    them.
    """
    raise NotImplementedError("for compiled code")


@overload(loaded)
def _loaded(block, like):  # type: ignore[no-untyped-def]
    if block.dtype != types.uint8:
        return lambda block, like: block
    table = _BFLOAT16 if like.dtype == types.uint16 else _FLOAT32

    def unpacked(block, like):  # type: ignore[no-untyped-def]
        out = np.empty(block.shape, like.dtype)
        codes, numbers = block.ravel(), out.ravel()
        for i in range(len(codes)):
            numbers[i] = table[codes[i]]
        return out

    return unpacked
