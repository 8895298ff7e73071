"""What a KV cache on a GPU keeps, and how it is read. 8-bit numbers are those of
`kernels/reference/fp8.py` on any chip. They are converted by instructions where there are some
(compute capability 8.9), else by arithmetic on their bits.

Only finite numbers are kept: behind the end of a row, flash-attn multiplies what an earlier owner
has left by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def has_instructions(device: torch.device) -> bool:
    """Whether a chip converts e4m3 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def stored_as(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `stored_as` of the reference; NaN becomes 0, and so do infinities of more than 8 bits."""
    if dtype == tl.uint8:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # From the smallest normal number on: round to three bits of mantissa, correct the bias.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below it: in units of 2**-9, the value of the last bit of 2**14.
        units = magnitude.to(tl.float32, bitcast=True) + 16384.0
        code = tl.where(
            magnitude < 0x3C800000, units.to(tl.int32, bitcast=True) - 0x46800000, normal
        )
        code = tl.where(magnitude > 0x7F800000, 0, tl.minimum(code, 0x7E))
        stored = (((bits >> 24) & 0x80) | code).to(tl.uint8)
    else:
        stored = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(dtype)
    return stored


@triton.jit
def loaded(stored, dtype: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a cache keeps, in the dtype of the queries."""
    if stored.dtype == tl.uint8:
        if NATIVE:
            values = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            # float16 has one bit of exponent more, so its bias is larger by 8.
            bits = stored.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16)
            values = (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        values = stored
    return values
