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
    files; `extra` is passed to Qwen3Config, or to Qwen3MoeConfig if it says the number of experts.
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
    import transformers

    kind = "Qwen3Moe" if "num_experts" in shape.extra else "Qwen3"
    config: Any = getattr(transformers, f"{kind}Config")(
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
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
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
    return 2.0 * noise / math.sqrt(parameter.shape[-1])


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


def pack_checkpoint(
    model_dir: Path,
    model: Any,
    *,
    bits: int = 8,
    group_size: int = 32,
    ordered: bool = True,
    symmetric: bool = True,
    checkpoint_format: str = "gptq",
) -> None:
    """Rewrite a checkpoint of one file as GPTQ stores it, and give `model`, its transformers model,
    the values that are stored now. ordered: the inputs of a group follow one another.
    """
    from safetensors.torch import load_file, save_file

    path, weights = model_dir / "model.safetensors", model.state_dict()
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values_YX = tensors.pop(name).double()
        size_in, size = values_YX.shape[1], values_YX.shape[1] if group_size == -1 else group_size
        group_X = torch.arange(size_in) // size
        if not ordered:
            group_X = group_X[torch.randperm(size_in, generator=generator)]
        largest_code, middle = 2**bits - 1, 2 ** (bits - 1)
        scales, zeros = [], []
        for group in range(int(group_X.max()) + 1):
            part = values_YX[:, group_X == group]
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if symmetric:
                scale = torch.maximum(-low, high) / (middle - 1)
                zero = torch.full_like(scale, middle)
            else:
                scale = (high - low) / largest_code
                zero = (-low / scale).round()
            scales.append(scale.half())
            zeros.append(zero)
        scales_GY, zeros_GY = torch.stack(scales), torch.stack(zeros)
        scale_YX = scales_GY[group_X].T.double()
        zero_YX = zeros_GY[group_X].T
        codes_YX = (values_YX / scale_YX + zero_YX).round().clamp(0, largest_code)
        weights[name].copy_((codes_YX - zero_YX) * scale_YX)
        zero_words = _words(zeros_GY, bits)
        if checkpoint_format == "gptq":  # 1 is subtracted from each, with what that borrows
            zero_words = zero_words - (0x11111111 if bits == 4 else 0x01010101)
        tensors |= {
            name.replace("weight", "qweight"): _words(codes_YX, bits).T.contiguous(),
            name.replace("weight", "qzeros"): zero_words,
            name.replace("weight", "scales"): scales_GY,
            name.replace("weight", "g_idx"): group_X.int(),
        }
    save_file(tensors, path)
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = GPTQ | {
        "bits": bits,
        "group_size": group_size,
        "desc_act": not ordered,
        "sym": symmetric,
        "checkpoint_format": checkpoint_format,
    }
    (model_dir / "config.json").write_text(json.dumps(config))


def _words(codes_AB: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B * bits / 32]: each row's codes as the bytes of little-endian words; two codes of
    4 bits are a byte, the first one its lower half.
    """
    array = codes_AB.to(torch.uint8).numpy()
    if bits == 4:
        array = array[:, 0::2] + 16 * array[:, 1::2]
    return torch.from_numpy(array.copy().view("<i4"))


# What GPTQModel writes.
GPTQ: dict[str, Any] = {
    "bits": 8,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "static_groups": False, "true_sequential": True},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}


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
