"""What a KV cache on a GPU keeps, and how it is read. 8-bit numbers are those of
`kernels/reference/fp8.py` on any chip.

Only finite numbers are kept: behind the end of a row, flash-attn multiplies what an earlier owner
has left by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import triton
import triton.language as tl

# How 8-bit numbers are widened; all ways give the same bits.
# "instructions": those of the chip, from compute capability 8.9 on. For float16 that is one per two
#     numbers (F2FP). For bfloat16 it is followed by one per number (F2F) that runs at a quarter of
#     the usual rate or less: about 3.7 TB/s of cache on an H200, whose memory gives 4.8.
# "pairs": the bits of two numbers are moved into place together, by four instructions at full rate.
# "singly": the same for one number at a time, without inline assembly: for the interpreter.
Fp8Widening = Literal["instructions", "pairs", "singly"]


@functools.cache
def choose_fp8_widening(device: torch.device, dtype: torch.dtype) -> Fp8Widening:
    """The way that suits a chip and the dtype of the queries."""
    if device.type != "cuda":
        return "singly"
    has_instructions = torch.cuda.get_device_capability(device) >= (8, 9)
    return "instructions" if has_instructions and dtype is not torch.bfloat16 else "pairs"


def _pair_widening_ptx(type_: str, shift: int, mask: int, scale: int) -> str:
    """PTX that widens four codes, the bytes of $2, to two numbers each in $0 and $1.

    A byte is widened to 16 bits by its sign and shifted, so that exponent and mantissa are in
    place; the mask keeps them and one sign. The bias of the exponent is corrected by a product with
    a power of two, exact also for the subnormal numbers, which these instructions do not flush
    (PTX ISA, "Half precision floating point instructions: fma"). Adding -0 keeps the sign of zeros;
    there is a product alone for bfloat16 only from compute capability 9.0 on.
    """
    lines = [".reg .b32 part, scale, zero;", f"mov.b32 scale, 0x{scale:04X}{scale:04X};"]
    lines.append("mov.b32 zero, 0x80008000;")
    for place, selector in enumerate(("0x9180", "0xB3A2")):
        lines += [
            f"prmt.b32 part, $2, 0, {selector};",
            f"shl.b32 part, part, {shift};",
            f"and.b32 part, part, 0x{mask:04X}{mask:04X};",
            f"fma.rn.{type_} ${place}, part, scale, zero;",
        ]
    return "\n".join(("{", *lines, "}"))


# float16 has one bit of exponent more than e4m3, so its bias is larger by 8; bfloat16 has four
# more, and its bias is larger by 120.
_FLOAT16_PAIR_PTX = tl.constexpr(_pair_widening_ptx("f16x2", shift=7, mask=0xBF80, scale=0x5C00))
_BFLOAT16_PAIR_PTX = tl.constexpr(_pair_widening_ptx("bf16x2", shift=4, mask=0x87F0, scale=0x7B80))


@triton.jit
def to_cache_dtype(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `to_cache_dtype` of the reference; NaN becomes 0, and so do infinities of more than 8
    bits.
    """
    if dtype == tl.uint8:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # From the smallest normal number on: round to three bits of mantissa, correct the bias.
        normal_code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below it: in units of 2**-9, the value of the last bit of 2**14.
        units = magnitude.to(tl.float32, bitcast=True) + 16384.0
        code = tl.where(
            magnitude < 0x3C800000, units.to(tl.int32, bitcast=True) - 0x46800000, normal_code
        )
        code = tl.where(magnitude > 0x7F800000, 0, tl.minimum(code, 0x7E))
        cached_values = (((bits >> 24) & 0x80) | code).to(tl.uint8)
    else:
        cached_values = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(dtype)
    return cached_values


@triton.jit
def from_cache_dtype(cached_values, dtype: tl.constexpr, WIDENING: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a cache keeps, in the dtype of the queries."""
    if cached_values.dtype == tl.uint8:
        if WIDENING == "instructions":
            values = cached_values.to(tl.float8e4nv, bitcast=True).to(dtype)
        elif WIDENING == "pairs":
            if dtype == tl.bfloat16:
                values = tl.inline_asm_elementwise(
                    _BFLOAT16_PAIR_PTX,
                    "=r,=r,r",
                    [cached_values],
                    dtype=tl.bfloat16,
                    is_pure=True,
                    pack=4,
                )
            else:
                values = tl.inline_asm_elementwise(
                    _FLOAT16_PAIR_PTX,
                    "=r,=r,r",
                    [cached_values],
                    dtype=tl.float16,
                    is_pure=True,
                    pack=4,
                ).to(dtype)
        else:
            bits = cached_values.to(tl.uint16)
            half_bits = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16)
            values = (half_bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        values = cached_values
    return values
