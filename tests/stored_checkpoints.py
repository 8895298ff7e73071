"""Small checkpoints in the formats of quantized models, each written as its own tool writes it.

Codes, zero points and scales are drawn, and the values that they stand for computed in float64, one
group at a time: nothing here is shared with the code that reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Matrix = tuple[torch.Tensor, Tensors]  # (values [Y, X] in float64, tensors by their last part)
SINGLE_FILE_NAME = "model.safetensors"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of AutoAWQ's gemm_pack


def write_stored(
    model_dir: Path, model: Any, config: dict[str, Any], draw: Callable[[Any, int, int], Matrix]
) -> None:
    """Rewrite a checkpoint of one file with the matrices that `draw(generator, Y, X)` gives, and
    give `model`, its transformers model, the values that they stand for.
    """
    tensors, weights = load_file(model_dir / SINGLE_FILE_NAME), model.state_dict()
    generator = np.random.default_rng(3)
    for name in sorted(name for name in tensors if name.endswith("_proj.weight")):
        values, parts = draw(generator, *tensors.pop(name).shape)
        weights[name].copy_(values)
        tensors |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    save_file(tensors, model_dir / SINGLE_FILE_NAME)
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def awq(group_size: int) -> dict[str, Any]:
    """What AutoAWQ writes."""
    return {
        "bits": 4,
        "group_size": group_size,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def draw_awq(group_size: int, dtype: torch.dtype) -> Callable[[Any, int, int], Matrix]:
    def draw(generator: Any, rows: int, inputs: int) -> Matrix:
        codes, zeros, scales = _drawn(generator, rows, inputs, group_size, dtype, 4)
        return _values(codes, zeros, scales), {
            "qweight": _awq_words(codes.T),
            "qzeros": _awq_words(zeros.T),
            "scales": scales.T.contiguous(),
        }

    return draw


def _awq_words(codes: Any) -> torch.Tensor:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, code in enumerate(_AWQ_ORDER):
            words[:, word] |= codes[:, 8 * word + code].astype(np.uint32) << (4 * place)
    return torch.from_numpy(words.view(np.int32))


def pack_quantized(group_size: int, symmetric: bool, bits: int = 4) -> dict[str, Any]:
    """What llm-compressor writes for its scheme W4A16, and for W4A16_ASYM."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None if group_size == -1 else group_size,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel" if group_size == -1 else "group",
        "symmetric": symmetric,
        "type": "int",
    }
    return _compressed_tensors("pack-quantized", weights, None)


def draw_pack_quantized(
    group_size: int, symmetric: bool, dtype: torch.dtype, bits: int = 4, ordered: bool = True
) -> Callable[[Any, int, int], Matrix]:
    def draw(generator: Any, rows: int, inputs: int) -> Matrix:
        codes, zeros, scales = _drawn(generator, rows, inputs, group_size, dtype, bits)
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        groups = np.arange(inputs) * zeros.shape[1] // inputs
        if not ordered:
            groups = generator.permutation(groups)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
        if not ordered:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return _values(codes, zeros, scales, groups), tensors

    return draw


def _words(codes: Any, bits: int) -> torch.Tensor:
    """The bits of each row, lowest first, padded to whole words."""
    stream = (codes[:, :, None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4").copy())


def fp8_blocks() -> dict[str, Any]:
    """What Qwen writes."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def float_quantized(strategy: str) -> dict[str, Any]:
    """What llm-compressor writes for its schemes FP8 and FP8_DYNAMIC."""
    weights = {
        "block_structure": [128, 128] if strategy == "block" else None,
        "dynamic": False,
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
    }
    inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
    return _compressed_tensors("float-quantized", weights, inputs | {"type": "float"})


def draw_fp8(
    strategy: str, dtype: torch.dtype, part: str = "weight_scale"
) -> Callable[[Any, int, int], Matrix]:
    """strategy: as in `float_quantized`."""

    def draw(generator: Any, rows: int, inputs: int) -> Matrix:
        height, width = {"tensor": (rows, inputs), "channel": (1, inputs), "block": (128, 128)}[
            strategy
        ]
        codes = torch.from_numpy(generator.normal(0, 50, (rows, inputs))).to(torch.float8_e4m3fn)
        shape = -(-rows // height), -(-inputs // width)
        drawn = generator.uniform(0.5, 1.5, shape) / 50 / math.sqrt(inputs)
        scales, values = torch.from_numpy(drawn).to(dtype), codes.double()
        for row, column in np.ndindex(*shape):
            block = (
                slice(row * height, (row + 1) * height),
                slice(column * width, column * width + width),
            )
            values[block] *= float(scales[row, column])
        return values, {"weight": codes, part: scales[0] if strategy == "tensor" else scales}

    return draw


def _compressed_tensors(name: str, weights: Any, inputs: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group | {"weights": weights}},
        "format": name,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _drawn(
    generator: Any, rows: int, inputs: int, group_size: int, dtype: torch.dtype, bits: int
) -> tuple[Any, Any, torch.Tensor]:
    """(codes [Y, X], zero points [Y, G], scales [Y, G]), of which codes and zero points take every
    value that they can have.
    """
    groups = 1 if group_size == -1 else inputs // group_size
    codes = generator.integers(0, 2**bits, (rows, inputs))
    zeros = generator.integers(0, 2**bits, (rows, groups))
    scales = generator.uniform(0.5, 1.5, (rows, groups)) * 4 / 2**bits / math.sqrt(inputs)
    return codes, zeros, torch.from_numpy(scales).to(dtype)


def _values(codes: Any, zeros: Any, scales: torch.Tensor, groups: Any = None) -> torch.Tensor:
    if groups is None:
        groups = np.arange(codes.shape[1]) * zeros.shape[1] // codes.shape[1]
    values = np.empty(codes.shape)
    for x, group in enumerate(groups):
        values[:, x] = (codes[:, x] - zeros[:, group]) * scales[:, group].double().numpy()
    return torch.from_numpy(values)
