"""Stands in for the flash-attn libraries where there is none: the functions of FlashAttention-2 and
the operator of FlashAttention-3, as this project calls them.

Names of arguments are those of flash_attn 2.8, and of the operator of fa3_fwd 0.0.3, whose schema
is copied from it. A call that the libraries would refuse or misread is an `AssertionError`, and so
is an option that this project does not use. The answer is the reference's. FlashAttention-3 itself
has run (docs/kernels.md), FlashAttention-2 has not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None,"
    " Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,"
    " Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,"
    " Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, float softcap=0.0,"
    " bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FEATURES = ("BACKWARD", "PAGEDKV", "FP16", "SPLIT", "LOCAL", "VARLEN")
_NAMES_3 = re.findall(r"(\w+)(?:=[^,)]+)?[,)]", SCHEMA.partition(" -> ")[0])
_USED_3 = {"q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table"}
_USED_3 |= {"softmax_scale", "is_causal", "num_splits"}


def flash_attn_2() -> dict[str, ModuleType]:
    """The modules of FlashAttention-2, by name."""
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3"  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = _varlen_2  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = _with_kvcache_2  # type: ignore[attr-defined]
    return {"flash_attn": module}


@functools.cache
def flash_attn_3(name: str, left_out: tuple[str, ...] = ()) -> dict[str, ModuleType]:
    """The modules of a FlashAttention-3 called `name`, built without the features `left_out`. Its
    operator is registered in a namespace of its own, which `namespace` of the first module names.
    """
    namespace = "_".join(("stand_in", name, *left_out))
    library = torch.library.Library(namespace, "DEF")
    library.define(SCHEMA)
    library.impl("fwd", _fwd_3(left_out), "CompositeExplicitAutograd")
    module, config = ModuleType(name), ModuleType(name.replace("_interface", "_config"))
    module.namespace = namespace  # type: ignore[attr-defined]
    module.library = library  # type: ignore[attr-defined]  # the operator lives as long as it does
    flags = {f"FLASHATTENTION_DISABLE_{feature}": feature in left_out for feature in FEATURES}
    config.CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]
    return {name: module, config.__name__: config}


def _varlen_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    lens_B = cu_seqlens_k.diff()
    assert int(lens_B.max()) <= max_seqlen_k, "max_seqlen_k must bound the lengths"
    assert int(cu_seqlens_q[0]) == 0 and int(cu_seqlens_q[-1]) == len(q)
    assert k.shape[1] % 256 == 0, "the block size must be a multiple of 256"
    rows = (cu_seqlens_q, lens_B, block_table)
    return _attend(q, k, v, rows, max_seqlen_q, softmax_scale, causal, torch.empty_like(q))


def _with_kvcache_2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    q_THD = q.squeeze(1)
    assert k_cache.shape[1] % 256 == 0, "the block size must be a multiple of 256"
    rows = (torch.arange(len(q) + 1, dtype=torch.int32), cache_seqlens, block_table)
    out_THD = torch.empty_like(q_THD)
    return _attend(q_THD, k_cache, v_cache, rows, 1, softmax_scale, causal, out_THD)[:, None]


def _fwd_3(left_out: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
    def fwd(*values: Any) -> tuple[Tensor, ...]:
        """Trailing arguments with their default values may be missing."""
        given: dict[str, Any] = dict.fromkeys(_NAMES_3) | dict(zip(_NAMES_3, values, strict=False))
        for name in given.keys() - _USED_3:
            unused = -1 if name.startswith("window") else 0
            assert given[name] in (None, unused), f"{name} is not used by this project"
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        bound = given["max_seqlen_q"]
        assert "FP16" not in left_out or q.dtype != torch.float16, "a build without FP16"
        # Rows and tokens of a causal tile on Hopper.
        tile_rows, tile_tokens = (192, 128) if q.shape[-1] <= 64 else (128, 128)
        by_tma = k.shape[1] % tile_tokens == 0 and bound * (q.shape[1] // k.shape[2]) > tile_rows
        assert "PAGEDKV" not in left_out or by_tma, "a build without paged KV"
        rows = tuple(given[name] for name in ("cu_seqlens_q", "seqused_k", "page_table"))
        _attend(q, k, v, rows, bound, given["softmax_scale"], given["is_causal"], out)
        return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)

    return fwd


def _attend(
    q_THD: Tensor,
    k_cache_NPKD: Tensor,
    v_cache_NPKD: Tensor,
    rows: tuple[Tensor, ...],
    max_query_len: int,
    scale: float,
    causal: bool,
    out_THD: Tensor,
) -> Tensor:
    """Write the tokens of the rows, which are their starts, lengths and table, and no others."""
    starts_B1, lens_B, table_BW = rows
    tensors = (q_THD, k_cache_NPKD, v_cache_NPKD, out_THD)
    assert q_THD.dtype in (torch.float16, torch.bfloat16), "float16 or bfloat16"
    assert {tensor.dtype for tensor in tensors} == {q_THD.dtype}, "one dtype"
    assert {tensor.dtype for tensor in rows} == {torch.int32}, "tables must be int32"
    assert all(tensor.stride(-1) == 1 for tensor in (*tensors, *rows)), "contiguous"
    assert len(starts_B1) - 1 == len(lens_B) == len(table_BW), "one number of rows"
    assert int(starts_B1.diff().max()) <= max_query_len, "max_seqlen_q must bound the lengths"
    assert causal is True and type(scale) is float, "causal, with a scale"
    first, end = int(starts_B1[0]), int(starts_B1[-1])
    attn = AttentionMetadata(
        query_start_B1=starts_B1 - first,
        seq_start_B1=starts_B1,  # the reference reads neither this nor the rest
        seq_lens_B=lens_B,
        block_table_BW=table_BW,
        kv_places_T=starts_B1,
        max_query_len=max_query_len,
        max_seq_len=0,
    )
    out_THD[first:end] = paged_attention_reference(
        q_THD[first:end], k_cache_NPKD, v_cache_NPKD, attn, scale
    )
    return out_THD
