"""Random checkpoints of any Qwen3 shape: small ones written by transformers, large ones written
fast.

In the small ones weights are drawn wide, norms and biases too, so that greedy outputs vary and
every parameter shows in them. The large ones are for measuring memory and time; their values say
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.model import ModelConfig
from workers.models.checkpoint import SINGLE_NAME, expected_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a test model. The weights go to at least `num_shards` files; `extra` goes to
    Qwen3Config as it is.
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
    extra: dict[str, Any] = field(default_factory=dict)


def make_checkpoint(model_dir: Path, shape: Shape, seed: int = 0) -> Any:
    """Write a float32 checkpoint and return the transformers model it came from, in eval mode."""
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
        parameter.copy_(_draw(name, parameter, generator))
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(
        model_dir,
        max_shard_size=math.ceil(size / shape.num_shards) if shape.num_shards > 1 else "5GB",
    )
    return model


def write_fast_checkpoint(
    model_dir: Path, raw_config: Mapping[str, Any], dtype: torch.dtype
) -> int:
    """Write one file of small random values for a `config.json`; returns its size in bytes."""
    (model_dir / "config.json").write_text(json.dumps(dict(raw_config)))
    shapes = expected_tensors(ModelConfig.from_dir(model_dir))
    tensors = {
        name: torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05)
        for name, shape in shapes.items()
    }
    save_file(tensors, model_dir / SINGLE_NAME)
    return (model_dir / SINGLE_NAME).stat().st_size


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * noise
    if name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
        return 0.5 * noise
    return 2.0 * noise / math.sqrt(parameter.shape[1])
