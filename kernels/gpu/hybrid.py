"""Attention by two kernels: Triton's for the rows of one query that the metadata of a step puts
first, FlashAttention-3 for the others.

Both write into one output, and both find queries by their place in the step, so nothing is copied
or shifted. Legend: T tokens of the step, B rows, H query heads of this rank, K its KV heads, D head
dim, N blocks, P block size, W blocks of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.gpu.attention import attend_decode
from kernels.gpu.flash_attn import AttendRows, PagedAttention
from kernels.metadata import AttentionMetadata


def hybrid_attention(attend_rows: AttendRows) -> PagedAttention:
    """`Kernels.paged_attention` with `attend_rows` for the rows after `attn.decode_parts`.

    A row without queries writes nothing, a row without tokens gets zeros, and a token of no row is
    left undefined. Never waits for the device, and launches what depends on shapes and bounds
    alone, so a CUDA graph can hold it.
    """

    def paged_attention(
        q_THD: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
        attn: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        assert q_THD.stride(2) == 1 and attn.block_table_BW.stride(1) == 1
        assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous()
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        inputs = (q_THD, k_cache_NPKD, v_cache_NPKD)
        first_row = 0
        if attn.decode_parts is not None:
            attend_decode(*inputs, out_THD, attn, attn.decode_parts, scale * math.log2(math.e))
            first_row = attn.decode_parts.num_rows
        if first_row < len(attn.seq_lens_B):
            attend_rows(*inputs, out_THD, attn, first_row, scale)
        return out_THD

    return paged_attention
