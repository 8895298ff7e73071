"""What a checkpoint says of GPTQ, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from configs.gptq import Gptq, read_gptq
from configs.quantization import read_quantization
from scheduler.errors import ConfigError
from tests.checkpoints import COMPRESSED_TENSORS, GPTQ


def read(**changes: Any) -> Gptq | None:
    return read_gptq({"quantization_config": GPTQ | changes}, "config.json")


def test_what_gptqmodel_writes_is_read() -> None:
    usual = Gptq(bits=8, group_size=128, has_index=False, zero_offset=1)
    assert read() == usual
    assert read(bits=4, group_size=-1, desc_act=True, checkpoint_format="gptq_v2") == Gptq(
        bits=4, group_size=-1, has_index=True, zero_offset=0
    )
    fewest = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    assert read_gptq({"quantization_config": fewest}, "x") == usual


def test_other_formats_are_not_gptq() -> None:
    for other in (COMPRESSED_TENSORS, None, [1]):
        assert read_gptq({"quantization_config": other}, "x") is None
    assert read_gptq({}, "x") is None
    assert read_quantization({"quantization_config": GPTQ}, "x") is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "bits 3; .* 4 or 8"),
        ({"bits": None}, "bits None"),
        ({"bits": "8"}, "bits '8'"),
        ({"bits": [8]}, r"bits \[8\]"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": "128"}, "group_size '128'"),
        ({"group_size": True}, "group_size True"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'; .* 'gptq' or 'gptq_v2'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"lm_head": True}, "lm_head True"),
        ({"dynamic": {"-:.*mlp.*": {}}}, "dynamic {'-"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config has {named}"):
        read(**changes)


def test_numbers_of_groups_and_words() -> None:
    gptq = Gptq(bits=4, group_size=128, has_index=False, zero_offset=1)
    assert [gptq.num_groups(n) for n in (128, 129, 1024)] == [1, 2, 8]
    assert [gptq.num_words(n) for n in (8, 9, 1024)] == [1, 2, 128]
