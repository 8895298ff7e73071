"""What every engine of a comparison is given: a checkpoint of random weights and a workload.

    python -m benchmarks.peer_workload DIR [--shape 0.6B]

writes DIR/model, with the default model's tokenizer made as large as the model's vocabulary, and
DIR/workload.jsonl, which `launch.py bench --input` reads. The workload is the one of nano-vLLM's
benchmark: 256 requests, inputs and outputs of 100 to 1,024 tokens, 133,966 output tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import QWEN3_0_6B
from configs.paths import DEFAULT_MODEL_DIR
from configs.shapes import SHAPES as NAMED
from workers.models.random_checkpoint import write_random_checkpoint

TINY = QWEN3_0_6B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
SHAPES = {"tiny": TINY, "0.6B": QWEN3_0_6B, "8B": NAMED["qwen3-8b"], "32B": NAMED["qwen3-32b"]}
TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096
_LAST_ID = 10_000
# Enough of an output's config for other engines, which read what Eagleray fills in by itself.
_FOR_OTHERS = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def draw(small: bool = False) -> tuple[list[list[int]], list[int]]:
    """The prompts' token ids, and the number of output tokens of each. `small`: three prompts."""
    num_seqs, low, high = (3, 4, 12) if small else (256, 100, 1024)
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, _LAST_ID) for _ in range(rng.randint(low, high))] for _ in range(num_seqs)
    ]
    return prompts, [rng.randint(low, high) for _ in range(num_seqs)]


def write_model(model_dir: Path, shape: str) -> int:
    """Write a checkpoint of this shape that any engine can read; returns its bytes."""
    model_dir.mkdir(parents=True, exist_ok=True)
    size = write_random_checkpoint(model_dir, SHAPES[shape] | _FOR_OTHERS, torch.bfloat16)
    shutil.copy(DEFAULT_MODEL_DIR / "tokenizer_config.json", model_dir)
    _write_tokenizer(model_dir / "tokenizer.json", SHAPES[shape]["vocab_size"])
    return size


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """The default model's, with a text for every further id too: a token without one sends no event
    to whoever reads a stream.
    """
    tokenizer = json.loads((DEFAULT_MODEL_DIR / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # Their ids are those in the vocabulary, if they are there, else they follow it.
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {f"\u0120{number}": number for number in range(len(vocabulary), vocab_size)}
    path.write_text(json.dumps(tokenizer))


def write_workload(path: Path, small: bool) -> int:
    """Write the requests as `launch.py bench --input` reads them; returns their number."""
    lines = [
        {
            "prompt_token_ids": prompt,
            "sampling_params": {
                "temperature": TEMPERATURE,
                "max_tokens": length,
                "ignore_eos": True,
            },
        }
        for prompt, length in zip(*draw(small), strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def row(engine: str, attention: str, num_tokens: int, total_s: float, **more: Any) -> str:
    """The line that a peer prints."""
    return json.dumps(
        {
            "engine": engine,
            "attention": attention,
            "output_tokens": num_tokens,
            "total_s": round(total_s, 3),
            "output_tokens_per_s": round(num_tokens / total_s, 1),
            **more,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A random checkpoint and a workload.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--small", action="store_true", help="three short requests")
    args = parser.parse_args()
    began = time.perf_counter()
    size = write_model(args.out / "model", args.shape)
    num = write_workload(args.out / "workload.jsonl", args.small)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"written_bytes": size, "requests": num, "seconds": seconds}))


if __name__ == "__main__":
    main()
