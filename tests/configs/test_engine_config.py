"""Engine options: what each field may be, how fields combine, and how they fit a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from configs.engine import DEFAULT_MAX_MODEL_LEN, EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.quantization import Quantization
from kernels.interface import Capabilities
from scheduler.errors import ClientError, ConfigError
from tests.checkpoints import COMPRESSED_TENSORS
from workers.configuration import resolve

LEAST = {
    "tensor_parallel_size": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "kv_cache_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "num_steps_ahead": 0,
    "seed": 0,
}
MOST = {
    "num_steps_ahead": 8,
    "max_num_seqs": 65536,
    "block_size": 2**20,
    "num_kv_blocks": 2**31 - 1,
}
OPTIONAL = (
    *("block_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("num_steps_ahead", "seed", "kv_cache_bytes"),
)
SECONDS = ("start_timeout_s", "step_timeout_s", "frontend_timeout_s")
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "attention_backend": ("auto", "cpu", "triton", "flash_attn", "hybrid", "reference"),
    "log_level": ("debug", "info", "warning", "error"),
}
# With these, every whole number in the table may have its smallest value.
SMALL = {"max_num_seqs": 1}

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}


def limits(name: str) -> str:
    return f"of at least {LEAST[name]}" + (f" and at most {MOST[name]}" if name in MOST else "")


def backend(*, dtypes: tuple[str, ...], **others: Any) -> Capabilities:
    """Kernels that are fast with all dtypes and can do nothing else, except for `others`."""
    values: dict[str, Any] = {
        "description": "",
        "default_block_size": 16,
        "dtypes": dtypes,
        "fast_dtypes": dtypes,
    }
    return Capabilities(**values | others)


def resolved(
    raw: dict[str, Any] | None = None, device: str = "cpu", **options: Any
) -> ResolvedConfig:
    model = ModelConfig.from_dict(RAW | (raw or {}))
    dtypes = ("float32", "bfloat16")
    return resolve(
        EngineConfig(**options),
        model,
        Path("/models/some"),
        device,
        backend(
            name="cpu",
            dtypes=dtypes,
            quantizations=("int8",),
            weight_dtypes=("bfloat16",),
            kv_cache_dtypes=("fp8_e4m3",),
        ),
    )


# One field


@pytest.mark.parametrize("name", LEAST)
def test_a_whole_number_at_its_least_is_accepted(name: str) -> None:
    assert getattr(EngineConfig.from_dict(SMALL | {name: LEAST[name]}), name) == LEAST[name]


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("kind", ["below", "text", "fraction", "bool"])
def test_anything_but_a_whole_number_from_its_least_on_is_refused_by_name(
    name: str, kind: str
) -> None:
    value: Any = {"below": LEAST[name] - 1, "text": "8", "fraction": 8.0, "bool": True}[kind]
    with pytest.raises(ConfigError, match=f"^{name} must be a whole number {limits(name)}, got"):
        EngineConfig.from_dict(SMALL | {name: value})


@pytest.mark.parametrize("name", MOST)
def test_a_whole_number_is_accepted_up_to_its_most_and_refused_beyond(name: str) -> None:
    assert getattr(EngineConfig.from_dict({name: MOST[name]}), name) == MOST[name]
    with pytest.raises(
        ConfigError, match=f"^{name} must be a whole number {limits(name)}, got {MOST[name] + 1}"
    ):
        EngineConfig.from_dict({name: MOST[name] + 1})


@pytest.mark.parametrize("name", OPTIONAL)
def test_none_is_accepted_where_it_means_chosen_for_you(name: str) -> None:
    assert getattr(EngineConfig.from_dict({name: None}), name) is None


@pytest.mark.parametrize("name", [name for name in LEAST if name not in OPTIONAL])
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} must be a whole number {limits(name)}, got None"
    ):
        EngineConfig.from_dict({name: None})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 86401, 1e10, "5", None, True])
def test_a_time_must_be_a_number_above_zero_and_at_most_a_day(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} must be above 0 and at most 86400 seconds, got"
    ):
        EngineConfig.from_dict({name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0.25, 86400])
def test_a_time_may_be_a_fraction_of_a_second_or_a_day(name: str, value: float) -> None:
    assert getattr(EngineConfig.from_dict({name: value}), name) == value


@pytest.mark.parametrize("value", [0, -0.5, 1.01, math.nan, "0.5", None, True])
def test_gpu_memory_utilization_beyond_its_range_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and at most 1"):
        EngineConfig(gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [0.01, 1, 1.0])
def test_gpu_memory_utilization_within_its_range_is_accepted(value: float) -> None:
    assert EngineConfig(gpu_memory_utilization=value).gpu_memory_utilization == value


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in CHOICES.items() for value in values]
)
def test_every_choice_is_accepted(name: str, value: str) -> None:
    assert getattr(EngineConfig.from_dict({name: value}), name) == value


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["tpu", "", "CPU", None, 1])
def test_a_wrong_choice_is_refused_with_the_possible_ones(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{name} must be one of {', '.join(CHOICES[name])}, got {value!r}"
    ):
        EngineConfig.from_dict({name: value})


# The whole


def test_the_defaults_are_valid_and_name_a_model() -> None:
    config = EngineConfig()
    assert config.model and config.tensor_parallel_size == 1


def test_more_sequences_than_tokens_in_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens 16 is below max_num_seqs 17.*raise .* or lower"
    ):
        EngineConfig(max_num_batched_tokens=16, max_num_seqs=17)


def test_as_many_sequences_as_tokens_in_a_step_are_accepted() -> None:
    assert EngineConfig(max_num_batched_tokens=16, max_num_seqs=16).max_num_seqs == 16


def test_an_unknown_option_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown engine option 'max_num_seq'; known are model, .*max_num_seqs"
    ):
        EngineConfig.from_dict({"max_num_seq": 8})


def test_a_dictionary_of_options_gives_the_config_of_the_same_keywords() -> None:
    options: dict[str, Any] = {
        "model": "m",
        "tensor_parallel_size": 4,
        "dtype": "float32",
        "max_model_len": 100,
    }
    assert EngineConfig.from_dict(options) == EngineConfig(**options)


def test_a_config_cannot_be_changed() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 8  # type: ignore[misc]
    assert not hasattr(config, "__dict__")


def test_a_config_error_is_the_callers_fault() -> None:
    assert issubclass(ConfigError, ClientError)


# With a checkpoint


def test_what_was_left_open_comes_from_the_checkpoint() -> None:
    config = resolved()
    assert (config.max_model_len, config.dtype, config.block_size) == (1024, "bfloat16", 16)
    assert (config.device, config.attention_backend, config.model_dir) == (
        "cpu",
        "cpu",
        "/models/some",
    )
    assert config.max_num_batched_tokens == 256
    assert resolved(max_num_seqs=300).max_num_batched_tokens == 600, (
        "a prompt makes progress beside 299 sequences that decode"
    )
    assert resolved(max_num_batched_tokens=9).max_num_seqs == 5, "for the same reason"
    assert resolved(max_num_batched_tokens=1).max_num_seqs == 1


@pytest.mark.parametrize(
    ("device", "seqs", "tokens", "ahead"), [("cpu", 64, 256, 1), ("cuda", 256, 8192, 3)]
)
def test_a_device_has_its_own_defaults(device: str, seqs: int, tokens: int, ahead: int) -> None:
    config = resolved(device=device)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)
    assert config.num_steps_ahead == ahead
    assert resolved(device=device, num_steps_ahead=0).num_steps_ahead == 0


def test_a_cache_of_8_bits_is_refused_where_the_kernels_lack_it() -> None:
    assert resolved().kv_cache_dtype == "bfloat16"
    assert resolved(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"
    with pytest.raises(
        ConfigError,
        match=r"kv_cache_dtype 'fp8_e4m3' is not possible with kernel backend 'flash_attn';"
        r" possible are auto\. Choose one of them, or another attention_backend",
    ):
        resolve(
            EngineConfig(kv_cache_dtype="fp8_e4m3"),
            ModelConfig.from_dict(RAW),
            Path("/models/some"),
            "cuda",
            backend(name="flash_attn", default_block_size=256, dtypes=("bfloat16",)),
        )


def test_a_dtype_the_kernels_lack_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'float16' is not possible on device 'cpu'.*possible are float32, bfloat16",
    ):
        resolved(dtype="float16")


def test_quantization_is_the_users_or_the_checkpoints() -> None:
    from_user = Quantization(is_stored=False, includes_vocabulary=True)
    assert resolved(quantization="int8").quantization == from_user
    raw = {"quantization_config": COMPRESSED_TENSORS}
    for options in ({}, {"quantization": "int8"}):
        assert resolved(raw, **options).quantization == Quantization(
            is_stored=True, includes_vocabulary=False
        )
    assert resolved().quantization is None
    with pytest.raises(ConfigError, match="quantization must be one of int8, int4, fp8, got 'fp4'"):
        EngineConfig(quantization="fp4")


@pytest.mark.parametrize("stored", [False, True])
def test_quantization_is_refused_where_kernels_lack_it(stored: bool) -> None:
    raw = {"quantization_config": COMPRESSED_TENSORS} if stored else {}
    match = r"'int8' is not possible on device 'cuda' with kernel.*, 'reference' \(cuda\)\. "
    with pytest.raises(ConfigError, match=match):
        resolve(
            EngineConfig(quantization=None if stored else "int8"),
            ModelConfig.from_dict(RAW | raw),
            Path("/models/some"),
            "cuda",
            backend(name="triton", dtypes=("bfloat16",)),
        )


def test_float32_stands_in_for_a_checkpoint_dtype_without_instructions() -> None:
    model = ModelConfig.from_dict(RAW)
    assert model.dtype == "bfloat16"
    for asked, want, of_weights in (
        ("auto", "float32", ()),
        ("auto", "float32", ("bfloat16",)),
        ("float32", "float32", ("bfloat16",)),
        ("bfloat16", "bfloat16", ("bfloat16",)),
    ):
        config = resolve(
            EngineConfig(dtype=asked),
            model,
            Path("/models/some"),
            "cpu",
            backend(
                name="cpu",
                dtypes=("float32", "bfloat16"),
                fast_dtypes=("float32",),
                weight_dtypes=of_weights,
            ),
        )
        assert config.dtype == want
        assert config.weight_dtype == (of_weights[0] if of_weights else want)


def test_weights_of_another_dtype_are_converted_to_the_one_it_computes_in() -> None:
    for stored, asked in (("float16", "float32"), ("float32", "bfloat16")):
        config = resolved({"dtype": stored}, dtype=asked)
        assert config.dtype == config.weight_dtype == asked


def test_kernels_without_float32_do_not_get_it_in_place_of_another_dtype() -> None:
    model = ModelConfig.from_dict(RAW | {"dtype": "float32"})
    with pytest.raises(
        ConfigError,
        match=r"'float32' is not possible on device 'cuda'.*float16. Choose one of them",
    ):
        resolve(
            EngineConfig(),
            model,
            Path("/models/some"),
            "cuda",
            backend(name="flash_attn", default_block_size=256, dtypes=("bfloat16", "float16")),
        )


def test_what_was_given_stands() -> None:
    config = resolved(max_model_len=100, dtype="float32", block_size=32)
    assert (config.max_model_len, config.dtype, config.block_size) == (100, "float32", 32)


@pytest.mark.parametrize(("max_model_len", "width"), [(31, 2), (32, 2), (33, 3)])
def test_a_block_table_is_as_wide_as_the_longest_sequence_needs(
    max_model_len: int, width: int
) -> None:
    assert resolved(max_model_len=max_model_len, block_size=16).max_blocks_per_sequence == width


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_size_that_splits_the_heads_is_accepted(size: int) -> None:
    assert resolved(tensor_parallel_size=size).engine.tensor_parallel_size == size


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_size_that_does_not_split_the_model_is_refused_with_the_possible_ones(size: int) -> None:
    message = (
        rf"tensor_parallel_size {size} does not split this model \(8 query heads, 2 KV heads,"
        r" intermediate size 96\); "
        r"possible are 1, 2, 4, 8$"
    )
    with pytest.raises(ConfigError, match=message):
        resolved(tensor_parallel_size=size)


def test_a_size_that_splits_heads_but_not_the_mlp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"intermediate size 100\); possible are 1, 2, 4$"):
        resolved({"intermediate_size": 100}, tensor_parallel_size=8)


def test_a_size_that_neither_splits_nor_replicates_the_kv_heads_is_refused() -> None:
    # 12 query heads over 4 KV heads: 6 ranks divide the first, but neither does 4 divide 6 nor 6
    # divide 4.
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match=r"possible are 1, 2, 4, 12$"):
        resolved(shape, tensor_parallel_size=6)


def test_the_longest_sequence_may_be_all_positions_of_the_checkpoint() -> None:
    assert resolved(max_model_len=1024).max_model_len == 1024


def test_a_sequence_beyond_the_positions_of_the_checkpoint_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^max_model_len 1025 is beyond the 1024 positions this checkpoint serves$",
    ):
        resolved(max_model_len=1025)


def test_a_checkpoint_of_very_many_positions_gets_a_limit_unless_asked_for_more() -> None:
    raw = {"max_position_embeddings": 262144}
    assert resolved(raw).max_model_len == DEFAULT_MAX_MODEL_LEN
    assert resolved(raw, max_model_len=262144).max_model_len == 262144


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_extends_the_positions_by_its_factor(kind: str) -> None:
    raw = {
        "rope_parameters": {
            "rope_type": kind,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    }
    assert resolved(raw).max_model_len == 4096
    with pytest.raises(
        ConfigError,
        match=rf"beyond the 4096 positions this checkpoint serves \(rope scaling '{kind}'",
    ):
        resolved(raw, max_model_len=4097)


def test_dynamic_scaling_is_served_to_the_original_length_only() -> None:
    raw = {
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    }
    assert resolved(raw).max_model_len == 512
    with pytest.raises(
        ConfigError,
        match=r"beyond the 512 positions this checkpoint serves \(rope scaling 'dynamic'",
    ):
        resolved(raw, max_model_len=513)


def test_a_resolved_config_cannot_be_changed() -> None:
    config = resolved()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enforce_eager", "shared_memory"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be true or false"):
        EngineConfig.from_dict({name: value})


@pytest.mark.parametrize("name", ["model", "tokenizer", "revision", "ray_address"])
def test_a_name_is_text(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        EngineConfig.from_dict({name: 5})


@pytest.mark.parametrize("value", [-1, 0.5, 1, 1001, float("nan"), "3", False, None])
def test_a_slowdown_is_zero_or_above_one(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_decode_slowdown must be 0, or above 1 and at most"):
        EngineConfig(max_decode_slowdown=value)  # type: ignore[arg-type]
    assert EngineConfig(max_decode_slowdown=0).max_decode_slowdown == 0
    assert EngineConfig(max_decode_slowdown=1.5).max_decode_slowdown == 1.5
