"""Norms, rotary embedding, KV store and the MLP's gate on a GPU, in Triton: one launch each, one
pass over memory.

Results equal those of the references up to float32 rounding: what they round to the dtype of the
input is rounded here too. Weights have the dtype of what they scale. A row (the features, or the
heads, of one token) must be contiguous; rows may be any distance apart, as in a slice. Nothing
waits for the device and grids depend on shapes alone, so CUDA graphs can hold every launch.
Legend: T tokens of the step, E features, F features of the MLP, H query heads of this rank, K its
KV heads, X = H + 2K, D head dim, N blocks, P block size, L positions of the rotary table. Offsets
of rows are int64: a chunk of many tokens and a cache may both hold more than 2**31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fp8 import to_cache_dtype

# Enough that a thread loads 8 adjacent elements at once, 16 bytes of a 16-bit dtype.
_HEADS_PER_PROGRAM = 8  # heads of one token, with head dim 128, that a program of two warps rotates
_FEATURES_PER_PROGRAM = 1024  # features that a program of four warps gates


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As `rms_norm_reference`, over the last dimension. One program per row."""
    rows_TE = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile_features = triton.next_power_of_2(x.shape[-1])
    _rms_norm[(len(rows_TE),)](
        rows_TE,
        weight_E,
        out,
        rows_TE.stride(0),
        eps,
        E=x.shape[-1],
        TILE_FEATURES=tile_features,
        num_warps=_num_warps(tile_features),
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm_reference`. One program per row."""
    x_TE, residual_TE = _as_rows(x), _as_rows(residual)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    tile_features = triton.next_power_of_2(x.shape[-1])
    _add_rms_norm[(len(x_TE),)](
        x_TE,
        residual_TE,
        weight_E,
        out,
        total,
        x_TE.stride(0),
        residual_TE.stride(0),
        eps,
        E=x.shape[-1],
        TILE_FEATURES=tile_features,
        num_warps=_num_warps(tile_features),
    )
    return out, total


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """As `silu_and_mul_reference`. One program per block of features of a token."""
    num_tokens, num_features = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(
        num_tokens, num_features, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device
    )
    tile_features = min(_FEATURES_PER_PROGRAM, triton.next_power_of_2(num_features))
    _silu_and_mul[(num_tokens * triton.cdiv(num_features, tile_features),)](
        gate_up_T2F,
        out_TF,
        _row_stride(gate_up_T2F),
        F=num_features,
        TILE_FEATURES=tile_features,
        num_warps=_num_warps(tile_features),
    )
    return out_TF


def qk_norm_rope_store(
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
    """As `qk_norm_rope_store_reference`, with a contiguous table and caches. One program per
    `_HEADS_PER_PROGRAM` heads of a token.
    """
    assert (
        k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous() and cos_sin_LD.is_contiguous()
    )
    num_tokens, num_qkv_heads, dim = qkv_TXD.shape
    num_kv_heads = k_cache_NPKD.shape[2]
    num_heads = num_qkv_heads - 2 * num_kv_heads
    q_THD = torch.empty(num_tokens, num_heads, dim, dtype=qkv_TXD.dtype, device=qkv_TXD.device)
    _qk_norm_rope_store[(num_tokens * triton.cdiv(num_qkv_heads, _HEADS_PER_PROGRAM),)](
        qkv_TXD,
        q_weight_D,
        k_weight_D,
        cos_sin_LD,
        positions_T,
        k_cache_NPKD,
        v_cache_NPKD,
        kv_places_T,
        q_THD,
        _row_stride(qkv_TXD),
        eps,
        H=num_heads,
        K=num_kv_heads,
        D=dim,
        PADDED_HALF_DIM=triton.next_power_of_2(dim // 2),
        TILE_HEADS=_HEADS_PER_PROGRAM,
        num_warps=2,
    )
    return q_THD


def _as_rows(x: Tensor) -> Tensor:
    """[T, E] of [..., E], never a copy."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1
    return x.view(-1, x.shape[-1])


def _row_stride(x: Tensor) -> int:
    """Elements from one token to the next."""
    assert len(x) == 0 or x[0].is_contiguous()
    return x.stride(0)


def _num_warps(tile_features: int) -> int:
    """Eight elements per thread, up to 512 threads."""
    return min(16, max(1, tile_features // 256))


@triton.jit
def _scale_by_weight(x, scale, weight):  # type: ignore[no-untyped-def]
    """`x * scale` in float32, rounded to the dtype of the weight, times the weight: float32, not
    yet rounded.
    """
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_TE, weight_E, out_TE, row_stride, eps, E: tl.constexpr, TILE_FEATURES: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, TILE_FEATURES)
    x = tl.load(x_TE + token * row_stride + e, mask=e < E, other=0.0).to(tl.float32)
    weight = tl.load(weight_E + e, mask=e < E, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x) / E + eps)
    tl.store(out_TE + token * E + e, _scale_by_weight(x, scale, weight), mask=e < E)


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x_TE,
    residual_TE,
    weight_E,
    out_TE,
    total_TE,
    x_stride,
    residual_stride,
    eps,
    E: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, TILE_FEATURES)
    x = tl.load(x_TE + token * x_stride + e, mask=e < E, other=0.0)
    residual = tl.load(residual_TE + token * residual_stride + e, mask=e < E, other=0.0)
    weight = tl.load(weight_E + e, mask=e < E, other=0.0)
    rounded_total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_TE + token * E + e, rounded_total, mask=e < E)
    total = rounded_total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total) / E + eps)
    tl.store(out_TE + token * E + e, _scale_by_weight(total, scale, weight), mask=e < E)


@triton.jit
def _silu_and_mul(gate_up_T2F, out_TF, row_stride, F: tl.constexpr, TILE_FEATURES: tl.constexpr):  # type: ignore[no-untyped-def]
    token = (tl.program_id(0) // tl.cdiv(F, TILE_FEATURES)).to(tl.int64)
    f = tl.program_id(0) % tl.cdiv(F, TILE_FEATURES) * TILE_FEATURES + tl.arange(0, TILE_FEATURES)
    gate = tl.load(gate_up_T2F + token * row_stride + f, mask=f < F, other=0.0)
    up = tl.load(gate_up_T2F + token * row_stride + F + f, mask=f < F, other=0.0)
    gate_float32 = gate.to(tl.float32)
    silu = (gate_float32 / (1.0 + tl.exp(-gate_float32))).to(gate.dtype)
    tl.store(out_TF + token * F + f, silu.to(tl.float32) * up.to(tl.float32), mask=f < F)


@triton.jit
def _norm_and_rotate(low, high, low_weight, high_weight, cos, sin, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Halves of heads, [heads, D/2], normalized and rotated in float32; the norm is rounded as the
    reference's is.
    """
    dtype: tl.constexpr = low.dtype
    low_float32, high_float32 = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt(
        tl.sum(low_float32 * low_float32 + high_float32 * high_float32, axis=1, keep_dims=True) / D
        + eps
    )
    low_float32 = _scale_by_weight(low_float32, scale, low_weight).to(dtype).to(tl.float32)
    high_float32 = _scale_by_weight(high_float32, scale, high_weight).to(dtype).to(tl.float32)
    return (low_float32 * cos - high_float32 * sin).to(dtype), (
        high_float32 * cos + low_float32 * sin
    ).to(dtype)


@triton.jit
def _qk_norm_rope_store(  # type: ignore[no-untyped-def]
    qkv_TXD,
    q_weight_D,
    k_weight_D,
    cos_sin_LD,
    positions_T,
    k_cache,
    v_cache,
    kv_places_T,
    q_THD,
    row_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PADDED_HALF_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """The heads of one program may belong to queries, keys and values at once: masks keep them
    apart.
    """
    token = (tl.program_id(0) // tl.cdiv(H + 2 * K, TILE_HEADS)).to(tl.int64)
    first_head = tl.program_id(0) % tl.cdiv(H + 2 * K, TILE_HEADS) * TILE_HEADS
    head = (first_head + tl.arange(0, TILE_HEADS))[:, None]
    # Has the tile's shape: loads in one layout need no shared memory.
    d = tl.arange(0, PADDED_HALF_DIM)[None, :] + head * 0
    mask = d < D // 2
    is_q = mask & (head < H)
    is_k = mask & (head >= H) & (head < H + K)
    is_v = mask & (head >= H + K) & (head < H + 2 * K)

    place = tl.load(kv_places_T + token).to(tl.int64)
    cos_sin = cos_sin_LD + tl.load(positions_T + token).to(tl.int64) * D + d
    x = qkv_TXD + token * row_stride + head * D + d
    low = tl.load(x, mask=is_q | is_k | is_v, other=0.0)
    high = tl.load(x + D // 2, mask=is_q | is_k | is_v, other=0.0)
    q_weight, k_weight = q_weight_D + d, k_weight_D + d
    rotated_low, rotated_high = _norm_and_rotate(
        low,
        high,
        tl.where(is_q, tl.load(q_weight, mask=is_q), tl.load(k_weight, mask=is_k)),
        tl.where(
            is_q, tl.load(q_weight + D // 2, mask=is_q), tl.load(k_weight + D // 2, mask=is_k)
        ),
        tl.load(cos_sin, mask=is_q | is_k, other=0.0),
        tl.load(cos_sin + D // 2, mask=is_q | is_k, other=0.0),
        eps,
        D,
    )

    q_out = q_THD + (token * H + head) * D + d
    tl.store(q_out, rotated_low, mask=is_q)
    tl.store(q_out + D // 2, rotated_high, mask=is_q)
    dtype: tl.constexpr = k_cache.dtype.element_ty
    k_out = k_cache + (place * K + head - H) * D + d
    tl.store(k_out, to_cache_dtype(rotated_low, dtype), mask=is_k & (place >= 0))
    tl.store(k_out + D // 2, to_cache_dtype(rotated_high, dtype), mask=is_k & (place >= 0))
    v_out = v_cache + (place * K + head - H - K) * D + d
    tl.store(v_out, to_cache_dtype(low, dtype), mask=is_v & (place >= 0))
    tl.store(v_out + D // 2, to_cache_dtype(high, dtype), mask=is_v & (place >= 0))
