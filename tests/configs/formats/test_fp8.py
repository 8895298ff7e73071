"""What a checkpoint says of FP8 in blocks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from configs.formats.table import read_format
from scheduler.errors import ConfigError
from tests.stored_checkpoints import fp8_blocks


def test_what_qwen_writes_is_read() -> None:
    stored_format = read_format({"quantization_config": fp8_blocks()}, "x")
    assert stored_format is not None
    assert stored_format.tensor_shapes("a.weight", (130, 256)) == {
        "a.weight": (130, 256),
        "a.weight_scale_inv": (2, 2),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fmt": "e5m2"}, "fmt 'e5m2'; .* 'e4m3'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"weight_block_size": None}, r"weight_block_size None; .* \[128, 128\]"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config has {named}"):
        read_format({"quantization_config": fp8_blocks() | changes}, "config.json")
