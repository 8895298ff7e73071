"""The numbers of `kernels/reference/fp8.py` in numba: what a cache of 8-bit numbers keeps, and how
it is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from kernels.cpu.jit import Array, narrow, widen

# Every number, by its code: float16 has one bit of exponent more, so its bias is larger by 8. In
# numpy, because an operation of torch here would start its threads before a rank has set their
# number.
_CODES = np.arange(256, dtype=np.uint16)
_HALVES = ((_CODES & 0x80) << 8 | (_CODES & 0x7F) << 7).view(np.float16)
_FLOAT32 = np.where(_CODES & 0x7F == 0x7F, np.float32(np.nan), _HALVES * np.float32(256))
_BFLOAT16 = (_FLOAT32.view(np.uint32) >> 16).astype(np.uint16)


def stored_as(value: Any, like: Any) -> Any:
    """An element of a kernel's array, converted to the element type of `like`, a cache."""
    raise NotImplementedError("for compiled code")


@overload(stored_as, inline="always")  # the signatures must match exactly, so none is annotated
def _stored_as(value, like):  # type: ignore[no-untyped-def]
    if like == types.uint8:
        return lambda value, like: narrow(widen(value), like)
    return lambda value, like: value


def loaded(block: Array, like: Array) -> Array:
    """A block of a cache, converted to the element type of `like` and contiguous; the block itself
    if it has that type already.
    """
    raise NotImplementedError("for compiled code")


@overload(loaded, inline="always")
def _loaded(block, like):  # type: ignore[no-untyped-def]
    if block.dtype != types.uint8:
        return lambda block, like: block
    value_by_code = _BFLOAT16 if like.dtype == types.uint16 else _FLOAT32

    def unpacked(block, like):  # type: ignore[no-untyped-def]
        out = np.empty(block.shape, like.dtype)
        codes, values = block.ravel(), out.ravel()
        for i in range(len(codes)):
            values[i] = value_by_code[codes[i]]
        return out

    return unpacked
