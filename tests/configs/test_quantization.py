"""What a checkpoint says of its quantization, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from configs.quantization import Quantization, read_quantization
from scheduler.errors import ConfigError
from tests.checkpoints import COMPRESSED_TENSORS


def edited(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> dict[str, Any]:
    """A `config.json` after `edit(quantization_config, its group)`."""
    config = copy.deepcopy(COMPRESSED_TENSORS)
    edit(config, config["config_groups"]["group_0"])
    return {"quantization_config": config}


def test_codes_of_compressed_tensors() -> None:
    raw = {"quantization_config": COMPRESSED_TENSORS}
    assert read_quantization(raw, "x") == Quantization(stored=True, vocabulary=False)
    assert read_quantization({}, "x") is None
    assert read_quantization({"quantization_config": None}, "x") is None


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c, g: c.update(quant_method="awq"), "quant_method 'awq'"),
        (lambda c, g: c.update(format="pack-quantized"), "format 'pack-quantized'"),
        (lambda c, g: c.update(config_groups={}), "number of config_groups 0"),
        (lambda c, g: c["config_groups"].update(b=g), "number of config_groups 2"),
        (lambda c, g: g.update(targets=["Linear", "Embedding"]), "targets"),
        (lambda c, g: g["weights"].update(num_bits=4), "weights.num_bits 4"),
        (lambda c, g: g["weights"].update(strategy="group"), "weights.strategy 'group'"),
        (lambda c, g: g["weights"].update(symmetric=False), "weights.symmetric False"),
        (lambda c, g: g.update(weights=None), "weights.num_bits None"),
        (lambda c, g: g.update(input_activations=None), "input_activations.num_bits None"),
        (lambda c, g: g["input_activations"].update(dynamic=False), "input_activations.dynamic"),
        (lambda c, g: g.update(output_activations={"num_bits": 8}), "output_activations"),
        (lambda c, g: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (lambda c, g: c.update(ignore=[]), r"ignore \[\]"),
        (lambda c, g: c.update(ignore=["lm_head", "re:.*mlp.*"]), "ignore"),
    ],
)
def test_what_is_not_supported_is_named(edit: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: quantization_config has {named}"):
        read_quantization(edited(edit), "config.json")


@pytest.mark.parametrize("value", ["int8", [1]])
def test_a_config_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        read_quantization({"quantization_config": value}, "config.json")
