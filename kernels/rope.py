"""QK-norm and rotary embedding: what happens to queries and keys between projection and attention.

Per-head RMSNorm, then the rotation of Su et al. 2021 (arXiv:2104.09864) in the half-split pairing of transformers:
feature d turns with feature d + D/2. The rotation is computed in float32 and rounded once.
Legend: T tokens, H query heads of this rank, K its KV heads, D head dim, L positions of the table.
`cos_sin_LD` is float32: cosines in the first D/2 columns, sines in the last.
"""

from __future__ import annotations

import torch

from kernels.norm import rms_norm_cpu, rms_norm_reference


def qk_norm_rope_reference(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    eps: float,
    cos_sin_LD: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised and rotated (queries, keys), in the dtypes of the inputs, which stay unchanged. On any device."""
    cos_T1E, sin_T1E = cos_sin_LD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    q_THD = _rotate(rms_norm_reference(q_THD, q_weight_D, eps), cos_T1E, sin_T1E)
    k_TKD = _rotate(rms_norm_reference(k_TKD, k_weight_D, eps), cos_T1E, sin_T1E)
    return q_THD, k_TKD


def qk_norm_rope_cpu(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    eps: float,
    cos_sin_LD: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, with both halves written straight to their place."""
    cos_T1E, sin_T1E = cos_sin_LD.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
    q_THD = _rotate_in_place(rms_norm_cpu(q_THD, q_weight_D, eps), cos_T1E, sin_T1E)
    k_TKD = _rotate_in_place(rms_norm_cpu(k_TKD, k_weight_D, eps), cos_T1E, sin_T1E)
    return q_THD, k_TKD


def _rotate(x_THD: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    low_THE, high_THE = x_THD.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat((low_THE * cos_T1E - high_THE * sin_T1E, high_THE * cos_T1E + low_THE * sin_T1E), dim=-1)
    return turned.to(x_THD.dtype)


def _rotate_in_place(x_THD: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    low_THE, high_THE = x_THD.chunk(2, dim=-1)
    turned_low = (low_THE * cos_T1E).sub_(high_THE * sin_T1E)  # float32: the table is
    turned_high = (high_THE * cos_T1E).add_(low_THE * sin_T1E)
    low_THE.copy_(turned_low)
    high_THE.copy_(turned_high)
    return x_THD
