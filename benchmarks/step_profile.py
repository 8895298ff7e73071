"""Where a decode step's time goes on one CPU rank: `python -m benchmarks.step_profile [--model
DIR]`.

The in-process executor runs a batch; a clock around each kernel adds up its calls. `other` is what
is left of the step: Python, allocation, embedding, the batch's tables. The limit beside `products`
and `attention`: the time to read their weights and keys and values at the memory speed measured
before.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import QWEN3_0_6B, model_or_random, write_result
from benchmarks.dispatch_ways import start_in_process
from configs.engine import EngineConfig
from configs.model import ModelConfig
from kernels.cpu.backend import CPU_KERNELS
from scheduler.messages import Request, ints
from scheduler.params import Sampling
from workers.configuration import resolve_config
from workers.roofline import probe_cpu

KERNELS = ("paged_attention", "qk_norm_rope_store", "rms_norm", "add_rms_norm", "silu_and_mul")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="directory; random weights in the shape of Qwen3-0.6B if left out"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    with model_or_random(args.model, QWEN3_0_6B) as model:
        machine = probe_cpu("bfloat16")
        file_bytes = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
        seconds: defaultdict[str, float] = defaultdict(float)
        with_clocks(seconds)
        config = resolve_config(
            EngineConfig(
                model=model,
                max_num_seqs=args.batch_size,
                max_model_len=4096,
                enable_prefix_caching=False,
            ),
            ModelConfig.from_dir(Path(model)),
            Path(model),
            "cpu",
        )
        engine = start_in_process(config, args.num_threads)
        for row in range(args.batch_size):
            sampling = Sampling(seed=row, max_tokens=args.steps + 40, temperature=0.6)
            tokens = ints([row + 1] * (args.context - args.steps // 2))
            request = Request(
                request_id=str(row),
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                sampling=sampling,
            )
            engine.add(request)
        while any(
            seq.num_output_tokens < 2
            for seq in (*engine.scheduler.running, *engine.scheduler.waiting)
        ):
            engine.step()
        seconds.clear()
        began = time.perf_counter()
        for _ in range(args.steps):
            engine.step()
        total = time.perf_counter() - began
    ms: dict[str, float] = {
        name: round(1000 * value / args.steps, 3)
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    }
    ms["other"] = round(1000 * (total - sum(seconds.values())) / args.steps, 3)
    kv_heads, layers, dim = (
        config.model.num_key_value_heads,
        config.model.num_hidden_layers,
        config.model.head_dim,
    )
    kv_bytes: int = args.batch_size * args.context * 2 * 2 * kv_heads * dim * layers
    head_bytes = 2 * config.model.vocab_size * config.model.hidden_size
    floors: dict[str, float] = {
        "products": file_bytes - head_bytes,
        "vocabulary head": head_bytes,
        "paged_attention": kv_bytes,
    }
    write_result(
        "step_profile",
        "floor_ms: reading weights, keys and values once at memory speed",
        {
            "batch_size": args.batch_size,
            "context": args.context,
            "num_threads": args.num_threads,
            "model": "0.6B shape" if args.model is None else Path(args.model).name,
            "ms_a_step": round(1000 * total / args.steps, 2),
            "ms": ms,
            "floor_ms": {
                k: round(1000 * v / machine.memory_bytes_per_s, 2) for k, v in floors.items()
            },
        },
    )


def with_clocks(seconds: dict[str, float]) -> None:
    """Put a clock around every kernel of the CPU backend."""

    def clocked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = kernel(*args)
            product = (
                "vocabulary head" if name == "linear" and result.shape[-1] > 50_000 else "products"
            )
            seconds[product if name == "linear" else name] += time.perf_counter() - began
            return result

        return run

    for name in (*KERNELS, "linear"):
        setattr(CPU_KERNELS, name, clocked(name, getattr(CPU_KERNELS, name)))
    for name in (name for name in dir(CPU_KERNELS.sampling) if not name.startswith("_")):
        setattr(
            CPU_KERNELS.sampling, name, clocked("sampling", getattr(CPU_KERNELS.sampling, name))
        )


if __name__ == "__main__":
    main()
