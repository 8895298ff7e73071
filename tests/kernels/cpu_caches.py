"""Converts the CPU's KV caches from and to [N, P, K, D], independently of the kernels that use
them.
"""

from __future__ import annotations

import torch

from kernels.cpu.kv_layout import width


def to_cpu(
    k_NPKD: torch.Tensor, v_NPKD: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches in the layout of CPU kernels for products in `dtype`, by default the caches' own."""
    blocks, size, kv_heads, dim = k_NPKD.shape
    w = width(dtype or k_NPKD.dtype, dim, size)
    k_NKDP, v_NKPD = k_NPKD.permute(0, 2, 3, 1), v_NPKD.permute(0, 2, 1, 3)
    k = k_NKDP.reshape(blocks, kv_heads, dim // w, w, size).transpose(3, 4)
    v = v_NKPD.reshape(blocks, kv_heads, size // w, w, dim).transpose(3, 4)
    return k.reshape(k_NKDP.shape).contiguous(), v.reshape(v_NKPD.shape).contiguous()


def from_cpu(
    k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the caches as [N, P, K, D]."""
    blocks, kv_heads, dim, size = k_cache.shape
    w = width(dtype or k_cache.dtype, dim, size)
    k = k_cache.view(blocks, kv_heads, dim // w, size, w).transpose(3, 4)
    v = v_cache.view(blocks, kv_heads, size // w, dim, w).transpose(3, 4)
    k_NKDP, v_NKPD = k.reshape(k_cache.shape), v.reshape(v_cache.shape)
    return k_NKDP.permute(0, 3, 1, 2).contiguous(), v_NKPD.permute(0, 2, 1, 3).contiguous()
