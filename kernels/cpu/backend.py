"""The CPU backend: which function implements which kernel, and what is compiled when."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kernels.cpu import attention, elementwise, linear, pool, recording, sampling
from kernels.cpu.capabilities import BLOCK_SIZE, CPU_CAPABILITIES
from kernels.cpu.experts import CpuExperts
from kernels.cpu.grouped import CpuGrouped
from kernels.cpu.int8 import CpuInt8
from kernels.cpu.kv_layout import head_major_shapes
from kernels.cpu.mixed import CpuMixedPrecision
from kernels.cpu.tile import has_dot_products
from kernels.interface import (
    ExpertKernels,
    Kernels,
    MixedPrecisionKernels,
    QuantizedKernels,
    Recorder,
    SamplingKernels,
)
from kernels.metadata import AttentionMetadata
from kernels.reference.backend import no_decode_parts
from kernels.reference.tables import look_up_tokens_reference, write_tokens_reference

_HEAD_DIM = 16  # head dim of the one head and one token with which kernels are compiled


class CpuKernels:
    """`Kernels` in numba, with oneDNN for some of the products."""

    capabilities = CPU_CAPABILITIES
    sampling: SamplingKernels = sampling
    quantized: Mapping[str, QuantizedKernels] = {
        name: CpuInt8() if name == "int8" else CpuGrouped(name)
        for name in CPU_CAPABILITIES.quantizations
    }
    mixed_precision: MixedPrecisionKernels | None = CpuMixedPrecision()
    experts: ExpertKernels = CpuExperts()
    kv_cache_shapes = staticmethod(head_major_shapes)
    pack_weight = staticmethod(linear.pack_weight)
    linear = staticmethod(linear.linear)
    qk_norm_rope_store = staticmethod(elementwise.qk_norm_rope_store)
    paged_attention = staticmethod(attention.paged_attention)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    max_decode_parts = staticmethod(no_decode_parts)
    look_up_tokens = staticmethod(look_up_tokens_reference)
    write_tokens = staticmethod(write_tokens_reference)
    recorder: type[Recorder] | None = recording.Recording
    call = staticmethod(recording.call)

    def set_num_threads(self, num_threads: int, /) -> None:
        """Threads of torch and of our loops."""
        pool.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """Calls on one token of one head."""
        k_shape, v_shape = head_major_shapes(1, BLOCK_SIZE, 1, _HEAD_DIM)
        k_cache = torch.zeros(k_shape, dtype=dtype)
        v_cache = torch.zeros(v_shape, dtype=dtype)
        x = torch.zeros(1, _HEAD_DIM, dtype=dtype)
        weight = torch.zeros(_HEAD_DIM, dtype=dtype)
        query_starts = torch.tensor([0, 1], dtype=torch.int32)
        attn = AttentionMetadata(
            query_start_B1=query_starts,
            seq_start_B1=query_starts,
            seq_lens_B=torch.ones(1, dtype=torch.int32),
            block_table_BW=torch.zeros(1, 1, dtype=torch.int32),
            kv_places_T=torch.zeros(1, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=1,
        )
        qkv, cos_sin = torch.zeros(1, 3, _HEAD_DIM, dtype=dtype), torch.zeros(1, _HEAD_DIM)
        positions = torch.zeros(1, dtype=torch.int32)
        few_row_products = (
            [linear.run_once] if dtype is torch.bfloat16 and has_dot_products() else []
        )
        return [
            lambda: attention.paged_attention(x.view(1, 1, _HEAD_DIM), k_cache, v_cache, attn, 1.0),
            *few_row_products,
            lambda: elementwise.qk_norm_rope_store(
                qkv, weight, weight, 1e-6, cos_sin, positions, k_cache, v_cache, attn.kv_places_T
            ),
            lambda: sampling.row_best(torch.zeros(1, 1, dtype=dtype)),
            lambda: elementwise.add_rms_norm(x, x, weight, 1e-6),
            lambda: elementwise.silu_and_mul(x),
            lambda: elementwise.rms_norm(x, weight, 1e-6),
            recording.run_once,
        ]


CPU_KERNELS: Kernels = CpuKernels()
