"""Large shapes with random weights on one GPU: `python -m benchmarks.gpu_large [--shapes 8B 32B]`.

For each shape and each kind of cache: the tokens that the cache holds, the time of a prompt of
32,768 tokens, and decode steps of one and of several rows of that length. In this process, without
Ray. Prints one JSON line each. `--small`: a tiny shape and rows of 12 tokens, on any device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu_check import find_backends
from benchmarks.gpu_check_common import Check, rounded
from benchmarks.gpu_check_engine import (
    TINY,
    Parts,
    add,
    near_zero,
    open_engine,
    prompts_of,
    run_all,
)
from benchmarks.peer_workload import SHAPES

# Tokens of a row, rows, timed steps, tokens that a row may grow by.
Sizes = tuple[int, int, int, int]
SIZES: Sizes = (32768, 4, 20, 64)
SMALL_SIZES: Sizes = (12, 2, 2, 8)


def measure(
    check: Check, name: str, raw: dict[str, Any], kv_cache_dtype: str, sizes: Sizes
) -> dict[str, Any]:
    """One shape with one kind of cache."""
    context, most_rows, _, more = sizes
    blocks: dict[str, Any] = {} if check.on_gpu else {"num_kv_blocks": 64}
    began = time.perf_counter()
    with open_engine(
        check,
        raw,
        "triton",
        near_zero,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=False,
        max_num_seqs=most_rows,
        max_num_batched_tokens=8192 if check.on_gpu else 256,
        max_model_len=context + more,
        **blocks,
    ) as parts:
        _, executor, config = parts
        num_tokens = executor.inner.num_kv_blocks * config.block_size
        line: dict[str, Any] = {
            "shape": name,
            "kv_cache_dtype": config.kv_cache_dtype,
            "context": context,
            "start_s": rounded(time.perf_counter() - began, 3),
            "cache_tokens": num_tokens,
        }
        rows = min(most_rows, num_tokens // (context + more))
        for num in sorted({1, rows} if rows else ()):
            line |= _decode(parts, raw, num, sizes)
    return line


def _decode(parts: Parts, raw: dict[str, Any], num_rows: int, sizes: Sizes) -> dict[str, Any]:
    """Prompt tokens per second until all rows have their first token, and milliseconds of a
    step.
    """
    (engine, _, _), (context, _, steps, more) = parts, sizes
    prompts = prompts_of(raw, [context - steps] * num_rows, seed=num_rows)
    for number, prompt in enumerate(prompts):
        add(engine, number, prompt, steps + more // 2, temperature=0.6)
    began = time.perf_counter()
    while any(
        seq.num_output_tokens < 1 for seq in (*engine.scheduler.running, *engine.scheduler.waiting)
    ):
        engine.step()
    prompts_s = time.perf_counter() - began
    moments = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        moments.append(time.perf_counter())
    run_all(engine)
    step_s = statistics.median(b - a for a, b in itertools.pairwise(moments))
    name = f"{num_rows}_rows"
    return {
        f"{name}_prompt_tokens_per_s": rounded(num_rows * (context - steps) / prompts_s),
        f"{name}_step_ms": rounded(1000 * step_s),
        f"{name}_tokens_per_s": rounded(num_rows / step_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Large shapes and long rows.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B", "32B"])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    check = Check(device=device, small=args.small, backends=find_backends(device))
    shapes = {"tiny": TINY} if args.small else {name: SHAPES[name] for name in args.shapes}
    failed = False
    for name, raw in shapes.items():
        for kv_cache_dtype in ("auto", "fp8_e4m3"):
            try:
                line = measure(
                    check, name, raw, kv_cache_dtype, SMALL_SIZES if args.small else SIZES
                )
            except Exception as error:  # a shape that does not fit says so; the next one may
                failed = True
                line = {"shape": name, "kv_cache_dtype": kv_cache_dtype, "error": str(error)[:300]}
            print(json.dumps(line), flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
