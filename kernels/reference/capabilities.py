"""What the reference backend can do. Imports no torch."""

import dataclasses

from kernels.interface import Capabilities

REFERENCE_CAPABILITIES = Capabilities(
    name="reference",
    description="reference (plain PyTorch)",
    default_block_size=16,
    dtypes=("float32", "bfloat16", "float16"),
    fast_dtypes=("float32", "bfloat16", "float16"),
    quantizations=("int8", "int4", "fp8"),
    kv_cache_dtypes=("fp8_e4m3",),
)
# Codes in groups would be widened in every step: on a GPU they are held as values instead.
# Attention, experts and storing keys and values wait for values on the device.
REFERENCE_GPU_CAPABILITIES = dataclasses.replace(
    REFERENCE_CAPABILITIES, quantizations=("int8",), fits_graphs=False
)
