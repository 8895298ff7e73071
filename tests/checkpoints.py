"""Small random checkpoints of any Qwen3 shape, written by transformers.

Weights are drawn wide, norms and biases too, so that greedy outputs vary and every parameter
affects them.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a test model. The weights are stored in `dtype` and split into at least `num_shards`
    files; `extra` is passed to Qwen3Config.
    """

    name: str
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    vocab: int = 512
    tied: bool = False
    max_positions: int = 256
    num_shards: int = 1
    dtype: torch.dtype = torch.float32
    extra: dict[str, Any] = field(default_factory=dict)


def make_checkpoint(model_dir: Path, shape: Shape, seed: int = 0) -> Any:
    """Write a checkpoint. Returns the transformers model with the stored values, in float32 and
    eval mode.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config: Any = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        **{"attn_implementation": "eager", **shape.extra},
    )
    model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.copy_(_draw(name, parameter, generator).to(shape.dtype))
    stored = copy.deepcopy(model).to(shape.dtype)
    size = sum(parameter.nbytes for parameter in stored.parameters())
    stored.save_pretrained(
        model_dir,
        max_shard_size=math.ceil(size / shape.num_shards) if shape.num_shards > 1 else "5GB",
    )
    return model


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * noise
    if name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
        return 0.5 * noise
    return 2.0 * noise / math.sqrt(parameter.shape[1])


def quantize_checkpoint(model_dir: Path) -> None:
    """Rewrite a checkpoint of one file as compressed-tensors stores 8-bit weights: codes and a
    `weight_scale` per row for each layer matrix, and a `quantization_config`.
    """
    from safetensors.torch import load_file, save_file

    from kernels.reference.int8 import quantize_rows

    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scale = quantize_rows(tensors[name])
        tensors |= {name: codes, f"{name}_scale": scale.unsqueeze(1)}
    save_file(tensors, path)
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = COMPRESSED_TENSORS
    (model_dir / "config.json").write_text(json.dumps(config))


# What llm-compressor writes for its scheme W8A8 with `ignore=["lm_head"]`.
COMPRESSED_TENSORS: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
