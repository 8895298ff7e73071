"""FlashAttention-3 under the names and arguments of flash-attn 2, for engines that import that.

Hopper has wheels of FlashAttention-3 alone, whose functions take other arguments and, as fa3-fwd
0.0.3, read pages only under conditions (`kernels/gpu/flash_attn.py`, which is used here). Covered
are the calls that nano-vLLM makes; a keyword that is not covered is refused.
Legend: T tokens of the step, B rows, H query heads, K KV heads, D head dim, N blocks, P tokens of a
block, W blocks of a row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from benchmarks.gpu_check_common import attention_of
from kernels.gpu.flash_attn import PagedAttention, find_flash_attn
from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference

_LIBRARIES = ("flash_attn_interface", "fa3_fwd_interface")
# Two 16-bit results of the same attention differ by rounding alone.
_MOST_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class FlashAttn2:
    """The two functions of flash-attn 2, over a function that reads pages and one that reads keys
    and values in a row.

    packed(q_THD, k_TKD, v_TKD, query_start_B1, key_start_B1, most queries, most keys, scale)
    """

    version: str
    paged: PagedAttention
    packed: Callable[..., torch.Tensor]
    # By number of rows: kept, because a graph that is replayed reads the one it was captured with.
    _starts: dict[int, torch.Tensor] = field(default_factory=dict)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of any length, [T, H, D]. Keys and values [T, K, D], or the caches [N, P, K, D] with
        the table int32 [B, W].
        """
        assert causal
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if block_table is None:
            return self.packed(q, k, v, *bounds, softmax_scale)
        attn = AttentionMetadata(
            query_start_B1=cu_seqlens_q,
            seq_start_B1=cu_seqlens_k,
            seq_lens_B=cu_seqlens_k.diff(),
            block_table_BW=block_table,
            kv_places_T=cu_seqlens_q,  # attention does not read it
            max_query_len=max_seqlen_q,
            max_seq_len=max_seqlen_k,
        )
        return self.paged(q, k, v, attn, softmax_scale)

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> torch.Tensor:
        """One token of each row, [B, 1, H, D], over caches [N, P, K, D]."""
        assert causal and q.shape[1] == 1
        num_rows = len(q)
        if num_rows not in self._starts:
            self._starts[num_rows] = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device)
        attn = AttentionMetadata(
            query_start_B1=self._starts[num_rows],
            seq_start_B1=self._starts[num_rows],  # FlashAttention-3 takes the lengths instead
            seq_lens_B=cache_seqlens,
            block_table_BW=block_table,
            kv_places_T=cache_seqlens,  # attention does not read it
            max_query_len=1,
            max_seq_len=block_table.shape[1] * k_cache.shape[1],
        )
        return self.paged(q.squeeze(1), k_cache, v_cache, attn, softmax_scale).unsqueeze(1)

    def install(self) -> None:
        """Make `import flash_attn` give these functions."""
        module = ModuleType("flash_attn")
        module.__spec__ = ModuleSpec("flash_attn", None)  # who asks whether it is there needs one
        module.flash_attn_varlen_func = self.flash_attn_varlen_func  # type: ignore[attr-defined]
        module.flash_attn_with_kvcache = self.flash_attn_with_kvcache  # type: ignore[attr-defined]
        sys.modules["flash_attn"] = module

    def check(self, device: torch.device, dtype: torch.dtype) -> float:
        """The largest error, relative to the largest value, of each function over random rows and
        shuffled blocks of 256 tokens. Raises `RuntimeError` if one is wrong.
        """
        lens, dims, block_size = (700, 1, 256, 33), (16, 8, 128), 256
        heads, kv_heads, dim = dims
        queries = {"decode": (1, 1, 1, 1), "paged": (44, 1, 3, 33), "packed": lens}
        k_cache, v_cache = (
            torch.randn(16, block_size, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)
        )
        worst = 0.0
        for name, query_lens in queries.items():
            block_ids = torch.randperm(16)
            attn = attention_of(lens, query_lens, block_ids, block_size, device)
            q = torch.randn(sum(query_lens), heads, dim, dtype=dtype, device=device)
            want = paged_attention_reference(q, k_cache, v_cache, attn, dim**-0.5)
            out = self._call(name, q, k_cache, v_cache, attn, dim**-0.5)
            error = float((out.float() - want.float()).abs().max() / want.float().abs().max())
            if not error < _MOST_ERROR:  # not a number never passes
                raise RuntimeError(f"{self.version}: {name} attention is off by {error:.3g}")
            worst = max(worst, error)
        return worst

    def _call(
        self,
        name: str,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        if name == "decode":
            return self.flash_attn_with_kvcache(
                q.unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=attn.seq_lens_B,
                block_table=attn.block_table_BW,
                softmax_scale=scale,
                causal=True,
            ).squeeze(1)
        slots = attn.kv_places_T
        k, v = (
            (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
            if name == "packed"
            else (k_cache, v_cache)
        )
        return self.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=attn.query_start_B1,
            cu_seqlens_k=attn.seq_start_B1,
            max_seqlen_q=attn.max_query_len,
            max_seqlen_k=attn.max_seq_len,
            softmax_scale=scale,
            causal=True,
            block_table=None if name == "packed" else attn.block_table_BW,
        )


def flash_attn_3() -> FlashAttn2:
    """Over the FlashAttention-3 that is installed. Raises `ValueError` where none runs."""
    installed = find_flash_attn()
    for name in _LIBRARIES:
        with suppress(ModuleNotFoundError):
            library = importlib.import_module(name)
            if installed is not None:
                return over(installed.version, installed.paged_attention, library)
    raise ValueError("needs FlashAttention-3 (fa3-fwd) and a Hopper GPU")


def over(version: str, paged: PagedAttention, library: ModuleType) -> FlashAttn2:
    """Over the functions of a FlashAttention-3; `paged` is Eagleray's call of it."""

    def packed(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start: torch.Tensor,
        key_start: torch.Tensor,
        most_queries: int,
        most_keys: int,
        scale: float,
    ) -> torch.Tensor:
        out: torch.Tensor = library.flash_attn_varlen_func(
            q,
            k,
            v,
            query_start,
            key_start,
            most_queries,
            most_keys,
            softmax_scale=scale,
            causal=True,
        )
        return out

    return FlashAttn2(version, paged, packed)


def reference() -> FlashAttn2:
    """In plain PyTorch, for a run without a GPU."""
    return FlashAttn2("the reference", paged_attention_reference, _packed_reference)


def _packed_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    _most_queries: int,
    _most_keys: int,
    scale: float,
) -> torch.Tensor:
    assert torch.equal(query_start, key_start), "every key is of this step"
    lens = query_start.diff().tolist()
    rows = []
    for row in zip(*(x.transpose(0, 1).split(lens, dim=1) for x in (q, k, v)), strict=True):
        q_HSD, k_KSD, v_KSD = row
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                q_HSD, k_KSD, v_KSD, is_causal=True, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(rows, dim=1).transpose(0, 1)
