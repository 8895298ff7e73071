"""Large random checkpoints, written fast, to measure memory and time. The values do not matter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from configs.model import ModelConfig
from workers.models.checkpoint import SINGLE_FILE_NAME, expected_tensors

# A prime, so that no two rows of a matrix, and no two experts, are alike.
_NUM_DISTINCT_VALUES = 16_777_213
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_random_checkpoint(
    model_dir: Path, raw_config: Mapping[str, Any], dtype: torch.dtype
) -> int:
    """Write one file of small random values for a `config.json`; returns its size in bytes.

    Millions of values are drawn and used again and again, because drawing takes far longer than
    copying. Nothing but them is held in memory.
    """
    (model_dir / "config.json").write_text(json.dumps(dict(raw_config)))
    header, num_bytes = {}, 0
    for name, shape in expected_tensors(ModelConfig.from_dir(model_dir)).items():
        size = math.prod(shape) * dtype.itemsize
        offsets = num_bytes, num_bytes + size
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": offsets}
        num_bytes += size
    encoded_header = json.dumps(header).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)  # the numbers after it are aligned
    values = torch.empty(min(num_bytes // dtype.itemsize, _NUM_DISTINCT_VALUES), dtype=dtype)
    value_bytes = values.uniform_(-0.05, 0.05).view(torch.uint8).numpy().data
    path = model_dir / SINGLE_FILE_NAME
    with path.open("wb") as file:
        file.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for offset in range(0, num_bytes, len(value_bytes)):
            file.write(value_bytes[: num_bytes - offset])
    return path.stat().st_size
