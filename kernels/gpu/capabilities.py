"""What the Triton backend can do. Imports neither torch nor Triton."""

from kernels.interface import Capabilities

TRITON = Capabilities(
    name="triton",
    description="triton",
    default_block_size=16,
    dtypes=("float32", "bfloat16", "float16"),
    fast_dtypes=("float32", "bfloat16", "float16"),
    kv_cache_dtypes=("fp8_e4m3",),
)
