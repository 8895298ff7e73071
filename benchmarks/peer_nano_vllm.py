"""nano-vLLM's benchmark, from somebody's checkout of it, with FlashAttention-3 as its flash-attn.

    python -m benchmarks.peer_nano_vllm --checkout DIR --model DIR

Nothing of the checkout is changed. The model and the workload are those of
`benchmarks.peer_workload`; as in nano-vLLM's own `bench.py`, the time includes turning the outputs
into text. Prints one JSON line, which names the attention. `--small`: three short requests; without
a GPU, on the CPU (`benchmarks.peer_nano_vllm_on_cpu`).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_flash_attn import flash_attn_3, reference
from benchmarks.peer_nano_vllm_on_cpu import calls_of_cuda_on_cpu
from benchmarks.peer_workload import MAX_MODEL_LEN, TEMPERATURE, draw, row


def install_attention(on_gpu: bool) -> tuple[str, float | None]:
    """Make `import flash_attn` possible; which attention it is, and its largest error."""
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn as installed", None
    attention = flash_attn_3() if on_gpu else reference()
    error = attention.check(
        torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    )
    attention.install()
    return f"{attention.version}, through an adapter", float(f"{error:.3g}")


def measure(nanovllm: Any, model: Path, small: bool, on_gpu: bool) -> tuple[int, float, float]:
    """Output tokens, seconds of the workload, seconds of the start."""
    prompts, lengths = draw(small)
    params = [
        nanovllm.SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length)
        for length in lengths
    ]
    began_s = time.perf_counter()
    llm = nanovllm.LLM(str(model), enforce_eager=not on_gpu, max_model_len=MAX_MODEL_LEN)
    atexit.unregister(llm.exit)
    # FlashAttention-3 multiplies what lies behind the end of a row by 0, so it must be a number.
    llm.model_runner.kv_cache.zero_()
    llm.generate(["Benchmark: "], nanovllm.SamplingParams(), use_tqdm=False)
    start_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    total_s = time.perf_counter() - began_s
    llm.exit()
    if [len(output["token_ids"]) for output in outputs] != lengths:
        raise RuntimeError("outputs do not have the lengths that were asked for")
    return sum(lengths), total_s, start_s


def main() -> None:
    parser = argparse.ArgumentParser(description="nano-vLLM's benchmark.")
    parser.add_argument("--checkout", type=Path, required=True, help="where `nanovllm` lies")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not (args.checkout / "nanovllm").is_dir():
        parser.error(f"{args.checkout} has no folder nanovllm; --checkout names a checkout of it")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU")
    attention, error = install_attention(on_gpu)
    sys.path.insert(0, str(args.checkout.resolve()))
    with contextlib.nullcontext() if on_gpu else calls_of_cuda_on_cpu():
        nanovllm = importlib.import_module("nanovllm")
        num_tokens, total_s, start_s = measure(nanovllm, args.model, args.small, on_gpu)
        print(
            row(
                "nano-vLLM",
                attention,
                num_tokens,
                total_s,
                attention_error=error,
                start_s=round(start_s, 1),
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
