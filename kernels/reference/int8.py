"""Products of 8-bit codes: both operands quantized, with one scale per output feature of the weight
and one per row of the input ("W8A8", the weights' scales static, those of the inputs dynamic; as
in the int-quantized format of github.com/neuralmagic/compressed-tensors).

    code = round(127 * value / largest magnitude of the row), ties to even
    scale = largest magnitude of the row / 127
    product = (sum of products of codes) * scale of the output feature * scale of the row

The sum is an integer, so it is exact in any order. It becomes float32 by rounding to nearest, then
each multiplication rounds, from left to right.

Legend: T tokens, X features in, Y features out, M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import GroupedCodes
from kernels.reference.grouped import ReferenceGrouped

MAX_CODE = 127
# Rows without a larger number become zeros, because their factor would overflow.
MIN_MAGNITUDE = 1e-30


def quantize_rows(x_MX: Tensor, max_magnitude_M: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes, int8 [M, X]; scales, float32 [M]). `max_magnitude_M`: largest magnitudes of rows of
    which `x_MX` is only a part.
    """
    float_x_MX = x_MX.to(torch.float32)
    if max_magnitude_M is None:
        max_magnitude_M = float_x_MX.abs().amax(dim=1)
    max_magnitude_M = max_magnitude_M.to(torch.float32)
    # Not MAX_CODE / max_magnitude_M, which torch computes with the reciprocal: that rounds twice.
    factor_M = torch.where(
        max_magnitude_M > MIN_MAGNITUDE,
        torch.full_like(max_magnitude_M, MAX_CODE) / max_magnitude_M,
        0.0,
    )
    codes_MX = torch.round(float_x_MX * factor_M.unsqueeze(1)).to(torch.int8)
    return codes_MX, max_magnitude_M / MAX_CODE


class ReferenceInt8(ReferenceGrouped):
    """`QuantizedKernels` in plain PyTorch, on any device, for "int8"."""

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """[T, Y] in the dtype of x. Sums in float64, which are exact below 2**53."""
        codes_TX, scale_T = quantize_rows(x_TX)
        sums_TY = codes_TX.to(torch.float64) @ weight.words.to(torch.float64).T
        out_TY = sums_TY.to(torch.float32) * weight.scale.squeeze(1) * scale_T.unsqueeze(1)
        if bias_Y is not None:
            out_TY = out_TY + bias_Y.to(torch.float32)
        return out_TY.to(x_TX.dtype)
