"""Which kernels run on which device: the one place that chooses.

A backend is a frozen set of functions with the same signatures on every device, and the cache layout they agree on.
Backends today: `reference` (plain PyTorch, any device) and `cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.activation import silu_and_mul_cpu, silu_and_mul_reference
from kernels.attention import paged_attention_cpu, paged_attention_reference
from kernels.kv_store import store_kv_cpu, store_kv_reference
from kernels.metadata import AttentionMetadata
from kernels.norm import add_rms_norm_cpu, add_rms_norm_reference, rms_norm_cpu, rms_norm_reference
from kernels.rope import qk_norm_rope_cpu, qk_norm_rope_reference

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One backend. Arguments are positional; shapes are told in the file of each kernel.

    kv_cache_shape(num_blocks, block_size, kv_heads, head_dim): shape of one layer's keys, and of its values. The worker
    allocates one zeroed tensor [2, layers, *shape] and hands out views of it.
    store_kv(k, v, k_cache, v_cache, slot_mapping): in place.
    paged_attention(q, k_cache, v_cache, attn, scale) -> out
    rms_norm(x, weight, eps) -> normed; add_rms_norm(x, residual, weight, eps) -> (normed, x + residual)
    qk_norm_rope(q, k, q_weight, k_weight, eps, cos_sin, positions) -> (q, k)
    silu_and_mul(gate_up) -> [T, F]
    """

    name: str
    default_block_size: int
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]


def select_backend(device: str, name: str = "auto") -> Kernels:
    """The backend called `name`, or the best one for `device` ("cpu" or "cuda", with or without an index).

    Raises `ValueError` naming what is possible when the name is unknown or does not run on the device.
    """
    kind = device.partition(":")[0]
    if kind not in _POSSIBLE:
        raise ValueError(f"there are no kernels for device {device!r}; possible are {', '.join(_POSSIBLE)}")
    possible = _POSSIBLE[kind]
    if name == "auto":
        return possible[0]
    for kernels in possible:
        if kernels.name == name:
            return kernels
    names = ", ".join(("auto", *(kernels.name for kernels in possible)))
    raise ValueError(f"kernel backend {name!r} cannot run on device {device!r}; possible are {names}")


def _token_major_shape(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, block_size, kv_heads, head_dim)


REFERENCE = Kernels(
    name="reference",
    default_block_size=16,
    kv_cache_shape=_token_major_shape,
    store_kv=store_kv_reference,
    paged_attention=paged_attention_reference,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    qk_norm_rope=qk_norm_rope_reference,
    silu_and_mul=silu_and_mul_reference,
)

CPU = Kernels(
    name="cpu",
    default_block_size=16,
    kv_cache_shape=_token_major_shape,
    store_kv=store_kv_cpu,
    paged_attention=paged_attention_cpu,
    rms_norm=rms_norm_cpu,
    add_rms_norm=add_rms_norm_cpu,
    qk_norm_rope=qk_norm_rope_cpu,
    silu_and_mul=silu_and_mul_cpu,
)

# Best first: "auto" takes the first.
_POSSIBLE = {"cpu": (CPU, REFERENCE), "cuda": (REFERENCE,)}
