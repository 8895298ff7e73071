"""The table of rotary embeddings: cosines and sines of every position, for each supported kind of
scaling.

Computes the numbers of transformers' `modeling_rope_utils` in the same order of operations, in
float32. Kinds: default (Su et al. 2021, arXiv:2104.09864), linear (positions divided by the
factor), YaRN (Peng et al. 2023, arXiv:2309.00071), and dynamic, which equals the default up to the
original length; the configuration refuses longer sequences. Built once per rank. Legend: L
positions, D head dim, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.model import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> Tensor:
    """float32 [L, D]: cosines in the first half of each row, sines in the second, times the
    scaling's attention factor.

    Computed on the host, so that every rank and device has the same bits. The angles are float32,
    as in the reference; their cosines and sines are taken in float64 and rounded, because the first
    float32 `cos` or `sin` of a process may return low-accuracy values (errors to 1.5e-4) when it
    runs on several threads, and this table is that first call.
    """
    frequencies_F, attention_factor = rotary_frequencies(rope, head_dim)
    angles_LF = (torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequencies_F).to(
        torch.float64
    )
    cos_sin_LD = torch.cat((angles_LF.cos(), angles_LF.sin()), dim=1).to(torch.float32)
    return cos_sin_LD.mul_(attention_factor).to(device)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """(float32 [F] radians per position, factor on cosines and sines)."""
    positions_per_radian_F = rope.theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    )
    if rope.rope_type == "linear":
        return 1.0 / positions_per_radian_F / rope.factor, 1.0
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, head_dim, positions_per_radian_F), yarn_attention_factor(
            rope
        )
    assert rope.rope_type in ("default", "dynamic"), rope.rope_type
    return 1.0 / positions_per_radian_F, 1.0


def yarn_attention_factor(rope: RopeConfig) -> float:
    """The checkpoint's `attention_factor`, else from `mscale` over `mscale_all_dim`, else 0.1
    ln(factor) + 1.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_frequencies(rope: RopeConfig, head_dim: int, positions_per_radian_F: Tensor) -> Tensor:
    """Fast frequencies unchanged, slow ones divided by the factor, and a linear ramp between the
    two.
    """
    ramp_start, ramp_end = (
        _feature_of_rotations(rope, head_dim, rotations)
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        ramp_start, ramp_end = math.floor(ramp_start), math.ceil(ramp_end)
    ramp_start, ramp_end = max(ramp_start, 0), min(ramp_end, head_dim - 1)
    if ramp_start == ramp_end:
        ramp_end += 0.001  # a ramp of zero width would divide by zero
    ramp_F = (
        (torch.arange(head_dim // 2, dtype=torch.float32) - ramp_start) / (ramp_end - ramp_start)
    ).clamp(0, 1)
    unscaled_share_F = 1 - ramp_F
    return (
        1.0 / (rope.factor * positions_per_radian_F) * (1 - unscaled_share_F)
        + 1.0 / positions_per_radian_F * unscaled_share_F
    )


def _feature_of_rotations(rope: RopeConfig, head_dim: int, rotations: float) -> float:
    """The (fractional) feature that completes `rotations` turns over the original length."""
    positions_per_radian = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))
