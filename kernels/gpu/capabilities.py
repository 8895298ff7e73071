"""What the Triton backend can do, and all GPU backends. Imports neither torch nor Triton."""

from kernels.interface import Capabilities

# Products are the same with any attention.
QUANTIZATIONS = ("int4", "fp8")

# Blocks of 64 tokens: on an H200, decode attention takes 4 to 10% longer with blocks of 16, and 0
# to 3% less with blocks of 128, which share fewer prefixes.
TRITON_CAPABILITIES = Capabilities(
    name="triton",
    description="triton",
    default_block_size=64,
    dtypes=("float32", "bfloat16", "float16"),
    fast_dtypes=("float32", "bfloat16", "float16"),
    quantizations=QUANTIZATIONS,
    kv_cache_dtypes=("fp8_e4m3",),
)
