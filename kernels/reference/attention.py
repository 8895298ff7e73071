"""Paged attention: each query attends to its own sequence's keys and values, found through a block
table.

One call for every batch: prefill with or without a cached prefix, decode, and mixtures. Row b has
`query_len` queries and `seq_len` tokens; its query i is at position `seq_len - query_len + i` and
attends to positions 0 up to its own. Reads only the cache: the keys and values of the step itself
have been stored by then. Legend: T tokens of the step, B rows, H query heads of this rank, K its KV
heads, G = H / K, D head dim, N blocks, P block size, W blocks of a row, Q queries of a row, S
tokens of a row. Caches are token-major, [N, P, K, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.reference.fp8 import cache_as_float32


def paged_attention_reference(
    q_THD: Tensor, k_cache_NPKD: Tensor, v_cache_NPKD: Tensor, attn: AttentionMetadata, scale: float
) -> Tensor:
    """Attention output [T, H, D] in the dtype of the queries; float32 inside. Caches have that
    dtype too, or hold 8-bit numbers (`fp8.py`). Computed row by row, on any device, for whose
    values the host waits: no CUDA graph can hold it.
    """
    out_THD = torch.zeros_like(q_THD)
    query_starts = attn.query_start_B1.tolist()
    for row, seq_len in enumerate(attn.seq_lens_B.tolist()):
        first_query, end_query = query_starts[row], query_starts[row + 1]
        if first_query == end_query:
            continue
        k_SHD, v_SHD = (
            cache_as_float32(_gather(cache, attn.block_table_BW[row], seq_len)).repeat_interleave(
                q_THD.shape[1] // cache.shape[2], dim=1
            )
            for cache in (k_cache_NPKD, v_cache_NPKD)
        )
        scores_HQS = (
            torch.einsum("qhd,shd->hqs", q_THD[first_query:end_query].to(torch.float32), k_SHD)
            * scale
        )
        may_attend_QS = torch.ones(scores_HQS.shape[1:], dtype=torch.bool, device=q_THD.device)
        may_attend_QS.tril_(seq_len - (end_query - first_query))
        scores_HQS.masked_fill_(~may_attend_QS, -torch.inf)
        out_THD[first_query:end_query] = torch.einsum(
            "hqs,shd->qhd", scores_HQS.softmax(dim=-1), v_SHD
        ).to(q_THD.dtype)
    return out_THD


def _gather(cache_NPKD: Tensor, block_table_W: Tensor, seq_len: int) -> Tensor:
    """The tokens of a row, [S, K, D]."""
    num_blocks = -(-seq_len // cache_NPKD.shape[1])
    return cache_NPKD.index_select(0, block_table_W[:num_blocks]).flatten(0, 1)[:seq_len]
