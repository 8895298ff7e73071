"""Stands in for the flash-attn libraries where there is none: the functions of FlashAttention-2 and
the operator of FlashAttention-3 in plain PyTorch, with their contracts enforced.

Names and defaults of arguments are those of flash_attn 2.8 and of the operator of fa3_fwd 0.0.3,
whose schema is copied from it. What they check raises `RuntimeError` as theirs does; so do
preconditions that they do not check (starts ascend within the tokens, bounds are bounds, the blocks
of a row lie in the cache), and options that this project never uses (dropout, windows and the
like). Paged calls only. The result is computed in float32. Legend: T tokens, B rows, H query heads,
K KV heads, G = H / K, D head dim, N blocks, P block size, W blocks of a row, Q queries of a row, S
tokens of a row.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

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
    library.impl("fwd", _unread_3, "Meta")
    module, config = ModuleType(name), ModuleType(name.replace("_interface", "_config"))
    module.namespace = namespace  # type: ignore[attr-defined]
    module.library = library  # type: ignore[attr-defined]  # the operator lives as long as it does
    flags = {f"FLASHATTENTION_DISABLE_{feature}": feature in left_out for feature in FEATURES}
    config.CONFIG = {"build_flags": flags}  # type: ignore[attr-defined]
    return {name: module, config.__name__: config}


def _varlen_2(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any = 0.0,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    deterministic: Any = False,
    return_attn_probs: Any = False,
    block_table: Any = None,
) -> torch.Tensor:
    _require_unused(
        dropout_p=dropout_p,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )
    _check_queries_and_caches(q, k, v, num_dims=3, page_multiple=256)
    _check_starts("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q, "max_seqlen_q", q.device)
    num_rows = len(cu_seqlens_q) - 1
    _check_ints("cu_seqlens_k", cu_seqlens_k, (num_rows + 1,), q.device)
    _check_starts(
        "cu_seqlens_k", cu_seqlens_k, int(cu_seqlens_k[-1]), max_seqlen_k, "max_seqlen_k", q.device
    )
    _check_table(block_table, cu_seqlens_k.diff(), k, q.device)
    out = torch.empty_like(q)
    lens_B = cu_seqlens_k.diff()
    _attend(q, k, v, cu_seqlens_q, lens_B, block_table, softmax_scale, causal, out)
    return out


def _with_kvcache_2(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    rotary_interleaved: Any = True,
    alibi_slopes: Any = None,
    num_splits: Any = 0,
    return_softmax_lse: Any = False,
) -> torch.Tensor:
    _require_unused(
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse,
    )
    _require(type(num_splits) is int and 0 <= num_splits <= 128, "num_splits must be from 0 to 128")
    _check_queries_and_caches(q, k_cache, v_cache, num_dims=4, page_multiple=256)
    num_rows, query_len = q.shape[:2]
    _check_ints("cache_seqlens", cache_seqlens, (num_rows,), q.device)
    _check_table(block_table, cache_seqlens, k_cache, q.device)
    starts_B1 = torch.arange(num_rows + 1) * query_len
    out = torch.empty_like(q)
    _attend(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        starts_B1,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        out.flatten(0, 1),
    )
    return out


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# The names of the operator's arguments, in order, and those that this project uses.
_NAMES_3 = re.findall(r"(\w+)(?:=[^,)]+)?[,)]", SCHEMA.partition(" -> ")[0])
_USED_3 = {"q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table"}
_USED_3 |= {"softmax_scale", "is_causal", "num_splits"}
_DEFAULTS_3 = {"window_size_left": -1, "window_size_right": -1}


def _fwd_3(left_out: tuple[str, ...]) -> Callable[..., Outputs]:
    def fwd(*values: Any) -> Outputs:
        """Trailing arguments with their default values may be missing."""
        given: dict[str, Any] = dict.fromkeys(_NAMES_3)
        given |= zip(_NAMES_3, values, strict=False)
        for name in given.keys() - _USED_3:
            is_default = given[name] is None or given[name] == _DEFAULTS_3.get(name, 0)
            _require(
                not isinstance(given[name], torch.Tensor) and is_default,
                f"{name} is not used by this project",
            )
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        cu_seqlens_q, seqused_k = given["cu_seqlens_q"], given["seqused_k"]
        max_seqlen_q, page_table = given["max_seqlen_q"], given["page_table"]
        _require(0 <= (given["num_splits"] or 0) <= 256, "num_splits must be from 0 to 256")
        _require(
            "FP16" not in left_out or q.dtype != torch.float16, "this build does not support FP16"
        )
        _check_queries_and_caches(q, k, v, num_dims=3, page_multiple=1)
        _check_out(out, q)
        _check_starts(
            "cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q, "max_seqlen_q", q.device, part=True
        )
        _check_ints("seqused_k", seqused_k, (len(cu_seqlens_q) - 1,), q.device)
        _check_table(page_table, seqused_k, k, q.device)
        tile_rows, tile_tokens = _tile_3(q.shape[-1])
        by_tma = (
            k.shape[1] % tile_tokens == 0 and max_seqlen_q * (q.shape[1] // k.shape[2]) > tile_rows
        )
        _require("PAGEDKV" not in left_out or by_tma, "this build does not support paged KV")
        scale, is_causal = given["softmax_scale"], given["is_causal"]
        _attend(q, k, v, cu_seqlens_q, seqused_k, page_table, scale, is_causal, out)
        return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)

    return fwd


def _unread_3(
    q: Any, k: Any, v: Any, k_new: Any, v_new: Any, q_v: Any, out: Any, *options: Any
) -> Outputs:
    """The answer for tensors without data, which only a call that has no others may contain."""
    for tensor in (k, v, out, *options):
        if isinstance(tensor, torch.Tensor):
            _require(tensor.device == q.device, "every tensor must be on the device of q")
    return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)


def _tile_3(head_dim: int) -> tuple[int, int]:
    """(rows, tokens) of a causal tile on Hopper, by the head dim that a kernel is compiled for."""
    tiles = {64: (192, 128), 96: (192, 144), 128: (128, 128), 192: (128, 112), 256: (128, 80)}
    return next(tile for largest, tile in tiles.items() if head_dim <= largest)


# The contract


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise RuntimeError(complaint)


def _require_unused(**options: Any) -> None:
    for name, value in options.items():
        unused = not isinstance(value, torch.Tensor) and value in (None, 0, (-1, -1))
        _require(unused, f"{name} is not used by this project")


def _check_queries_and_caches(
    q: Any, k_cache: Any, v_cache: Any, *, num_dims: int, page_multiple: int
) -> None:
    for name, tensor, dims in (
        ("q", q, num_dims),
        ("k_cache", k_cache, 4),
        ("v_cache", v_cache, 4),
    ):
        _require(
            isinstance(tensor, torch.Tensor) and tensor.dim() == dims,
            f"{name} must have {dims} dimensions",
        )
        _require(
            tensor.dtype in (torch.float16, torch.bfloat16), f"{name} must be float16 or bfloat16"
        )
        _require(tensor.dtype == q.dtype, f"{name} must have the dtype of q")
        _require(tensor.device == q.device, f"{name} must be on the device of q")
        _require(tensor.stride(-1) == 1, f"{name} must have a contiguous last dimension")
    _require(k_cache.shape == v_cache.shape, "the caches must have the same shape")
    _require(q.shape[-1] == k_cache.shape[-1], "q must have the head dim of the caches")
    _require(
        q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "the head dim must be a multiple of 8 up to 256",
    )
    _require(q.shape[-2] % k_cache.shape[-2] == 0, "query heads must be a multiple of KV heads")
    _require(
        k_cache.shape[1] % page_multiple == 0,
        f"the block size must be a multiple of {page_multiple}",
    )


def _check_out(out: Any, q: torch.Tensor) -> None:
    _require(isinstance(out, torch.Tensor), "out must be given: this project always does")
    _require(out.shape == q.shape, "out must have the shape of q")
    _require(out.dtype == q.dtype, "out must have the dtype of q")
    _require(out.device == q.device, "out must be on the device of q")
    _require(out.stride(-1) == 1, "out must have a contiguous last dimension")


def _check_ints(name: str, tensor: Any, shape: tuple[int, ...], device: torch.device) -> None:
    _require(isinstance(tensor, torch.Tensor), f"{name} must be a tensor")
    _require(tensor.dtype == torch.int32, f"{name} must be int32")
    _require(tensor.device == device, f"{name} must be on the device of q")
    _require(tensor.shape == shape, f"{name} must have shape {shape}")
    _require(tensor.is_contiguous(), f"{name} must be contiguous")


def _check_starts(
    name: str,
    starts_B1: Any,
    total: int,
    bound: Any,
    bound_name: str,
    device: torch.device,
    part: bool = False,
) -> None:
    """`part`: they may be the starts of only some rows and tokens."""
    _require(
        isinstance(starts_B1, torch.Tensor) and starts_B1.dim() == 1, f"{name} must be a vector"
    )
    _check_ints(name, starts_B1, starts_B1.shape, device)
    _require(type(bound) is int, f"{bound_name} must be an int")
    lens = starts_B1.diff().tolist()
    _require(len(lens) > 0 and min(lens) >= 0, f"{name} must ascend from 0")
    first, last = int(starts_B1[0]), int(starts_B1[-1])
    if part:
        _require(0 <= first <= last <= total, f"{name} must lie within {total} tokens")
    else:
        _require(first == 0, f"{name} must ascend from 0")
        _require(last == total, f"{name} must end with {total}")
    _require(max(lens) <= bound, f"{bound_name} must bound the lengths")


def _check_table(
    table_BW: Any, lens_B: torch.Tensor, cache: torch.Tensor, device: torch.device
) -> None:
    num_blocks, block_size = cache.shape[:2]
    _require(
        isinstance(table_BW, torch.Tensor) and table_BW.dim() == 2,
        "the table must have 2 dimensions",
    )
    _require(table_BW.dtype == torch.int32, "the table must be int32")
    _require(table_BW.device == device, "the table must be on the device of q")
    _require(table_BW.stride(-1) == 1, "the table must have a contiguous last dimension")
    _require(len(table_BW) == len(lens_B), "the table must have a row for each sequence")
    for blocks, seq_len in zip(table_BW.tolist(), lens_B.tolist(), strict=True):
        num_used = -(-seq_len // block_size)
        _require(0 <= num_used <= len(blocks), "a sequence must fit in its row of the table")
        _require(
            all(0 <= block < num_blocks for block in blocks[:num_used]),
            "used blocks must lie in the cache",
        )


# The answer


def _attend(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    starts_B1: torch.Tensor,
    lens_B: torch.Tensor,
    table_BW: torch.Tensor,
    scale: Any,
    causal: Any,
    out_THD: torch.Tensor,
) -> None:
    """Write the tokens of these rows; 0 where a query sees no token."""
    _require(type(scale) is float, "softmax_scale must be a float")
    _require(causal is True, "causal must be True")
    block_size, kv_heads = k_cache_NPKD.shape[1:3]
    starts = starts_B1.tolist()
    for start, end, seq_len, blocks in zip(
        starts, starts[1:], lens_B.tolist(), table_BW.long(), strict=False
    ):
        out_THD[start:end] = 0
        if start == end or seq_len == 0:
            continue
        positions_S = torch.arange(seq_len, device=q_THD.device)
        slots_S = blocks[positions_S // block_size] * block_size + positions_S % block_size
        k_KDS = k_cache_NPKD.flatten(0, 1)[slots_S].float().permute(1, 2, 0)
        v_KSD = v_cache_NPKD.flatten(0, 1)[slots_S].float().transpose(0, 1)
        q_KGQD = q_THD[start:end].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores_KGQS = q_KGQD @ k_KDS[:, None] * scale
        seen_Q1 = positions_S.new_tensor(range(seq_len - (end - start), seq_len))[:, None]
        weights_KGQS = (scores_KGQS - scores_KGQS.amax(-1, keepdim=True)).exp() * (
            positions_S <= seen_Q1
        )
        sums_KGQD = weights_KGQS @ v_KSD[:, None]
        out_KGQD = sums_KGQD / weights_KGQS.sum(-1, keepdim=True).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        out_THD[start:end] = out_KGQD.permute(2, 0, 1, 3).flatten(1, 2).to(q_THD.dtype)
