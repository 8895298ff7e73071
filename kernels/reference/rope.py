"""QK-norm and rotary embedding: what happens to queries and keys between projection and attention.

Per-head RMSNorm, then the rotation of Su et al. 2021 (arXiv:2104.09864) in the half-split pairing
of transformers: feature d is rotated with feature d + D/2. The rotation is computed in float32 and
rounded once.
Legend: T tokens, H query heads of this rank, K its KV heads, X = H + 2K, D head dim, N blocks, P
block size, L positions of the table, E = D / 2.
`cos_sin_LD` is float32: cosines in the first D/2 columns, sines in the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.kv_store import store_kv_reference
from kernels.reference.norm import rms_norm_reference


def qk_norm_rope_reference(
    q_THD: Tensor,
    k_TKD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Normalized and rotated (queries, keys), in the dtypes of the inputs, which stay unchanged. On
    any device.
    """
    cos_T1E, sin_T1E = cos_sin_LD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    q_THD = _rotate(rms_norm_reference(q_THD, q_weight_D, eps), cos_T1E, sin_T1E)
    k_TKD = _rotate(rms_norm_reference(k_TKD, k_weight_D, eps), cos_T1E, sin_T1E)
    return q_THD, k_TKD


def qk_norm_rope_store_reference(
    qkv_TXD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    kv_places_T: Tensor,
) -> Tensor:
    """Queries [T, H, D] out of one projection of queries, keys and values; keys and values go to
    the caches, in place.

    The caches are token-major, [N, P, K, D] (see `store_kv_reference`). On any device, but
    not in a CUDA graph.
    """
    num_kv_heads = k_cache_NPKD.shape[2]
    q_THD, k_TKD, v_TKD = qkv_TXD.split(
        (qkv_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1
    )
    q_THD, k_TKD = qk_norm_rope_reference(
        q_THD, k_TKD, q_weight_D, k_weight_D, eps, cos_sin_LD, positions_T
    )
    store_kv_reference(k_TKD, v_TKD, k_cache_NPKD, v_cache_NPKD, kv_places_T)
    return q_THD


def _rotate(x_THD: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    low_THE, high_THE = x_THD.to(torch.float32).chunk(2, dim=-1)
    rotated = torch.cat(
        (low_THE * cos_T1E - high_THE * sin_T1E, high_THE * cos_T1E + low_THE * sin_T1E), dim=-1
    )
    return rotated.to(x_THD.dtype)
