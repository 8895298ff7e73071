"""The workload through continuous batching in transformers, with a paged cache.

    python -m benchmarks.peer_transformers --model DIR

With FlashAttention-3 where it runs, over keys and values that are gathered first, because the wheel
fa3-fwd cannot append to pages; otherwise with torch's attention over a mask of the whole batch.
Graphs and everything else as transformers chooses. Prints one JSON line. `--small`: three short
requests, on a CPU too.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.peer_workload import TEMPERATURE, draw, row

_RESULT_S = 120.0


def install_flash_attn_3() -> str | None:
    """Let transformers find fa3-fwd under the name by which it imports FlashAttention-3. None where
    it is not installed.
    """
    try:
        library = importlib.import_module("fa3_fwd_interface")
    except ModuleNotFoundError:
        return None
    import_utils: Any = importlib.import_module("transformers.utils.import_utils")
    # transformers 5.17 looks there for the package of a module; others find no such package.
    packages = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if packages is None:
        return None
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.__version__ = "3"  # type: ignore[attr-defined]
    module.flash_attn_func = library.flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = library.flash_attn_varlen_func  # type: ignore[attr-defined]
    # Without it transformers gathers keys and values before it calls the other.
    module.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    sys.modules["flash_attn_interface"] = module
    packages["flash_attn_interface"] = ["flash-attn-3"]
    import_utils.is_flash_attn_3_available.cache_clear()
    return "flash_attention_3"


def measure(model: Any, small: bool) -> tuple[int, float, float]:
    """Output tokens, seconds of the workload, seconds until everything was ready."""
    prompts, lengths = draw(small)
    generation = transformers.GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    hints = WorkloadHints(
        max_prompt_length=max(map(len, prompts)),
        max_generated_length=max(lengths),
        num_requests=len(prompts),
    )
    # Otherwise the cache takes nearly all memory, which on a CPU takes a minute.
    sizes: dict[str, Any] = (
        {"num_blocks": 32, "block_size": 16, "max_batch_tokens": 64} if small else {}
    )
    began_s = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        workload_hints=hints,
    ) as manager:
        _generate(manager, prompts[:1], [2])
        start_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        counts = _generate(manager, prompts, lengths)
        total_s = time.perf_counter() - began_s
    if counts != lengths:
        raise RuntimeError("outputs do not have the lengths that were asked for")
    return sum(lengths), total_s, start_s


def _generate(manager: Any, prompts: list[list[int]], lengths: list[int]) -> list[int]:
    """How many tokens each request got."""
    ids = [
        manager.add_request(prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    counts: dict[str, int] = {}
    while len(counts) < len(ids):
        result = manager.get_result(timeout=_RESULT_S)
        if result is None or result.error is not None:
            raise RuntimeError(f"no result: {result.error if result is not None else 'too late'}")
        if result.is_finished():
            counts[result.request_id] = len(result.generated_tokens)
    return [counts[request_id] for request_id in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description="Continuous batching in transformers.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--attention", help="of transformers; by default the best that there is")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU")
    attention = args.attention or (install_flash_attn_3() if on_gpu else None) or "sdpa"
    implementation = f"paged|{attention}"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        attn_implementation=implementation,
    )
    model = model.to("cuda" if on_gpu else "cpu")
    num_tokens, total_s, start_s = measure(model.eval(), args.small)
    name = f"transformers {transformers.__version__}, continuous batching"
    print(row(name, implementation, num_tokens, total_s, start_s=round(start_s, 1)), flush=True)


if __name__ == "__main__":
    main()
