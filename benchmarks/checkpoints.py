"""Large random checkpoints, written fast, to measure memory and time. The values do not matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.model import ModelConfig
from workers.models.checkpoint import SINGLE_NAME, expected_tensors

# A prime, so that no two rows of a matrix are alike.
_NUM_DIFFERENT = 16_777_213


def write_fast_checkpoint(
    model_dir: Path, raw_config: Mapping[str, Any], dtype: torch.dtype
) -> int:
    """Write one file of small random values for a `config.json`; returns its size in bytes.

    Millions of values are drawn and used again and again, because drawing takes far longer than
    copying.
    """
    (model_dir / "config.json").write_text(json.dumps(dict(raw_config)))
    shapes = expected_tensors(ModelConfig.from_dir(model_dir))
    most = max(torch.Size(shape).numel() for shape in shapes.values())
    values = torch.empty(min(most, _NUM_DIFFERENT), dtype=dtype).uniform_(-0.05, 0.05)
    tensors = {
        name: _filled(torch.empty(shape, dtype=dtype), values) for name, shape in shapes.items()
    }
    save_file(tensors, model_dir / SINGLE_NAME)
    return (model_dir / SINGLE_NAME).stat().st_size


def _filled(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    for piece in tensor.view(-1).split(len(values)):
        piece.copy_(values[: len(piece)])
    return tensor
