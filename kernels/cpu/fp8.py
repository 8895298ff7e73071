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
_FLOAT32_BY_CODE = np.where(_CODES & 0x7F == 0x7F, np.float32(np.nan), _HALVES * np.float32(256))
_BFLOAT16_BY_CODE = (_FLOAT32_BY_CODE.view(np.uint32) >> 16).astype(np.uint16)


def to_cache_dtype(value: Any, target_element: Any) -> Any:
    """An element of a kernel's array, converted to the type of `target_element`, one of a cache."""
    raise NotImplementedError("for compiled code")


# The signatures must match exactly, so none is annotated.
@overload(to_cache_dtype, inline="always")
def _to_cache_dtype(value, target_element):  # type: ignore[no-untyped-def]
    if target_element == types.uint8:
        return lambda value, target_element: narrow(widen(value), target_element)
    return lambda value, target_element: value


def from_cache_dtype(block: Array, target_array: Array) -> Array:
    """A block of a cache, converted to the element type of `target_array` and contiguous; the
    block itself if it has that type already.
    """
    raise NotImplementedError("for compiled code")


@overload(from_cache_dtype, inline="always")
def _from_cache_dtype(block, target_array):  # type: ignore[no-untyped-def]
    if block.dtype != types.uint8:
        return lambda block, target_array: block
    value_by_code = _BFLOAT16_BY_CODE if target_array.dtype == types.uint16 else _FLOAT32_BY_CODE

    def convert_block(block, target_array):  # type: ignore[no-untyped-def]
        out = np.empty(block.shape, target_array.dtype)
        codes, values = block.ravel(), out.ravel()
        for i in range(len(codes)):
            values[i] = value_by_code[codes[i]]
        return out

    return convert_block
