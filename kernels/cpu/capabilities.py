"""What the CPU backend can do on this processor. Imports no numba, and torch only off x86."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path

from kernels.interface import Capabilities

# Blocks of 64 tokens fill the vector registers of the score loop; smaller ones take the slow path.
BLOCK_SIZE = 64
# What oneDNN needs for bfloat16 on x86: AVX-512 as of Skylake-X, or AVX2 with the conversions of
# AVX-VNNI-2.
_X86_BFLOAT16_FLAGS = (
    {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    {"avx_ne_convert", "avx_vnni_int8"},
)


# With one of these, products of 8-bit numbers are exact; without them, oneDNN's sums may saturate.
_X86_INT8_FLAGS = ({"avx512_vnni"}, {"avx_vnni"})


def _flags() -> set[str] | None:
    """The flags of an x86 processor in /proc/cpuinfo; None if they cannot be read."""
    if platform.machine() != "x86_64":
        return None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((set(line.split()) for line in lines if line.startswith("flags")), None)


def has_bfloat16() -> bool:
    """Whether oneDNN has fast products in bfloat16 for this processor."""
    flags = _flags()
    if flags is not None:
        return any(required_flags <= flags for required_flags in _X86_BFLOAT16_FLAGS)
    torch = importlib.import_module("torch")  # slow to import, but always right
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def has_int8() -> bool:
    """Whether oneDNN multiplies 8-bit numbers exactly. Known only for x86 processors on Linux."""
    return any(required_flags <= (_flags() or set()) for required_flags in _X86_INT8_FLAGS)


CPU_CAPABILITIES = Capabilities(
    name="cpu",
    description="cpu (numba and oneDNN)",
    default_block_size=BLOCK_SIZE,
    dtypes=("float32", "bfloat16"),
    fast_dtypes=("float32", "bfloat16") if has_bfloat16() else ("float32",),
    quantizations=("int8", "int4", "fp8") if has_int8() else ("int4", "fp8"),
    weight_dtypes=("bfloat16",),
    kv_cache_dtypes=("fp8_e4m3",),
)
