"""The CPU backend: which function serves for which kernel."""

from __future__ import annotations

import torch

from kernels.backend import Kernels, Shape
from kernels.cpu import attention, elementwise, jit, linear, sampling
from kernels.metadata import AttentionMetadata

# Blocks of 64 tokens fill the vector registers of the score loop; smaller ones take the slow path.
BLOCK_SIZE = 64


def _head_major_shapes(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[Shape, Shape]:
    """Keys [N, K, D, P], values [N, K, P, D]."""
    return (num_blocks, kv_heads, head_dim, block_size), (num_blocks, kv_heads, block_size, head_dim)


def _set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    jit.set_num_threads(num_threads)


def _compile(dtype: torch.dtype) -> None:
    """Run every kernel once on a token of one head."""
    dim = 16
    k_shape, v_shape = _head_major_shapes(1, BLOCK_SIZE, 1, dim)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    x, weight = torch.zeros(1, dim, dtype=dtype), torch.zeros(dim, dtype=dtype)
    attn = AttentionMetadata(
        query_start_B1=torch.tensor([0, 1], dtype=torch.int32), seq_start_B1=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_B=torch.ones(1, dtype=torch.int32),
        block_table_BW=torch.zeros(1, 1, dtype=torch.int32), slot_mapping_T=torch.zeros(1, dtype=torch.int64),
        max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    q = elementwise.qk_norm_rope_store(
        torch.zeros(1, 3, dim, dtype=dtype), weight, weight, 1e-6, torch.zeros(1, dim),
        torch.zeros(1, dtype=torch.int32), k_cache, v_cache, attn.slot_mapping_T,
    )  # fmt: skip
    attention.paged_attention(q, k_cache, v_cache, attn, 1.0)
    elementwise.rms_norm(x, weight, 1e-6)
    elementwise.add_rms_norm(x, x, weight, 1e-6)
    elementwise.silu_and_mul(x)
    sampling.compile_for(dtype)


jit.share_torch_threads()

CPU = Kernels(
    name="cpu",
    description="cpu (numba and oneDNN)",
    default_block_size=BLOCK_SIZE,
    check=lambda head_dim, block_size: None,
    dtypes=("float32", "bfloat16"),
    fast_dtypes=("float32", "bfloat16") if linear.has_bfloat16() else ("float32",),
    kv_cache_shapes=_head_major_shapes,
    set_num_threads=_set_num_threads,
    compile=_compile,
    pack_weight=linear.pack_weight,
    linear=linear.linear,
    qk_norm_rope_store=elementwise.qk_norm_rope_store,
    paged_attention=attention.paged_attention,
    rms_norm=elementwise.rms_norm,
    add_rms_norm=elementwise.add_rms_norm,
    silu_and_mul=elementwise.silu_and_mul,
    sampling=sampling.CPU,
)
