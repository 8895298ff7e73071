"""What a checkpoint says of GPTQ, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from configs.formats.stored import StoredFormat
from configs.formats.table import read_format
from scheduler.errors import ConfigError
from tests.checkpoints import GPTQ


def read(**changes: Any) -> StoredFormat:
    stored_format = read_format({"quantization_config": GPTQ | changes}, "config.json")
    assert stored_format is not None
    return stored_format


def test_what_gptqmodel_writes_is_read() -> None:
    usual = read()
    assert (usual.bits, usual.group_size, usual.group_index_suffix, usual.zero_offset) == (
        8,
        128,
        None,
        1,
    )
    assert usual.code_order == (0, 1, 2, 3)
    other = read(bits=4, group_size=-1, desc_act=True, checkpoint_format="gptq_v2")
    assert (other.bits, other.group_size, other.group_index_suffix, other.zero_offset) == (
        4,
        -1,
        "g_idx",
        0,
    )
    fewest = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    assert read_format({"quantization_config": fewest}, "x") == usual


def test_layers_may_be_left_out() -> None:
    assert read(dynamic={"-:.*mlp.gate$": {}}) == read()


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
        ({"desc_act": "yes"}, "desc_act 'yes'; .* True or False"),
        ({"desc_act": 1}, "desc_act 1"),
        ({"dynamic": ["-:x"]}, r"dynamic \['-:x'\]; .* with dynamic that is an object"),
        ({"dynamic": {"+:.*mlp.*": {"bits": 8}}}, r"dynamic {'\+"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config has {named}"):
        read(**changes)


def test_a_matrix_may_end_within_a_group_and_a_word() -> None:
    assert read(bits=4).tensor_shapes("a.weight", (9, 129)) == {
        "a.qweight": (17, 9),
        "a.scales": (2, 9),
        "a.qzeros": (2, 2),
    }
