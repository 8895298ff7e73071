"""What a checkpoint says of compressed-tensors' formats, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from configs.formats.stored import StoredFormat
from configs.formats.table import read_format
from scheduler.errors import ConfigError
from tests.checkpoints import COMPRESSED_TENSORS
from tests.stored_checkpoints import float_quantized, pack_quantized

Edit = Callable[[dict[str, Any], dict[str, Any]], object]


def read(config: dict[str, Any], edit: Edit = lambda c, g: None) -> StoredFormat:
    """After `edit(quantization_config, its group)`."""
    config = copy.deepcopy(config)
    edit(config, config["config_groups"]["group_0"])
    stored_format = read_format({"quantization_config": config}, "config.json")
    assert stored_format is not None
    return stored_format


def test_8_bit_codes_are_kept() -> None:
    stored_format = read(COMPRESSED_TENSORS)
    assert stored_format.is_int8
    dense = {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    assert read(COMPRESSED_TENSORS, lambda c, g: c.update(dense)) == stored_format
    assert stored_format.tensor_shapes("a.weight", (8, 16)) == {
        "a.weight": (8, 16),
        "a.weight_scale": (8, 1),
    }


def test_packed_codes() -> None:
    symmetric, channel = read(pack_quantized(32, True)), read(pack_quantized(-1, False, 8))
    assert symmetric.tensor_shapes("a.weight", (9, 64)) == {
        "a.weight_packed": (9, 8),
        "a.weight_scale": (9, 2),
    }
    assert channel.tensor_shapes("a.weight", (9, 64)) == {
        "a.weight_packed": (9, 16),
        "a.weight_scale": (9, 1),
        "a.weight_zero_point": (3, 1),
    }
    for order, index in (
        (None, None),
        ("weight", None),
        ("group", "weight_g_idx"),
        ("dynamic", "weight_g_idx"),
    ):
        config = pack_quantized(32, True)
        config["config_groups"]["group_0"]["weights"]["actorder"] = order
        assert read(config).group_index_suffix == index


@pytest.mark.parametrize(
    ("strategy", "shape"), [("tensor", (1,)), ("channel", (130, 1)), ("block", (2, 2))]
)
def test_floating_point_numbers(strategy: str, shape: tuple[int, ...]) -> None:
    tensors = read(float_quantized(strategy)).tensor_shapes("a.weight", (130, 256))
    assert tensors == {"a.weight": (130, 256), "a.weight_scale": shape}


ANY: list[tuple[Edit, str]] = [
    (lambda c, g: c.update(format="marlin-24"), "format 'marlin-24'; .* 'pack-quantized'"),
    (lambda c, g: c.update(config_groups={}), "number of config_groups 0"),
    (lambda c, g: c["config_groups"].update(b=g), "number of config_groups 2"),
    (lambda c, g: g.update(targets=["Linear", "Embedding"]), "config_groups.group_0.targets"),
    (lambda c, g: g.update(output_activations={"num_bits": 8}), ".*output_activations"),
    (lambda c, g: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (lambda c, g: c.update(transform_config={"config_groups": {}}), "transform_config"),
    (lambda c, g: c.update(sparsity_config={"format": "sparse-24"}), "sparsity_config.format"),
    (lambda c, g: c.update(sparsity_config="dense"), "sparsity_config 'dense'; .* an object"),
    (lambda c, g: c.update(config_groups=[g]), "config_groups .* that is an object"),
    (lambda c, g: g["weights"].update(actorder="nope"), ".*weights.actorder 'nope'; .* 'group'"),
    (lambda c, g: g["weights"].update(group_size=0), ".*weights.group_size 0"),
    (lambda c, g: g["weights"].update(group_size="64"), ".*weights.group_size '64'"),
]
INT8: list[tuple[Edit, str]] = [
    (lambda c, g: g["weights"].update(num_bits=4), ".*weights.num_bits 4"),
    (lambda c, g: g["weights"].update(strategy="group"), ".*weights.strategy 'group'"),
    (lambda c, g: g["weights"].update(symmetric=False), ".*weights.symmetric False"),
    (lambda c, g: g.update(weights=None), ".*weights.num_bits None"),
    (lambda c, g: g.update(input_activations=None), ".*input_activations.num_bits None"),
    (lambda c, g: g["input_activations"].update(dynamic=False), ".*input_activations.dynamic"),
    (lambda c, g: c.update(ignore=[]), r"ignore \[\]"),
    (lambda c, g: c.update(ignore=["lm_head", "re:.*mlp.*"]), "ignore"),
]
PACKED: list[tuple[Edit, str]] = [
    (
        lambda c, g: g["weights"].update(num_bits=3),
        ".*weights.num_bits 3; compressed-tensors .* with num_bits 4 or 8",
    ),
    (lambda c, g: g["weights"].update(type="float"), ".*weights.type 'float'"),
    (lambda c, g: g["weights"].update(group_size=None), ".*weights.group_size None"),
    (lambda c, g: g["weights"].update(strategy="tensor"), ".*weights.strategy 'tensor'"),
    (lambda c, g: g.update(input_activations={"num_bits": 8}), ".*input_activations"),
]
FLOAT: list[tuple[Edit, str]] = [
    (lambda c, g: g["weights"].update(num_bits=4), ".*weights.num_bits 4"),
    (lambda c, g: g["weights"].update(strategy="group"), ".*weights.strategy 'group'"),
    (lambda c, g: g["weights"].update(strategy="block"), r".*weights.block_structure None"),
]
REFUSED = [
    *((COMPRESSED_TENSORS, *row) for row in ANY + INT8),
    *((pack_quantized(32, True), *row) for row in ANY + PACKED),
    *((float_quantized("tensor"), *row) for row in ANY + FLOAT),
]


@pytest.mark.parametrize(("config", "edit", "named"), REFUSED)
def test_what_is_not_supported_is_named(config: dict[str, Any], edit: Edit, named: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: quantization_config has {named}"):
        read(config, edit)
