"""The GPU backends: products by torch; attention in Triton, or by flash-attn, all of it or a part;
the rest in Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels.gpu import attention, elementwise, sampling, tables
from kernels.gpu.capabilities import QUANTIZATIONS, TRITON_CAPABILITIES
from kernels.gpu.experts import TritonExperts
from kernels.gpu.flash_attn import FlashAttn
from kernels.gpu.grouped import TritonGrouped
from kernels.gpu.hybrid import hybrid_attention
from kernels.interface import (
    Capabilities,
    ExpertKernels,
    Kernels,
    MixedPrecisionKernels,
    QuantizedKernels,
    SamplingKernels,
)
from kernels.reference.backend import ReferenceKernels, no_decode_parts


class TritonKernels(ReferenceKernels):
    """All but products with plain weights in Triton, which compiles each kernel at its first use:
    see `warm_up` in `workers/model_runner.py`. Takes over cache layout, those products, `call`,
    `recorder` (None) and the empty list of what to compile.
    """

    capabilities: Capabilities = TRITON_CAPABILITIES
    sampling: SamplingKernels = sampling
    quantized: Mapping[str, QuantizedKernels] = dict.fromkeys(QUANTIZATIONS, TritonGrouped())
    mixed_precision: MixedPrecisionKernels | None = None
    experts: ExpertKernels = TritonExperts()
    qk_norm_rope_store = staticmethod(elementwise.qk_norm_rope_store)
    paged_attention = staticmethod(attention.paged_attention)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    max_decode_parts = staticmethod(attention.max_parts_on_device)
    look_up_tokens = staticmethod(tables.look_up_tokens)
    write_tokens = staticmethod(tables.write_tokens)

    def set_num_threads(self, num_threads: int, /) -> None:
        """A GPU does not use host threads."""


class FlashAttnKernels(TritonKernels):
    """Attention by a flash-attn library, the rest as `TritonKernels`."""

    def __init__(self, library: FlashAttn) -> None:
        self.capabilities = library.capabilities
        self.paged_attention = library.paged_attention  # type: ignore[assignment]
        self.max_decode_parts = no_decode_parts


class HybridKernels(TritonKernels):
    """Attention of rows with several queries by FlashAttention-3, the rest as `TritonKernels`."""

    def __init__(self, library: FlashAttn) -> None:
        assert library.attend_rows is not None
        self.capabilities = library.hybrid_capabilities
        self.paged_attention = hybrid_attention(library.attend_rows)  # type: ignore[assignment]


TRITON_KERNELS: Kernels = TritonKernels()
