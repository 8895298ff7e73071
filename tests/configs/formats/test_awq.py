"""What a checkpoint says of AWQ, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from configs.formats.table import read_format
from scheduler.errors import ConfigError
from tests.stored_checkpoints import awq


def test_what_autoawq_writes_is_read() -> None:
    stored_format = read_format({"quantization_config": awq(64)}, "x")
    assert stored_format is not None
    assert (stored_format.bits, stored_format.group_size) == (4, 64)
    assert stored_format.tensor_shapes("a.weight", (16, 128)) == {
        "a.qweight": (128, 2),
        "a.scales": (2, 16),
        "a.qzeros": (2, 2),
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "bits 3; AWQ checkpoints are supported with bits 4\\. Use"),
        ({"version": "gemv"}, "version 'gemv'; .* with version 'gemm' or 'GEMM'\\. Use"),
        ({"zero_point": 1}, "zero_point 1"),
        ({"lm_head": True}, "lm_head True"),
        ({"group_size": -2}, "group_size -2; .* -1 for all"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config has {named}"):
        read_format({"quantization_config": awq(128) | changes}, "config.json")
