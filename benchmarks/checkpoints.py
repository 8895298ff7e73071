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
