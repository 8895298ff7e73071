"""The roofline: counts of parameters, floors computed by hand, prompts that share a prefix, and the
probe of this machine.
"""

from __future__ import annotations

from typing import Any

import pytest

from configs.model import ModelConfig
from workers import roofline
from workers.roofline import Machine, OutputWork, make_workload

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
MODEL = ModelConfig.from_dict(RAW)
# A layer: Q, K and V 16 x (32 + 16 + 16), output 32 x 16, MLP 3 x 16 x 32, norms 2 x 16 + 2 x 8;
# then the last norm.
IN_LAYERS = 2 * (1024 + 512 + 1536 + 48) + 16
IN_HEAD = 64 * 16


def test_active_layer_parameters_of_a_dense_model_are_those_of_the_checkpoint() -> None:
    assert roofline.active_layer_parameters(MODEL) == IN_LAYERS


def test_attention_biases_are_parameters_of_a_layer() -> None:
    biased = ModelConfig.from_dict(RAW | {"attention_bias": True})
    assert roofline.active_layer_parameters(biased) == IN_LAYERS + 2 * (32 + 16 + 16 + 16)


def test_of_experts_those_of_one_token_are_counted() -> None:
    experts = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    raw = RAW | {"model_type": "qwen3_moe", "mlp_only_layers": [0], **experts}
    instead_of_dense = 16 * 12 + 3 * 3 * 16 * 8 - 1536
    model = ModelConfig.from_dict(raw)
    assert roofline.active_layer_parameters(model) == IN_LAYERS + instead_of_dense


def test_the_floor_of_slow_memory_is_weights_each_step_and_the_cache_read_by_decodes() -> None:
    # 3 sampled tokens: the prompt's step and two decodes with contexts 5 and 6; K and V of 2 heads
    # of 8, 2 layers.
    num_bytes = 4 * (3 * (IN_LAYERS + IN_HEAD) + (5 + 6) * 2 * 2 * 8 * 2)
    machine = Machine(memory_bytes_per_s=1000.0, flops_per_s=1e30)
    workload = [OutputWork(num_prompt_tokens=4, num_shared_tokens=0, num_output_tokens=3)]
    assert roofline.floor_s(MODEL, 4, workload, machine) == pytest.approx(num_bytes / 1000)


def test_weights_may_be_of_another_size_than_the_cache() -> None:
    num_bytes = 2 * 3 * (IN_LAYERS + IN_HEAD) + 4 * (5 + 6) * 2 * 2 * 8 * 2
    machine = Machine(memory_bytes_per_s=1000.0, flops_per_s=1e30)
    workload = [OutputWork(num_prompt_tokens=4, num_shared_tokens=0, num_output_tokens=3)]
    floor = roofline.floor_s(MODEL, 4, workload, machine, weight_itemsize=2)
    assert floor == pytest.approx(num_bytes / 1000)
    roofline_entry = roofline.roofline_entry(
        MODEL, "float32", workload, 1.0, machine, weight_dtype="bfloat16"
    )
    assert roofline_entry["floor_s"] == pytest.approx(floor, abs=1e-4)


def test_the_floor_of_slow_arithmetic_is_products_and_attention() -> None:
    # 4 + 2 tokens run, 3 are sampled; contexts 1 + 2 + 3 + 4 + 5 + 6 in each of 2 layers, of 4
    # heads of 8.
    flops = 2 * IN_LAYERS * 6 + 2 * IN_HEAD * 3 + 4 * 4 * 8 * 2 * 21
    machine = Machine(memory_bytes_per_s=1e30, flops_per_s=1000.0)
    workload = [OutputWork(num_prompt_tokens=4, num_shared_tokens=0, num_output_tokens=3)]
    assert roofline.floor_s(MODEL, 4, workload, machine) == pytest.approx(flops / 1000)


def test_what_prompts_share_is_computed_once() -> None:
    workload = make_workload([[1, 2, 3, 9], [1, 2, 3, 4], [5], [1, 2, 3, 4]], [1, 2, 3, 4])
    shared = sorted(
        (w.num_prompt_tokens, w.num_shared_tokens, w.num_output_tokens) for w in workload
    )
    assert shared == [(1, 0, 3), (4, 0, 2), (4, 3, 1), (4, 3, 4)]


def test_a_second_request_that_shares_all_but_a_token_adds_that_token_and_its_outputs() -> None:
    machine = Machine(memory_bytes_per_s=1e30, flops_per_s=1.0)
    one = roofline.floor_s(
        MODEL,
        4,
        [OutputWork(num_prompt_tokens=4, num_shared_tokens=0, num_output_tokens=1)],
        machine,
    )
    two = roofline.floor_s(MODEL, 4, make_workload([[1, 2, 3, 4], [1, 2, 3, 5]], [1, 1]), machine)
    assert two - one == 2 * IN_LAYERS + 2 * IN_HEAD + 4 * 4 * 8 * 2 * 4


def test_a_machine_that_was_not_probed_has_no_floor_and_says_why() -> None:
    roofline_entry = roofline.roofline_entry(MODEL, "float32", [], 1.0, None)
    assert (
        roofline_entry["floor_s"] is None
        and roofline_entry["share"] is None
        and "CPU" in roofline_entry["reason"]
    )


def test_the_probe_finds_a_machine_of_this_world() -> None:
    machine = roofline.probe_cpu("float32")
    assert 1e8 < machine.memory_bytes_per_s < 1e13 and 1e8 < machine.flops_per_s < 1e16
