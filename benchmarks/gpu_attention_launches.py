"""Both attention kernels at the shape of Qwen3-0.6B, launched a few times, for a profiler to watch:

    ncu -k regex:"prefill_kernel|decode_kernel" python -m benchmarks.gpu_attention_launches

Decode: 64 rows of 2,048 tokens. Prefill: four prompts of 2,048 tokens.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.gpu_check_common import attention_of, with_parts
from kernels.select import select_backend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
BATCHES = {"decode": ([2048] * 64, [1] * 64), "prefill": ([2048] * 4, [2048] * 4)}
SMALL = {"decode": ([40, 9], [1, 1]), "prefill": ([20, 7], [20, 7])}
LAUNCHES = 4


def launch(seq_lens: list[int], query_lens: list[int], device: torch.device) -> None:
    """Launch the kernel `LAUNCHES` times on random numbers, and wait for it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    kernels = select_backend(device.type, "triton")
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
    attn = attention_of(seq_lens, query_lens, torch.randperm(num_blocks), BLOCK_SIZE, device)
    attn = with_parts(attn, query_lens, kernels, KV_HEADS)
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, dtype=dtype, device=device)
    k_cache, v_cache = (
        torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
        for _ in range(2)
    )
    for _ in range(LAUNCHES):
        out = kernels.paged_attention(q, k_cache, v_cache, attn, HEAD_DIM**-0.5)
    if not bool(out.isfinite().all()):  # waits for the GPU
        raise RuntimeError("attention gave something that is not a number")


def main() -> None:
    parser = argparse.ArgumentParser(description="Launches of the attention kernels.")
    parser.add_argument("--small", action="store_true", help="tiny batches, on any device")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, batch in (SMALL if args.small else BATCHES).items():
        launch(*batch, device)
        print(f"{name}: {LAUNCHES} launches")


if __name__ == "__main__":
    main()
