"""The reference backend: every kernel in plain PyTorch, on any device. Meant to be correct rather
than fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import (
    ExpertKernels,
    Kernels,
    MixedPrecisionKernels,
    QuantizedKernels,
    Recorder,
    SamplingKernels,
    Shape,
)
from kernels.reference import sampling
from kernels.reference.activation import silu_and_mul_reference
from kernels.reference.attention import paged_attention_reference
from kernels.reference.capabilities import REFERENCE_CAPABILITIES
from kernels.reference.experts import ReferenceExperts
from kernels.reference.grouped import ReferenceGrouped
from kernels.reference.int8 import ReferenceInt8
from kernels.reference.norm import add_rms_norm_reference, rms_norm_reference
from kernels.reference.rope import qk_norm_rope_store_reference
from kernels.reference.tables import look_up_tokens_reference, write_tokens_reference


def token_major_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[Shape, Shape]:
    """Keys and values, both [blocks, block_size, num_kv_heads, head_dim]."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return shape, shape


def no_decode_parts(
    num_rows: int, num_kv_heads: int, max_seq_len: int, device: torch.device
) -> int:
    """For backends that attend to any batch in one way."""
    return 0


class ReferenceKernels:
    """`Kernels` in plain PyTorch."""

    capabilities = REFERENCE_CAPABILITIES
    sampling: SamplingKernels = sampling
    quantized: Mapping[str, QuantizedKernels] = {
        "int8": ReferenceInt8(),
        "int4": ReferenceGrouped(),
        "fp8": ReferenceGrouped(),
    }
    mixed_precision: MixedPrecisionKernels | None = None
    experts: ExpertKernels = ReferenceExperts()
    recorder: type[Recorder] | None = None
    kv_cache_shapes = staticmethod(token_major_shapes)
    set_num_threads = staticmethod(torch.set_num_threads)
    linear = staticmethod(functional.linear)
    qk_norm_rope_store = staticmethod(qk_norm_rope_store_reference)
    paged_attention = staticmethod(paged_attention_reference)
    rms_norm = staticmethod(rms_norm_reference)
    add_rms_norm = staticmethod(add_rms_norm_reference)
    silu_and_mul = staticmethod(silu_and_mul_reference)
    max_decode_parts = staticmethod(no_decode_parts)
    look_up_tokens = staticmethod(look_up_tokens_reference)
    write_tokens = staticmethod(write_tokens_reference)

    def call(self, function: Callable[..., object], /, *tensors: Tensor) -> None:
        """Call the function."""
        function(*tensors)

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Nothing to compile."""
        return []

    def pack_weight(self, weight_YE: Tensor, /) -> Tensor:
        """The weight, unchanged."""
        return weight_YE


REFERENCE_KERNELS: Kernels = ReferenceKernels()
