"""Norms, rotary embedding with KV store, and the MLP's gate on a CPU: one pass over each token, in
float32.

Results equal those of the references up to one rounding: between operations, where they round to
the dtype of the input, values stay float32 here. Square roots and divisions are exact, so the bits
do not depend on the processor's vendor. Threads take tokens.
Legend: T tokens of the step, E features, H query heads of this rank, K its KV heads, X = H + 2K, D
head dim, N blocks, P block size, W elements side by side (see `kv_layout.py`), L positions of the
rotary table, F features of the MLP.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from kernels.cpu.fp8 import to_cache_dtype
from kernels.cpu.jit import (
    Array,
    as_array,
    exp_nonpositive,
    fast_entry_jit,
    fast_jit,
    inlined_jit,
    narrow,
    widen,
)
from kernels.cpu.kv_layout import kernel_cache_views
from kernels.cpu.parallel import parallel_for
from kernels.cpu.recording import empty


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As `rms_norm_reference`, over the last dimension."""
    out = empty(x.shape, x.dtype)
    x_TE, out_TE = (tensor.view(-1, x.shape[-1]) for tensor in (x, out))
    _rms_norm(as_array(x_TE), as_array(weight_E), np.float32(eps), as_array(out_TE))
    return out


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm_reference`."""
    out_TE, total_TE = empty(x_TE.shape, x_TE.dtype), empty(x_TE.shape, x_TE.dtype)
    x, residual, weight = as_array(x_TE), as_array(residual_TE), as_array(weight_E)
    _add_rms_norm(x, residual, weight, np.float32(eps), as_array(out_TE), as_array(total_TE))
    return out_TE, total_TE


def qk_norm_rope_store(
    qkv_TXD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_sin_LD: Tensor,
    positions_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_places_T: Tensor,
) -> Tensor:
    """As `qk_norm_rope_store_reference`, into the caches of `kv_layout.py`."""
    k_view, v_view = kernel_cache_views(k_cache, v_cache, qkv_TXD.dtype)
    num_tokens, num_qkv_heads, dim = qkv_TXD.shape
    q_THD = empty((num_tokens, num_qkv_heads - 2 * k_cache.shape[1], dim), qkv_TXD.dtype)
    weights = as_array(q_weight_D), as_array(k_weight_D), np.float32(eps)
    rotary = cos_sin_LD.numpy(), positions_T.numpy()
    cache_arguments = as_array(k_view), as_array(v_view), kv_places_T.numpy()
    _qk_norm_rope_store(as_array(qkv_TXD), *weights, *rotary, *cache_arguments, as_array(q_THD))
    return q_THD


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """As `silu_and_mul_reference`."""
    num_tokens, width = gate_up_T2F.shape
    out_TF = empty((num_tokens, width // 2), gate_up_T2F.dtype)
    _silu_and_mul(as_array(gate_up_T2F), as_array(out_TF))
    return out_TF


@inlined_jit
def _norm_row(x_E: Array, weight_E: Array, eps: np.float32, out_E: Array) -> None:
    sum_of_squares = np.float32(0)
    for e in range(len(x_E)):
        value = widen(x_E[e])
        sum_of_squares += value * value
    scale = np.float32(1) / math.sqrt(sum_of_squares / np.float32(len(x_E)) + eps)
    for e in range(len(x_E)):
        out_E[e] = narrow(widen(x_E[e]) * scale * widen(weight_E[e]), out_E[e])


@fast_jit
def _norm_token(t: int, x_TE: Array, weight_E: Array, eps: np.float32, out_TE: Array) -> None:
    _norm_row(x_TE[t], weight_E, eps, out_TE[t])


@fast_entry_jit
def _rms_norm(x_TE: Array, weight_E: Array, eps: np.float32, out_TE: Array) -> None:
    parallel_for(len(x_TE), _norm_token, (x_TE, weight_E, eps, out_TE))


@fast_jit
def _add_and_norm_token(
    t: int,
    x_TE: Array,
    residual_TE: Array,
    weight_E: Array,
    eps: np.float32,
    out_TE: Array,
    total_TE: Array,
) -> None:
    x_E, residual_E, total_E = x_TE[t], residual_TE[t], total_TE[t]
    for e in range(len(x_E)):
        total_E[e] = narrow(widen(x_E[e]) + widen(residual_E[e]), total_E[e])
    _norm_row(total_E, weight_E, eps, out_TE[t])


@fast_entry_jit
def _add_rms_norm(
    x_TE: Array,
    residual_TE: Array,
    weight_E: Array,
    eps: np.float32,
    out_TE: Array,
    total_TE: Array,
) -> None:
    arguments = (x_TE, residual_TE, weight_E, eps, out_TE, total_TE)
    parallel_for(len(x_TE), _add_and_norm_token, arguments)


@fast_jit
def _norm_rope_head(
    x_D: Array, weight_D: Array, eps: np.float32, cos_sin_D: Array, out_D: Array
) -> None:
    """One head of one token, in float32: norm over the head, then the rotation that pairs feature d
    with d + D/2.
    """
    head_dim = len(x_D)
    half_dim = head_dim // 2
    sum_of_squares = np.float32(0)
    for d in range(head_dim):
        value = widen(x_D[d])
        sum_of_squares += value * value
    scale = np.float32(1) / math.sqrt(sum_of_squares / np.float32(head_dim) + eps)
    for d in range(half_dim):
        low = widen(x_D[d]) * scale * widen(weight_D[d])
        high = widen(x_D[half_dim + d]) * scale * widen(weight_D[half_dim + d])
        cos, sin = cos_sin_D[d], cos_sin_D[half_dim + d]
        out_D[d] = low * cos - high * sin
        out_D[half_dim + d] = high * cos + low * sin


@fast_jit
def _store_token(
    t: int,
    qkv_TXD: Array,
    q_weight_D: Array,
    k_weight_D: Array,
    eps: np.float32,
    cos_sin_LD: Array,
    positions_T: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    kv_places_T: Array,
    q_THD: Array,
) -> None:
    """All heads of one token: queries to `q_THD`, keys and values to the token's place of the
    caches, nowhere if it is -1.
    """
    qkv_XD, q_HD, place = qkv_TXD[t], q_THD[t], kv_places_T[t]
    cos_sin_D = cos_sin_LD[positions_T[t]]
    num_heads, head_dim = q_HD.shape
    num_kv_heads, _, block_size, width = k_NKDPW.shape[1:]
    rotated_D = np.empty(head_dim, np.float32)
    for h in range(num_heads):
        _norm_rope_head(qkv_XD[h], q_weight_D, eps, cos_sin_D, rotated_D)
        for d in range(head_dim):
            q_HD[h, d] = narrow(rotated_D[d], q_HD[h, d])
    if place < 0:
        return
    block, place_in_block = place // block_size, place % block_size
    for k in range(num_kv_heads):
        _norm_rope_head(qkv_XD[num_heads + k], k_weight_D, eps, cos_sin_D, rotated_D)
        for feature_group in range(head_dim // width):
            for w in range(width):
                key = narrow(rotated_D[feature_group * width + w], q_HD[0, 0])
                k_NKDPW[block, k, feature_group, place_in_block, w] = to_cache_dtype(
                    key, k_NKDPW[0, 0, 0, 0, 0]
                )
        token_group = place_in_block // width
        place_in_group = place_in_block % width
        for d in range(head_dim):
            value = qkv_XD[num_heads + num_kv_heads + k, d]
            v_NKPDW[block, k, token_group, d, place_in_group] = to_cache_dtype(
                value, v_NKPDW[0, 0, 0, 0, 0]
            )


@fast_entry_jit
def _qk_norm_rope_store(
    qkv_TXD: Array,
    q_weight_D: Array,
    k_weight_D: Array,
    eps: np.float32,
    cos_sin_LD: Array,
    positions_T: Array,
    k_NKDPW: Array,
    v_NKPDW: Array,
    kv_places_T: Array,
    q_THD: Array,
) -> None:
    weights = (q_weight_D, k_weight_D, eps)
    rotary = (cos_sin_LD, positions_T)
    cache_arguments = (k_NKDPW, v_NKPDW, kv_places_T)
    parallel_for(len(qkv_TXD), _store_token, (qkv_TXD, *weights, *rotary, *cache_arguments, q_THD))


@fast_jit
def silu_and_mul_token(t: int, gate_up_T2F: Array, out_TF: Array) -> None:
    """A task: one row of `silu_and_mul`, of a token, or of a token and one of its experts."""
    gate_up_2F, out_F = gate_up_T2F[t], out_TF[t]
    num_features = len(out_F)
    for f in range(num_features):
        gate = widen(gate_up_2F[f])
        exp_minus_magnitude = exp_nonpositive(-abs(gate))
        sigmoid = (np.float32(1) if gate >= np.float32(0) else exp_minus_magnitude) / (
            np.float32(1) + exp_minus_magnitude
        )
        out_F[f] = narrow(gate * sigmoid * widen(gate_up_2F[num_features + f]), out_F[f])


@fast_entry_jit
def _silu_and_mul(gate_up_T2F: Array, out_TF: Array) -> None:
    parallel_for(len(out_TF), silu_and_mul_token, (gate_up_T2F, out_TF))
