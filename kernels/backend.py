"""Which kernels run on which device: the one place that chooses.

A backend is a frozen set of functions with the same signatures on every device, and the cache layout they agree on.
`cpu` (numba and oneDNN), `triton`, `flash_attn` (its attention, Triton for the rest) and `reference` (plain PyTorch).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.activation import silu_and_mul_reference
from kernels.attention import paged_attention_reference
from kernels.metadata import AttentionMetadata
from kernels.norm import add_rms_norm_reference, rms_norm_reference
from kernels.rope import qk_norm_rope_store_reference
from kernels.sampling import REFERENCE as SAMPLING_REFERENCE
from kernels.sampling import SamplingKernels

Tensor = torch.Tensor
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One backend. Arguments are positional; shapes are told in the file of each kernel.

    description: for the log. check(head_dim, block_size): raises `ValueError` for one it cannot do.
    dtypes: names of those it computes in; fast_dtypes: of those the processor has instructions for.
    kv_cache_shapes(num_blocks, block_size, kv_heads, head_dim): shapes of one layer's keys and of its values, equal in
    their number of elements.
    set_num_threads(n): of the kernels that the calling thread runs from now on; on CPU only.
    compile(dtype): have ready what would otherwise be compiled at its first use.
    pack_weight(weight) -> the weight as `linear` wants it, perhaps the same tensor
    linear(x, packed, bias) -> x @ weight.T + bias
    qk_norm_rope_store(qkv, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slot_mapping) -> q
    paged_attention(q, k_cache, v_cache, attn, scale) -> out
    rms_norm(x, weight, eps) -> normed; add_rms_norm(x, residual, weight, eps) -> (normed, x + residual)
    silu_and_mul(gate_up) -> [T, F]
    sampling: what the sampler runs over the logits.
    """

    name: str
    description: str
    default_block_size: int
    check: Callable[[int, int], None]
    dtypes: tuple[str, ...]
    fast_dtypes: tuple[str, ...]
    kv_cache_shapes: Callable[[int, int, int, int], tuple[Shape, Shape]]
    set_num_threads: Callable[[int], None]
    compile: Callable[[torch.dtype], None]
    pack_weight: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    qk_norm_rope_store: Callable[[Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    sampling: SamplingKernels


def select_backend(
    device: str, name: str = "auto", *, dtype: str | None = None, head_dim: int = 128, block_size: int | None = None
) -> Kernels:
    """The backend called `name`, or the best one for `device` ("cpu" or "cuda", with or without an index).

    "auto" passes over one that is not installed, or cannot do the dtype, head dim or block size. None: the backend's.
    Raises `ValueError` telling what is possible when the name is unknown, or what is named cannot run.
    """
    kind = device.partition(":")[0]
    if kind not in _POSSIBLE:
        raise ValueError(f"there are no kernels for device {device!r}; possible are {', '.join(_POSSIBLE)}")
    possible = _POSSIBLE[kind]
    if name == "auto":
        return _best(_AUTO[kind], possible, dtype, head_dim, block_size)
    if name not in possible:
        names = ", ".join(("auto", *possible))
        raise ValueError(f"kernel backend {name!r} cannot run on device {device!r}; possible are {names}")
    kernels = possible[name]()
    kernels.check(head_dim, block_size or kernels.default_block_size)
    return kernels


def _best(
    names: tuple[str, ...],
    possible: dict[str, Callable[[], Kernels]],
    dtype: str | None,
    head_dim: int,
    block_size: int | None,
) -> Kernels:
    for name in names[:-1]:
        try:
            kernels = possible[name]()
            kernels.check(head_dim, block_size or kernels.default_block_size)
        except ValueError:
            continue  # it was not asked for by name
        if dtype is None or dtype in kernels.dtypes:
            return kernels
    return possible[names[-1]]()


def token_major_shapes(num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[Shape, Shape]:
    """Keys and values [N, P, K, D]."""
    shape = (num_blocks, block_size, kv_heads, head_dim)
    return shape, shape


REFERENCE = Kernels(
    name="reference",
    description="reference (plain PyTorch)",
    default_block_size=16,
    check=lambda head_dim, block_size: None,
    dtypes=("float32", "bfloat16", "float16"),
    fast_dtypes=("float32", "bfloat16", "float16"),
    kv_cache_shapes=token_major_shapes,
    set_num_threads=torch.set_num_threads,
    compile=lambda dtype: None,
    pack_weight=lambda weight: weight,
    linear=functional.linear,
    qk_norm_rope_store=qk_norm_rope_store_reference,
    paged_attention=paged_attention_reference,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    silu_and_mul=silu_and_mul_reference,
    sampling=SAMPLING_REFERENCE,
)


def _cpu() -> Kernels:
    from kernels.cpu.backend import CPU  # imports numba, which a GPU never needs

    return CPU


def _triton() -> Kernels:
    from kernels.gpu.backend import TRITON  # imports triton, which only Linux has

    return TRITON


def _triton_in_the_interpreter() -> Kernels:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "kernel backend 'triton' runs on a CPU in Triton's interpreter alone, to be looked at and tested: set "
            "TRITON_INTERPRET=1, or take 'cpu'"
        )
    return _triton()


def _flash_attn() -> Kernels:
    from kernels.gpu.backend import flash_attn_backend

    return flash_attn_backend()


_POSSIBLE: dict[str, dict[str, Callable[[], Kernels]]] = {
    "cpu": {"cpu": _cpu, "triton": _triton_in_the_interpreter, "reference": lambda: REFERENCE},
    "cuda": {"flash_attn": _flash_attn, "triton": _triton, "reference": lambda: REFERENCE},
}
# Best first; the last one can always be taken.
_AUTO = {"cpu": ("cpu",), "cuda": ("flash_attn", "triton")}
