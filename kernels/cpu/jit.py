"""The common parts of all CPU kernels: numba decorators, bfloat16 as bits, an exponential that
vectorizes.

Kernels take numpy arrays. bfloat16 arrives as the uint16 of its bits (`as_array`), is widened to
float32 on load and rounded once on store. Compiled code is cached (`cache.py`), so it is compiled
once per machine and version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from kernels.cpu.cache import use_content_cache

Array = npt.NDArray[Any]

use_content_cache()

# Reassociation lets sums vectorize and contraction uses fused multiply-add; infinities and NaN keep
# their meaning. Reciprocals stay exact ("arcp" is left out): a processor's estimate of 1 / sqrt(x)
# has different bits on chips of different vendors, and 1 / sqrt(1) must be 1 on all of them.
FAST_MATH = {"contract", "reassoc", "nsz"}
_jit = functools.partial(
    numba.njit, nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True
)
# `exact_*` for loops whose results must not depend on where a loop is cut into vectors: without
# reassociation or contraction. `*_entry_jit` is for what Python calls, since a wrapper for Python
# takes time to compile. `inlined_jit` is for small helpers, and those called in one place: each
# function that is compiled on its own is compiled again as a part of its callers.
exact_entry_jit = _jit
exact_jit = functools.partial(_jit, no_cpython_wrapper=True)
fast_entry_jit = functools.partial(_jit, fastmath=FAST_MATH)
fast_jit = functools.partial(_jit, fastmath=FAST_MATH, no_cpython_wrapper=True)
inlined_jit = functools.partial(numba.njit, inline="always")


def as_array(tensor: Tensor) -> Array:
    """A view of a CPU tensor for a kernel; bfloat16 as uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Reinterpret uint32 bits as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """Reinterpret float32 as its uint32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _make_flip(int_type: type[np.signedinteger[Any]]) -> Callable[[Any], Any]:
    sign_shift = int_type(8 * int_type(0).itemsize - 1)
    magnitude_mask = np.iinfo(int_type).max

    @inlined_jit
    def flip(bits: Any) -> Any:
        return int_type(bits ^ int_type(int_type(bits >> sign_shift) & int_type(magnitude_mask)))

    return flip  # type: ignore[no-any-return]


# From the bits of a float to an integer that is greater for a greater float, and back. A maximum of
# integers vectorizes; one of floats does not, because of NaN.
flip_int16, flip_int32 = _make_flip(np.int16), _make_flip(np.int32)


@inlined_jit
def ordered_bits(value: np.float32) -> np.int32:
    """An int32 that is greater for a greater float."""
    return flip_int32(np.int32(bits_of_float(value)))  # type: ignore[no-any-return]


@inlined_jit
def float_of_ordered_bits(ordered: np.int32) -> np.float32:
    """The inverse of `ordered_bits`."""
    return float_of_bits(np.uint32(flip_int32(ordered)))  # type: ignore[no-any-return]


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once, whatever the compiler may contract."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


def widen(value: Any) -> Any:
    """An element of a kernel's array as float32."""
    raise NotImplementedError("for compiled code")


@overload(widen, inline="always")  # the signatures must match exactly, so none is annotated
def _widen(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow(value: Any, target_element: Any) -> Any:
    """float32 converted to the type of `target_element`; bfloat16 and 8-bit numbers
    (`kernels/reference/fp8.py`) round to nearest, ties to even.
    """
    raise NotImplementedError("for compiled code")


@overload(narrow, inline="always")
def _narrow(value, target_element):  # type: ignore[no-untyped-def]
    if target_element == types.uint16:

        def to_bfloat16(value, target_element):  # type: ignore[no-untyped-def]
            bits = bits_of_float(value)
            return np.uint16(
                (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
                >> np.uint32(16)
            )

        return to_bfloat16
    if target_element == types.uint8:

        def to_fp8(value, target_element):  # type: ignore[no-untyped-def]
            bits = np.int64(bits_of_float(value))
            magnitude = bits & 0x7FFFFFFF
            if magnitude < 0x3C800000:  # below the smallest normal number: in units of 2**-9
                units = float_of_bits(np.uint32(magnitude)) + np.float32(16384.0)
                code = np.int64(bits_of_float(units)) - 0x46800000
            else:
                code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
            clamped_code = 0x7F if magnitude > 0x7F800000 else min(int(code), 0x7E)
            return np.uint8(((bits >> 24) & 0x80) | clamped_code)

        return to_fp8
    return lambda value, target_element: value


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_MIN_EXPONENT = np.float32(-87.0)


@inlined_jit
def exp_nonpositive(x: np.float32) -> np.float32:
    """exp(x) for x <= 0, float32, within 2 units in the last place; 0 below -87 (and for -inf).

    Cody and Waite's reduction x = n log 2 + r, then the polynomial of the Cephes library's `expf`
    (Moshier 1989). No branch and no call, so that loops over it vectorize; fused operations are
    explicit, so every loop rounds in the same way.
    """
    clamped_x = max(x, _MIN_EXPONENT)
    n = np.floor(multiply_add(clamped_x, _LOG2_E, np.float32(0.5)))
    r = multiply_add(n, -_LN2_LOW, multiply_add(n, -_LN2_HIGH, clamped_x))
    p = np.float32(1.9875691500e-4)
    p = multiply_add(p, r, np.float32(1.3981999507e-3))
    p = multiply_add(p, r, np.float32(8.3334519073e-3))
    p = multiply_add(p, r, np.float32(4.1665795894e-2))
    p = multiply_add(p, r, np.float32(1.6666665459e-1))
    p = multiply_add(p, r, np.float32(5.0000001201e-1))
    p = multiply_add(p * r, r, r) + np.float32(1.0)
    scale = float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return np.float32(0.0) if x < _MIN_EXPONENT else p * scale
