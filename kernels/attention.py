"""Paged attention: each query attends to its own sequence's keys and values, found through a block table.

One call for every batch: prefill with or without a cached prefix, decode, and mixtures. Row b has
`query_len` queries and `seq_len` tokens; its query i stands at position `seq_len - query_len + i` and attends to
positions 0 up to its own. Reads only the cache: the step's own keys and values were stored before.
Legend: T tokens of the step, B rows, H query heads of this rank, K its KV heads, G = H / K, D head dim, N blocks,
P block size, W blocks of a row, Q queries of a row, S tokens of a row. Caches are token-major, [N, P, K, D].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from kernels.metadata import AttentionMetadata


def paged_attention_reference(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention output [T, H, D] in the dtype of the queries; float32 inside. Row by row, on any device."""
    out_THD = torch.zeros_like(q_THD)
    starts = attn.query_start_B1.tolist()
    for row, seq_len in enumerate(attn.seq_lens_B.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        k_SHD, v_SHD = (
            _gather(cache, attn.block_table_BW[row : row + 1], seq_len)[0]
            .to(torch.float32)
            .repeat_interleave(q_THD.shape[1] // cache.shape[2], dim=1)
            for cache in (k_cache_NPKD, v_cache_NPKD)
        )
        scores_HQS = torch.einsum("qhd,shd->hqs", q_THD[start:end].to(torch.float32), k_SHD) * scale
        scores_HQS.masked_fill_(~causal_mask(end - start, seq_len, q_THD.device), -torch.inf)
        out_THD[start:end] = torch.einsum("hqs,shd->qhd", scores_HQS.softmax(dim=-1), v_SHD).to(q_THD.dtype)
    return out_THD


def causal_mask(query_len: int, seq_len: int, device: torch.device) -> torch.Tensor:
    """Bool [Q, S], true where query i, which stands at `seq_len - query_len + i`, may look."""
    return torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril_(seq_len - query_len)


def paged_attention_cpu(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """As the reference, through `scaled_dot_product_attention`: rows of one query in groups, the others one by one."""
    out_THD = torch.zeros_like(q_THD)
    starts, seq_lens = attn.query_start_B1.tolist(), attn.seq_lens_B.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    token_size = k_cache_NPKD.shape[2] * k_cache_NPKD.shape[3]
    single = [row for row, query_len in enumerate(query_lens) if query_len == 1]
    for group in _groups(single, seq_lens, _GATHERED_ELEMENTS // token_size):
        tokens, max_seq_len = [starts[row] for row in group], seq_lens[group[0]]
        k_BSKD, v_BSKD = (_gather(c, attn.block_table_BW[group], max_seq_len) for c in (k_cache_NPKD, v_cache_NPKD))
        out_THD[tokens] = _decode(q_THD[tokens], k_BSKD, v_BSKD, attn.seq_lens_B[group], scale)
    for row, query_len in enumerate(query_lens):
        if query_len > 1:
            table_1W = attn.block_table_BW[row : row + 1]
            k_1SKD, v_1SKD = (_gather(c, table_1W, seq_lens[row]) for c in (k_cache_NPKD, v_cache_NPKD))
            queries = slice(starts[row], starts[row + 1])
            out_THD[queries] = _prefill(q_THD[queries], k_1SKD, v_1SKD, scale)
    return out_THD


# Keys gathered at once: 2 MiB of float32. Larger gathers leave the processor's cache and get fresh pages each time:
# without a limit, 64 rows of 512 tokens took five times as long. Smaller ones pay for a call a row.
_GATHERED_ELEMENTS = 1 << 19


def _groups(rows: list[int], seq_lens: list[int], max_tokens: int) -> list[list[int]]:
    """The rows, longest first, in groups that are gathered together: at most `max_tokens` padded, or a single row."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -seq_lens[row]):
        if groups and (len(groups[-1]) + 1) * seq_lens[groups[-1][0]] <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _gather(cache_NPKD: torch.Tensor, block_table_BW: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """The first `max_seq_len` tokens of each sequence, [B, S, K, D]; beyond a sequence's own length, anything."""
    num_blocks = -(-max_seq_len // cache_NPKD.shape[1])
    blocks = cache_NPKD.index_select(0, block_table_BW[:, :num_blocks].flatten())
    return blocks.view(len(block_table_BW), -1, *cache_NPKD.shape[2:])[:, :max_seq_len]


def _decode(
    q_BHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor, seq_lens_B: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a row. The G query heads of a KV head go in as G queries, so nothing is repeated in memory."""
    batch, heads, head_dim = q_BHD.shape
    max_seq_len, kv_heads = k_BSKD.shape[1:3]
    seen_B11S = None
    if batch > 1:
        seen_B11S = (torch.arange(max_seq_len, device=q_BHD.device) < seq_lens_B[:, None])[:, None, None]
    out_BKGD = functional.scaled_dot_product_attention(
        q_BHD.reshape(batch, kv_heads, heads // kv_heads, head_dim),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        attn_mask=seen_B11S,
        scale=scale,
    )
    return out_BKGD.reshape(batch, heads, head_dim)


def _prefill(q_QHD: torch.Tensor, k_1SKD: torch.Tensor, v_1SKD: torch.Tensor, scale: float) -> torch.Tensor:
    """A row of many queries, in blocks that look no further than their last query: half the work of the full square.

    PyTorch's own causal flag skips in coarser steps and takes no prefix.
    """
    query_len, seq_len = len(q_QHD), k_1SKD.shape[1]
    width = 64 if seq_len <= 768 else 256
    out_QHD = torch.empty_like(q_QHD)
    for start in range(0, query_len, width):
        end = min(start + width, query_len)
        visible = seq_len - query_len + end
        out_1HQD = functional.scaled_dot_product_attention(
            q_QHD[None, start:end].transpose(1, 2),
            k_1SKD[:, :visible].transpose(1, 2),
            v_1SKD[:, :visible].transpose(1, 2),
            attn_mask=causal_mask(end - start, visible, q_QHD.device),
            scale=scale,
            enable_gqa=q_QHD.shape[1] != k_1SKD.shape[2],
        )
        out_QHD[start:end] = out_1HQD[0].transpose(0, 1)
    return out_QHD
