"""8-bit floating-point numbers of a KV cache, without a scale, and of weights, whose scales are
elsewhere: e4m3, four bits of exponent and three of mantissa (Micikevicius et al. 2022, "FP8 formats
for deep learning", arXiv:2209.05433).

They are held as uint8, since not every library knows the format. The largest number is 448; larger
ones become 448, which is also what NVIDIA's conversion instructions do.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_FP8 = 448.0


def to_fp8(x: Tensor) -> Tensor:
    """The nearest number of 8 bits, ties to even, uint8."""
    codes = x.to(torch.float32).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8)


def from_fp8(codes: Tensor) -> Tensor:
    """The exact value, float32."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of this dtype holds it."""
    return to_fp8(x) if dtype is torch.uint8 else x.to(dtype)


def cache_as_float32(cached_values: Tensor) -> Tensor:
    """Elements of a cache, as float32."""
    is_fp8 = cached_values.dtype is torch.uint8
    return from_fp8(cached_values) if is_fp8 else cached_values.to(torch.float32)
