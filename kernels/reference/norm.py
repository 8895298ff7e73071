"""RMSNorm, alone and with the residual addition before it.

Numerics of the Qwen3 layer of transformers (Zhang and Sennrich 2019, arXiv:1910.07467): mean square
and scaling in float32, back to the dtype of the input, then the weight. Legend: `x` is [..., E]
with E features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x**2) + eps)` over the last dimension, in the dtype of `x`. On any
    device.
    """
    x_float32 = x.to(torch.float32)
    scale = torch.rsqrt(x_float32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight_E * (x_float32 * scale).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(`rms_norm(x + residual)`, `x + residual`). Neither input is changed."""
    total = x + residual
    return rms_norm_reference(total, weight_E, eps), total
