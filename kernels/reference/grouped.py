"""Products with weights of codes that share scales in groups of inputs. The input is not quantized.

    "int4": weight[y, x] = (code[y, x] - zero[y, group of x]) * scale[y, group of x]
    "fp8":  weight[y, x] = code[y, x] * scale[y, group of x]

Legend: T tokens, X features in, Y features out, G groups, W words of one or more inputs, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import GroupedCodes
from kernels.reference.fp8 import MAX_FP8, from_fp8, to_fp8

# Where the codes of consecutive inputs lie in a word: two consecutive inputs in its two halves.
INT4_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
INT4_CODES_PER_WORD = len(INT4_SHIFTS)
MAX_INT4_CODE, MIDDLE_INT4_CODE = 15, 8  # CPU kernels multiply codes less the middle one
FP8_SCALE_BLOCK_ROWS = 128  # output features per scale, where a rank rounds weights to e4m3
_MIN_SCALE = 2.0**-100  # of groups of zeros too; every dtype of scales but float16 holds it


def int4_device_shifts(device: torch.device) -> Tensor:
    """`INT4_SHIFTS`, int32, computed there: a copy from the host could be no part of a
    CUDA graph.
    """
    place = torch.arange(INT4_CODES_PER_WORD, dtype=torch.int32, device=device)
    return place % 2 * 16 + place // 2 * 4


def pack_codes(codes_YX: Tensor) -> Tensor:
    """int32 [Y, W] of codes from 0 to 15, in the order of `INT4_SHIFTS`; X is a multiple of 8."""
    codes_YW = codes_YX.to(torch.uint8).contiguous().view(torch.int64)  # a code per byte
    halves_YW = []
    for first_bit in (0, 8):  # every other code
        spread_YW = codes_YW >> first_bit & 0x000F_000F_000F_000F
        spread_YW |= spread_YW >> 12  # bits 16 and 48 to 4 and 36
        spread_YW |= spread_YW >> 24  # and these two halves to bits 0 and 8
        halves_YW.append(spread_YW & 0xFFFF)
    return (halves_YW[0] | halves_YW[1] << 16).to(torch.int32)


def quantize_groups(values_YX: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [Y, X], zero points, uint8 [Y, G], and scales, bfloat16 [Y, G]) nearest to the
    values: between the smallest number of a group and the largest one, with 0 among them.
    """
    values_YGX = values_YX.to(torch.float32).unflatten(1, (-1, group_size))
    min_value_YG, max_value_YG = values_YGX.amin(2).clamp(max=0), values_YGX.amax(2).clamp(min=0)
    scale_YG = (
        ((max_value_YG - min_value_YG) / MAX_INT4_CODE).clamp(min=_MIN_SCALE).to(torch.bfloat16)
    )
    scale_YG1 = scale_YG.to(torch.float32).unsqueeze(2)
    zeros_YG1 = torch.round(-min_value_YG.unsqueeze(2) / scale_YG1).clamp(0, MAX_INT4_CODE)
    codes_YGX = torch.round(values_YGX / scale_YG1 + zeros_YG1).clamp(0, MAX_INT4_CODE)
    return codes_YGX.flatten(1), zeros_YG1.squeeze(2).to(torch.uint8), scale_YG


def quantize_blocks(values_YX: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """(e4m3 codes, uint8 [Y, X], and scales, float32 [Y, G]) nearest to the values: of
    `FP8_SCALE_BLOCK_ROWS` rows and `group_size` inputs, the largest number becomes the largest
    code.
    """
    num_rows = len(values_YX)
    values_YGX = values_YX.to(torch.float32).unflatten(1, (-1, group_size))
    max_magnitude_YG = functional.pad(
        values_YGX.abs().amax(2), (0, 0, 0, -num_rows % FP8_SCALE_BLOCK_ROWS)
    )
    scale_BG = max_magnitude_YG.unflatten(0, (-1, FP8_SCALE_BLOCK_ROWS)).amax(1) / MAX_FP8
    scale_YG = scale_BG.clamp(min=_MIN_SCALE).repeat_interleave(FP8_SCALE_BLOCK_ROWS, 0)[:num_rows]
    return to_fp8(values_YGX / scale_YG.unsqueeze(2)).flatten(1), scale_YG


def dequantize(weight: GroupedCodes) -> Tensor:
    """The values, [Y, X], of a weight that is not packed: those of 4-bit codes exactly, others
    rounded to float32.
    """
    group_shape = weight.scale.shape[1], -1
    if weight.zeros is None:
        is_int8 = weight.words.dtype is torch.int8
        numbers_YX = weight.words if is_int8 else from_fp8(weight.words)
        unscaled_YGX = numbers_YX.unflatten(1, group_shape)
    else:
        shifts = int4_device_shifts(weight.words.device)
        codes_YX = ((weight.words.unsqueeze(2) >> shifts) & MAX_INT4_CODE).flatten(1)
        unscaled_YGX = codes_YX.unflatten(1, group_shape) - weight.zeros.unsqueeze(2)
    scale_YG1 = weight.scale.to(torch.float32).unsqueeze(2)
    values_YGX: Tensor = unscaled_YGX.to(torch.float32) * scale_YG1
    return values_YGX.flatten(1)


class ReferenceGrouped:
    """`QuantizedKernels` in plain PyTorch, on any device, for "int4" and "fp8"."""

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Nothing to compile."""
        return []

    def pack_weight(self, weight: GroupedCodes, /) -> GroupedCodes:
        """The weight, unchanged."""
        return weight

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """[T, Y] in the dtype of x, with sums in float32."""
        out_TY = x_TX.to(torch.float32) @ dequantize(weight).T
        if bias_Y is not None:
            out_TY = out_TY + bias_Y.to(torch.float32)
        return out_TY.to(x_TX.dtype)
