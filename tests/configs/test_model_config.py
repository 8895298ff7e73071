"""Reading `config.json` and `generation_config.json`: old and new keys, and what is refused by
name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.model import ModelConfig, RopeConfig, read_generation_config, read_json
from scheduler.errors import ConfigError

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "eos_token_id": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "dtype": "bfloat16",
}
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in RAW.items() if name not in names}


def write(model_dir: Path, config: Any, generation: Any = None) -> Path:
    (model_dir / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    if generation is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(generation))
    return model_dir


# What is read


def test_every_field_is_read() -> None:
    assert read() == ModelConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        rope=RopeConfig(theta=5000.0),
        dtype="bfloat16",
        eos_token_ids=(7,),
    )


def test_what_may_be_absent_gets_the_value_transformers_gives_it() -> None:
    from transformers import Qwen3Config

    given = {"model_type": "qwen3"} | {name: RAW[name] for name in NEEDED}
    given["num_attention_heads"] = 32
    config = ModelConfig.from_dict(given)
    theirs: Any = Qwen3Config(**given)
    for name in (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "rms_norm_eps",
    ):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert (config.dtype, config.eos_token_ids) == ("float32", ())


def test_sizes_of_heads_that_are_null_follow_from_the_others() -> None:
    config = read(num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)


def test_a_scaling_added_by_its_old_key_holds_beside_the_new_one() -> None:
    from transformers import Qwen3Config

    added = read(rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert (added.rope_type, added.factor, added.theta) == ("linear", 2.0, 5000.0)
    both_old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 700.0}
    theirs = Qwen3Config.from_dict(without() | both_old).rope_parameters
    assert isinstance(theirs, dict)
    assert read(**both_old).rope.theta == theirs["rope_theta"] == 700.0


def test_a_rotary_embedding_of_part_of_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor is not supported"):
        read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})


def test_the_old_spelling_of_a_plain_rope_reads_as_the_new_one() -> None:
    old = without("rope_parameters", "dtype") | {
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    assert ModelConfig.from_dict(old) == read()


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_old_spelling_of_a_scaled_rope_reads_as_the_new_one(key: str) -> None:
    scaling = {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "attention_factor": 1.25,
    }
    new = read(rope_parameters=scaling | {"rope_type": "yarn", "rope_theta": 1e6})
    old = without("rope_parameters") | {"rope_theta": 1e6, "rope_scaling": scaling | {key: "yarn"}}
    assert ModelConfig.from_dict(old) == new
    assert new.rope == RopeConfig(
        rope_type="yarn",
        theta=1e6,
        factor=4.0,
        original_max_position_embeddings=512,
        beta_fast=16.0,
        attention_factor=1.25,
    )


def test_a_scaling_without_its_original_length_takes_the_positions_of_the_model() -> None:
    rope = read(rope_parameters={"rope_type": "linear", "factor": 2.0}).rope
    assert rope.original_max_position_embeddings == 2048


@pytest.mark.parametrize("spelling", ["float16", "torch.float16"])
def test_a_dtype_reads_with_and_without_its_module(spelling: str) -> None:
    assert read(dtype=spelling).dtype == "float16"


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (3, (3,)), ([3, 5], (3, 5))])
def test_end_of_sequence_ids_may_be_none_one_or_a_list(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == ids


def test_possible_sizes_split_query_heads_kv_heads_and_mlp() -> None:
    assert read().possible_tensor_parallel_sizes() == [1, 2, 4]
    assert read(num_key_value_heads=1).possible_tensor_parallel_sizes() == [1, 2, 4]
    assert read(intermediate_size=98).possible_tensor_parallel_sizes() == [1, 2]
    six = read(num_attention_heads=6, num_key_value_heads=2)
    assert six.possible_tensor_parallel_sizes() == [1, 2, 6]


# What is refused


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_key_is_named_with_the_file(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^some/config.json has no '{name}': is this a Qwen3 checkpoint\?$"
    ):
        ModelConfig.from_dict(without(name), "some/config.json")


@pytest.mark.parametrize("kind", ["llama", "qwen2_moe", None])
def test_another_model_type_is_refused_by_name(kind: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"is of model_type {kind!r}; this engine runs 'qwen3'"):
        read(model_type=kind)


def test_another_activation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not supported, only 'silu'"):
        read(hidden_act="gelu")


def test_a_sliding_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_sliding_window is not supported"):
        read(use_sliding_window=True, sliding_window=128)


def test_a_sliding_window_that_is_switched_off_is_accepted() -> None:
    assert read(use_sliding_window=False, sliding_window=128) == read()


def test_a_checkpoint_of_another_quantization_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has quant_method 'bitsandbytes'; possible are AWQ .*; GPTQ"
    ):
        read(quantization_config={"quant_method": "bitsandbytes"})


@pytest.mark.parametrize("kind", ["longrope", "llama3", "mrope"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_scaling_is_refused_by_name(kind: str, spelling: str) -> None:
    changes = {spelling: {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(
        ConfigError, match=rf"rope scaling '{kind}' is not supported; possible are default, linear"
    ):
        ModelConfig.from_dict(without("rope_parameters") | changes)


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
def test_a_scaling_without_factor_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"rope scaling '{kind}' has no factor"):
        read(rope_parameters={"rope_type": kind})


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="dtype 'float8_e4m3fn' is not supported; possible are float32, bfloat16"
    ):
        read(dtype="float8_e4m3fn")


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config.json cannot be read: "):
        read(head_dim=None, num_attention_heads=0)


@pytest.mark.parametrize(
    "name", [*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"]
)
def test_a_negative_size_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be at least 1, got -1"):
        read(**{name: -1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", "many"),
        ("hidden_size", None),
        ("rms_norm_eps", [1]),
        ("vocab_size", math.inf),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_file(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config.json cannot be read: "):
        read(**{name: value})


def test_query_heads_that_do_not_divide_over_kv_heads_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)",
    ):
        read(num_key_value_heads=3)


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim must be even for rotary embeddings, got 33"):
        read(head_dim=33)


# Directories


def test_a_directory_is_read_with_its_file_named_in_errors(tmp_path: Path) -> None:
    assert ModelConfig.from_dir(write(tmp_path, RAW)) == read()
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_dir(write(tmp_path, RAW | {"model_type": "gpt2"}))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_outputs_end_at_the_ids_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, RAW, {"eos_token_id": [9, 8, 7]})
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (7, 8, 9)


def test_an_end_that_the_model_does_not_have_is_left_out() -> None:
    assert read().with_eos_token_ids([1000, -1, 3, 7]).eos_token_ids == (7, 3)


def test_an_end_in_the_generation_config_that_is_no_id_is_refused_with_the_file(
    tmp_path: Path,
) -> None:
    write(tmp_path, RAW, {"eos_token_id": "<|im_end|>"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id cannot be read"):
        ModelConfig.from_dir(tmp_path)


def test_a_generation_config_without_end_of_sequence_ids_leaves_those_of_the_config(
    tmp_path: Path,
) -> None:
    assert ModelConfig.from_dir(write(tmp_path, RAW, {"temperature": 0.6})).eos_token_ids == (7,)


def test_a_directory_without_generation_config_has_an_empty_one(tmp_path: Path) -> None:
    assert read_generation_config(write(tmp_path, RAW)) == {}


def test_a_directory_without_config_says_what_a_model_directory_holds(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"config\.json does not exist: a model directory holds config\.json and \*",
    ):
        ModelConfig.from_dir(tmp_path)


def test_a_config_that_is_not_json_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
        ModelConfig.from_dir(write(tmp_path, '{"model_type": '))


def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        read_json(tmp_path / "config.json")


def test_a_model_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().vocab_size = 5  # type: ignore[misc]
