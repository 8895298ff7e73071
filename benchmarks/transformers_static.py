"""A workload file through static batching with transformers: `python -m
benchmarks.transformers_static MODEL FILE`.

All prompts are one left-padded batch, which runs until its longest output is done, as static
batching must; only the requested tokens are counted. Prints one JSON line: output_tokens_per_s,
total_s, tokens in and out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PAD_ID = 0


def main() -> None:
    """Load, warm up, generate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("workload", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    work = [json.loads(line) for line in args.workload.read_text().splitlines() if line.strip()]
    prompts = [line["prompt_token_ids"] for line in work]
    wanted = [line["sampling_params"]["max_tokens"] for line in work]
    temperature = work[0]["sampling_params"].get("temperature", 1.0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    model.generation_config.eos_token_id = None
    generate(model, [[1, 2, 3]], 4, temperature)
    started = time.perf_counter()
    generate(model, prompts, max(wanted), temperature)
    total_s = time.perf_counter() - started
    line = {
        "engine": "transformers-static",
        "requests": len(work),
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": sum(wanted),
        "total_s": round(total_s, 3),
        "output_tokens_per_s": round(sum(wanted) / total_s, 2),
    }
    print(json.dumps(line))


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], num_tokens: int, temperature: float) -> None:
    """Exactly `num_tokens` for each prompt. Temperature 0 is greedy."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = (
        {"do_sample": False}
        if temperature == 0
        else {"do_sample": True, "temperature": temperature, "top_k": 0}
    )
    output = model.generate(
        token_ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=PAD_ID,
        **sampling,
    )
    assert output.shape[1] == longest + num_tokens, output.shape


if __name__ == "__main__":
    main()
