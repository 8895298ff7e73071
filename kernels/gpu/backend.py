"""The GPU backends: Triton for everything, or flash-attn for attention and Triton for the rest."""

from __future__ import annotations

import dataclasses

from torch.nn import functional

from kernels.backend import Kernels, token_major_shapes
from kernels.gpu import attention, elementwise, sampling
from kernels.gpu.flash_attn import find_flash_attn

TRITON = Kernels(
    name="triton",
    description="triton",
    default_block_size=16,
    check=lambda head_dim, block_size: None,
    dtypes=("float32", "bfloat16", "float16"),
    fast_dtypes=("float32", "bfloat16", "float16"),
    kv_cache_shapes=token_major_shapes,
    set_num_threads=lambda num_threads: None,
    compile=lambda dtype: None,  # at its first use
    pack_weight=lambda weight: weight,
    linear=functional.linear,
    qk_norm_rope_store=elementwise.qk_norm_rope_store,
    paged_attention=attention.paged_attention,
    rms_norm=elementwise.rms_norm,
    add_rms_norm=elementwise.add_rms_norm,
    silu_and_mul=elementwise.silu_and_mul,
    sampling=sampling.GPU,
)


def flash_attn_backend() -> Kernels:
    """Raises `ValueError` when no flash-attn that runs on this device can be imported."""
    found = find_flash_attn()
    if found is None:
        raise ValueError(
            "attention_backend 'flash_attn' needs the package flash-attn (FlashAttention-2) or, on Hopper, fa3-fwd "
            "(FlashAttention-3), and neither can be imported here; install one, or take 'triton'"
        )
    return dataclasses.replace(
        TRITON,
        name="flash_attn",
        description=f"flash_attn ({found.version}), triton for the rest",
        default_block_size=found.default_block_size,
        check=found.check,
        dtypes=found.dtypes,
        fast_dtypes=found.dtypes,
        paged_attention=found.paged_attention,
    )
