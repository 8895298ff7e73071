"""The GPU backends: Triton for everything, or flash-attn for attention, all of it or a part, and
Triton for the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.gpu import attention, elementwise, tables
from kernels.gpu.capabilities import TRITON
from kernels.gpu.flash_attn import FlashAttn
from kernels.gpu.hybrid import hybrid_attention
from kernels.gpu.sampling import GpuSampling
from kernels.interface import Capabilities, Int8Kernels, Kernels, MixedKernels, SamplingKernels
from kernels.reference.backend import no_decode_places, token_major_shapes


class TritonKernels:
    """`Kernels` in Triton, which compiles each kernel at its first use."""

    capabilities: Capabilities = TRITON
    sampling: SamplingKernels = GpuSampling()
    int8: Int8Kernels | None = None
    mixed: MixedKernels | None = None
    kv_cache_shapes = staticmethod(token_major_shapes)
    linear = staticmethod(functional.linear)
    qk_norm_rope_store = staticmethod(elementwise.qk_norm_rope_store)
    paged_attention = staticmethod(attention.paged_attention)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    decode_places = staticmethod(attention.places_of)
    look_up_tokens = staticmethod(tables.look_up_tokens)
    write_tokens = staticmethod(tables.write_tokens)

    def set_num_threads(self, num_threads: int, /) -> None:
        """A GPU does not use host threads."""

    def first_step(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Nothing: Triton compiles at the first use, see `model_runner.warm_up`."""
        return []

    def other_steps(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Nothing, as above."""
        return []

    def pack_weight(self, weight_YE: torch.Tensor, /) -> torch.Tensor:
        """The weight, unchanged."""
        return weight_YE


class FlashAttnKernels(TritonKernels):
    """Attention by a flash-attn library, everything else in Triton."""

    def __init__(self, library: FlashAttn) -> None:
        self.capabilities = library.capabilities
        self.paged_attention = library.paged_attention  # type: ignore[assignment]
        self.decode_places = no_decode_places


class HybridKernels(TritonKernels):
    """Attention of the rows with several queries by FlashAttention-3, everything else in Triton."""

    def __init__(self, library: FlashAttn) -> None:
        assert library.attend_rows is not None
        self.capabilities = library.hybrid_capabilities
        self.paged_attention = hybrid_attention(library.attend_rows)  # type: ignore[assignment]


TRITON_KERNELS: Kernels = TritonKernels()
