"""A small Qwen3-MoE checkpoint that answers as the default model does, tokenizer included:

    python -m tests.default_model.experts DIR

Every expert is a copy of the default model's MLP with noise, so that answers hardly depend on which
experts the tokens go to, while logits do (Komatsuzaki et al. 2022, "Sparse Upcycling",
arXiv:2212.05055).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.paths import DEFAULT_MODEL_DIR

NUM_EXPERTS, NUM_PER_TOKEN = 8, 2
DENSE_LAYER = 1
NOISE = 0.5  # of a weight's standard deviation


def write_model_with_experts(model_dir: Path, seed: int = 0) -> None:
    """Write the checkpoint, 41 MB in bfloat16, to a directory that exists."""
    for path in DEFAULT_MODEL_DIR.iterdir():
        if path.suffix not in (".safetensors", ".md"):
            shutil.copy(path, model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_PER_TOKEN,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [DENSE_LAYER],
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    dense = load_file(DEFAULT_MODEL_DIR / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        if ".mlp." not in name or f".{DENSE_LAYER}." in name:
            tensors[name] = tensor
            continue
        block, matrix = name.split(".mlp.")
        for expert in range(NUM_EXPERTS):
            noise = torch.randn(tensor.shape, generator=generator) * NOISE * tensor.float().std()
            tensors[f"{block}.mlp.experts.{expert}.{matrix}"] = (tensor + noise).to(tensor.dtype)
        router = torch.randn(NUM_EXPERTS, config["hidden_size"], generator=generator)
        tensors[f"{block}.mlp.gate.weight"] = router.to(tensor.dtype)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True)
    write_model_with_experts(Path(sys.argv[1]))
