"""What `config.json` says of experts: both spellings of keys, which layers have them, and what is
refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from configs.experts import ExpertsConfig
from configs.model import ModelConfig
from scheduler.errors import ConfigError

RAW: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def layers_with_experts(**changes: Any) -> list[int]:
    config = read(**changes)
    return [index for index in range(config.num_hidden_layers) if config.has_experts(index)]


def test_every_field_is_read() -> None:
    assert read(decoder_sparse_step=2, mlp_only_layers=[2, 1]).experts == ExpertsConfig(
        num_experts=16,
        num_experts_per_token=4,
        intermediate_size=24,
        normalizes_weights=True,
        sparse_step=2,
        dense_layers=(1, 2),
    )


def test_a_config_that_transformers_has_written_reads_the_same() -> None:
    from transformers import Qwen3MoeConfig

    given = {name: value for name, value in RAW.items() if name != "model_type"}
    theirs: Any = Qwen3MoeConfig(**given, mlp_only_layers=[0])
    assert ModelConfig.from_dict(theirs.to_dict()).experts == read(mlp_only_layers=[0]).experts


def test_what_may_be_absent_gets_the_value_transformers_gives_it() -> None:
    from transformers import Qwen3MoeConfig

    experts = ModelConfig.from_dict(
        {name: value for name, value in RAW.items() if name != "norm_topk_prob"}
    ).experts
    theirs: Any = Qwen3MoeConfig()
    assert experts is not None
    assert experts.normalizes_weights == theirs.norm_topk_prob
    assert experts.sparse_step == theirs.decoder_sparse_step
    assert list(experts.dense_layers) == theirs.mlp_only_layers


def test_a_dense_model_has_no_experts() -> None:
    config = read(model_type="qwen3")
    assert config.experts is None and not config.has_experts(0)


@pytest.mark.parametrize("options", [{"mlp_only_layers": [0, 1, 2, 3]}, {"decoder_sparse_step": 5}])
def test_a_model_none_of_whose_layers_has_experts_is_dense(options: dict[str, Any]) -> None:
    int8 = {"quantization_config": INT8}
    assert read(**options).experts is None
    assert read(**options, **int8).stored_format is not None


def test_layers_have_experts_as_in_transformers() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    given = {name: value for name, value in RAW.items() if name != "model_type"}
    for options in ({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}):
        theirs: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**given, **options))
        expected = [i for i, layer in enumerate(theirs.model.layers) if hasattr(layer.mlp, "gate")]
        assert layers_with_experts(**options) == expected


def test_possible_sizes_split_the_mlps_that_there_are() -> None:
    assert read().possible_tensor_parallel_sizes() == [1, 2, 4, 8]
    assert read(mlp_only_layers=[0]).possible_tensor_parallel_sizes() == [1, 2, 4]
    assert read(moe_intermediate_size=18).possible_tensor_parallel_sizes() == [1, 2]


def test_a_size_that_does_not_split_the_experts_is_refused_with_what_is_possible() -> None:
    expected = "intermediate size of an expert 18.; possible are 1, 2$"
    with pytest.raises(ConfigError, match=expected):
        read(moe_intermediate_size=18).check_tensor_parallel_size(4)


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_key_is_named(name: str) -> None:
    raw = {key: value for key, value in RAW.items() if key != name}
    with pytest.raises(ConfigError, match=f"has no '{name}'"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        ("num_experts", 0, "between 1 and 1024"),
        ("num_experts", 1025, "between 1 and 1024"),
        ("num_experts_per_tok", 17, "between 1 and 16"),
        ("moe_intermediate_size", 0, "at least 1"),
        ("decoder_sparse_step", 0, "at least 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(name: str, value: int, possible: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {possible}, got {value}"):
        read(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        ("norm_topk_prob", "false", "true or false"),
        ("norm_topk_prob", 1, "true or false"),
        ("num_experts", "16", "a whole number"),
        ("num_experts_per_tok", 2.7, "a whole number"),
        ("moe_intermediate_size", True, "a whole number"),
        ("decoder_sparse_step", None, "a whole number"),
        ("num_hidden_layers", 4.0, "a whole number"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: object, possible: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {possible}, got {value!r}"):
        read(**{name: value})


def test_the_layers_without_experts_are_whole_numbers() -> None:
    with pytest.raises(ConfigError, match=r"each of mlp_only_layers must be a whole number.*1\.5"):
        read(mlp_only_layers=[0, 1.5])


def test_8_bit_codes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"int-quantized.*not possible for a model with experts"):
        read(quantization_config=INT8)
