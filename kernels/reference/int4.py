"""Products with weights of 4-bit codes that share scales and zero points in groups of inputs
("W4A16"). The input is not quantized.

    weight[y, x] = (code[y, x] - zero[y, group of x]) * scale[y, group of x]

Legend: T tokens, X features in, Y features out, G groups, W words of eight inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import Int4Weight

# Where the codes of consecutive inputs lie in a word: two consecutive inputs in its two halves.
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
CODES_PER_WORD = len(SHIFTS)
MAX_CODE, MIDDLE = 15, 8
_SMALLEST_STEP = 1e-30  # of groups of zeros


def shifts_on(device: torch.device) -> Tensor:
    """`SHIFTS`, int32, computed there: a copy from the host could be no part of a CUDA graph."""
    place = torch.arange(CODES_PER_WORD, dtype=torch.int32, device=device)
    return place % 2 * 16 + place // 2 * 4


def pack_codes(codes_YX: Tensor) -> Tensor:
    """int32 [Y, W] of codes from 0 to 15; X is a multiple of 8."""
    codes_YW8 = codes_YX.to(torch.int32).unflatten(1, (-1, len(SHIFTS)))
    words_YW = torch.zeros(codes_YW8.shape[:2], dtype=torch.int32)
    for i, shift in enumerate(SHIFTS):
        words_YW |= codes_YW8[:, :, i] << shift
    return words_YW


def quantize_groups(values_YX: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [Y, X], zero points, uint8 [Y, G], and scales, bfloat16 [Y, G]) nearest to the
    values: between the smallest number of a group and the largest one, with 0 among them.
    """
    values_YGX = values_YX.to(torch.float32).unflatten(1, (-1, group_size))
    lowest_YG, highest_YG = values_YGX.amin(2).clamp(max=0), values_YGX.amax(2).clamp(min=0)
    scale_YG = ((highest_YG - lowest_YG) / MAX_CODE).to(torch.bfloat16)
    step_YG1 = scale_YG.to(torch.float32).clamp(min=_SMALLEST_STEP).unsqueeze(2)
    zeros_YG1 = torch.round(-lowest_YG.unsqueeze(2) / step_YG1).clamp(0, MAX_CODE)
    codes_YGX = torch.round(values_YGX / step_YG1 + zeros_YG1).clamp(0, MAX_CODE)
    return codes_YGX.flatten(1), zeros_YG1.squeeze(2).to(torch.uint8), scale_YG


def widened(weight: Int4Weight) -> Tensor:
    """The values in float32, [Y, X], exactly, of a weight that is not packed."""
    shifts = shifts_on(weight.words_YW.device)
    codes_YX = ((weight.words_YW.unsqueeze(2) >> shifts) & 15).flatten(1)
    group_size = codes_YX.shape[1] // weight.zeros_YG.shape[1]
    zeros_YX, scale_YX = (
        table_YG.repeat_interleave(group_size, 1) for table_YG in (weight.zeros_YG, weight.scale_YG)
    )
    return (codes_YX - zeros_YX).to(torch.float32) * scale_YX.to(torch.float32)


class ReferenceInt4:
    """`Int4Kernels` in plain PyTorch, on any device."""

    def first_step(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Nothing to compile."""
        return []

    def pack_weight(self, weight: Int4Weight, /) -> Int4Weight:
        """The weight, unchanged."""
        return weight

    def linear(self, x_TX: Tensor, weight: Int4Weight, bias_Y: Tensor | None, /) -> Tensor:
        """[T, Y] in the dtype of x, with sums in float32."""
        out_TY = x_TX.to(torch.float32) @ widened(weight).T
        if bias_Y is not None:
            out_TY = out_TY + bias_Y.to(torch.float32)
        return out_TY.to(x_TX.dtype)
