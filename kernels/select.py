"""Which kernels run on which device: the one place that chooses.

Backends are `cpu` (numba and oneDNN), `triton`, `flash_attn` (its attention, Triton for the rest),
`hybrid` (FlashAttention-3 for the rows of several queries, Triton for the rest) and `reference`
(plain PyTorch). `choose_capabilities` needs no torch for the CPU and for Triton, so a client can
tell what would run; `select_backend` imports the backend.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from kernels.gpu.capabilities import TRITON_CAPABILITIES
from kernels.interface import Capabilities, Kernels
from kernels.reference.capabilities import REFERENCE_CAPABILITIES, REFERENCE_GPU_CAPABILITIES


def select_backend(
    device: str, name: str = "auto", head_dim: int = 128, block_size: int | None = None
) -> Kernels:
    """The kernels of the backend that `choose_capabilities` chooses. Raises `ValueError`."""
    capabilities = choose_capabilities(device, name, head_dim=head_dim, block_size=block_size)
    return _backends_of(device)[capabilities.name].load()


def choose_capabilities(
    device: str,
    name: str = "auto",
    *,
    dtype: str | None = None,
    head_dim: int = 128,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
) -> Capabilities:
    """The backend called `name`, or the best one for `device` ("cpu" or "cuda", with or without an
    index).

    "auto" skips a backend that is not installed or cannot do one of the dtypes, the head dim or the
    block size; the last automatic one is taken unchecked. Ranks get it by name, and so refuse a
    shape that it cannot do. `block_size` None means the backend's default, `dtype` None any. Raises
    `ValueError` saying what is possible when the name is unknown, or what it names is not installed
    or cannot do the head dim or the block size; what else a backend lacks, `resolve` refuses
    (`workers/configuration.py`).
    """
    backends = _backends_of(device)
    if name == "auto":
        return _best_capabilities(backends, dtype, head_dim, block_size, kv_cache_dtype)
    if name not in backends:
        possible_names = ", ".join(("auto", *backends))
        raise ValueError(
            f"kernel backend {name!r} cannot run on device {device!r}; possible are"
            f" {possible_names}"
        )
    capabilities = backends[name].describe()
    capabilities.check_shape(head_dim, block_size or capabilities.default_block_size)
    return capabilities


def quantization_backends_text(quantization: str) -> str:
    """Which backends can compute here with weights in this format, for a message."""
    return ", ".join(
        f"{backend_name!r} ({device_type})"
        for device_type, backends in BACKENDS.items()
        for backend_name, backend in backends.items()
        if _has_quantization(backend, quantization)
    )


def _has_quantization(backend: Backend, quantization: str) -> bool:
    try:
        return quantization in backend.describe().quantizations
    except ValueError:
        return False  # it is not installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How to describe and how to load one backend. `describe` raises `ValueError` where it is not
    installed.
    """

    describe: Callable[[], Capabilities]
    load: Callable[[], Kernels]
    is_automatic: bool = True  # whether "auto" may choose it


def _backends_of(device: str) -> dict[str, Backend]:
    device_type = device.partition(":")[0]
    if device_type not in BACKENDS:
        raise ValueError(
            f"there are no kernels for device {device!r}; possible are {', '.join(BACKENDS)}"
        )
    return BACKENDS[device_type]


def _best_capabilities(
    backends: dict[str, Backend],
    dtype: str | None,
    head_dim: int,
    block_size: int | None,
    kv_cache_dtype: str,
) -> Capabilities:
    automatic_backends = [backend for backend in backends.values() if backend.is_automatic]
    for backend in automatic_backends[:-1]:
        try:
            capabilities = backend.describe()
            capabilities.check_shape(head_dim, block_size or capabilities.default_block_size)
        except ValueError:
            continue  # it was not asked for by name
        has_cache_dtype = kv_cache_dtype in ("auto", *capabilities.kv_cache_dtypes)
        if has_cache_dtype and (dtype is None or dtype in capabilities.dtypes):
            return capabilities
    return automatic_backends[-1].describe()


def _describe_cpu() -> Capabilities:
    from kernels.cpu.capabilities import CPU_CAPABILITIES

    return CPU_CAPABILITIES


def _load_cpu() -> Kernels:
    from kernels.cpu.backend import CPU_KERNELS  # imports numba, which a GPU never needs

    return CPU_KERNELS


def _describe_triton() -> Capabilities:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernel backend 'triton' needs the package triton, which is not installed")
    return TRITON_CAPABILITIES


def _load_triton() -> Kernels:
    from kernels.gpu.backend import TRITON_KERNELS  # imports triton, which only Linux has

    return TRITON_KERNELS


def _describe_interpreted_triton() -> Capabilities:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "kernel backend 'triton' runs on a CPU only in Triton's interpreter, which is for tests"
            " and debugging: set TRITON_INTERPRET=1, or choose 'cpu'"
        )
    return _describe_triton()


def _describe_flash_attn() -> Capabilities:
    from kernels.gpu.flash_attn import installed_flash_attn

    return installed_flash_attn().capabilities


def _load_flash_attn() -> Kernels:
    from kernels.gpu.backend import FlashAttnKernels
    from kernels.gpu.flash_attn import installed_flash_attn

    return FlashAttnKernels(installed_flash_attn())


def _describe_hybrid() -> Capabilities:
    from kernels.gpu.flash_attn import installed_flash_attn_3

    return installed_flash_attn_3().hybrid_capabilities


def _load_hybrid() -> Kernels:
    from kernels.gpu.backend import HybridKernels
    from kernels.gpu.flash_attn import installed_flash_attn_3

    return HybridKernels(installed_flash_attn_3())


def _load_reference() -> Kernels:
    from kernels.reference.backend import REFERENCE_KERNELS

    return REFERENCE_KERNELS


_REFERENCE_BACKEND = Backend(
    describe=lambda: REFERENCE_CAPABILITIES, load=_load_reference, is_automatic=False
)
_REFERENCE_GPU_BACKEND = replace(_REFERENCE_BACKEND, describe=lambda: REFERENCE_GPU_CAPABILITIES)
# Best first. The last automatic backend of a device is taken unchecked.
BACKENDS: dict[str, dict[str, Backend]] = {
    "cpu": {
        "cpu": Backend(describe=_describe_cpu, load=_load_cpu),
        "triton": Backend(
            describe=_describe_interpreted_triton, load=_load_triton, is_automatic=False
        ),
        "reference": _REFERENCE_BACKEND,
    },
    "cuda": {
        "hybrid": Backend(describe=_describe_hybrid, load=_load_hybrid),
        "flash_attn": Backend(describe=_describe_flash_attn, load=_load_flash_attn),
        "triton": Backend(describe=_describe_triton, load=_load_triton),
        "reference": _REFERENCE_GPU_BACKEND,
    },
}
