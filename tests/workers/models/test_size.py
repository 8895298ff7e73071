"""Counted parameters are those that ranks hold, and those that the publishers state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.model import ModelConfig
from configs.shapes import SHAPES
from kernels.select import select_backend
from tests.workers.models.parts import slices_of
from workers.models.qwen3 import Qwen3
from workers.models.size import count_parameters, parameters_line
from workers.parallel.group import TensorParallelGroup

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


def model_of(name: str) -> ModelConfig:
    return ModelConfig.from_dict(SHAPES[name])


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "extra", [{}, {"attention_bias": True, "tie_word_embeddings": True}, EXPERTS], ids=str
)
def test_a_rank_holds_as_many_parameters_as_are_counted(
    extra: dict[str, Any], num_ranks: int
) -> None:
    model = ModelConfig.from_dict(TINY | extra)
    group = TensorParallelGroup(num_ranks - 1, num_ranks, torch.device("cpu"))
    ours = Qwen3(model, group, select_backend("cpu", "reference"), torch.float32, 16)
    slices = slices_of(ours)
    counted = count_parameters(model, num_ranks)
    assert sum(piece.target.numel() for piece in slices) == counted.total
    expert_parameters = sum(piece.target.numel() for piece in slices if ".experts." in piece.name)
    assert expert_parameters == counted.expert_parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-0.6b", 0.596e9, 0.596e9),
        ("qwen3-4b", 4.02e9, 4.02e9),
        ("qwen3-8b", 8.19e9, 8.19e9),
        ("qwen3-32b", 32.8e9, 32.8e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("qwen3-coder-480b-a35b", 480e9, 35e9),
    ],
)
def test_shapes_have_the_parameters_that_are_published(
    name: str, total: float, active: float
) -> None:
    counted = count_parameters(model_of(name))
    assert counted.total == pytest.approx(total, rel=0.01)
    assert counted.active == pytest.approx(active, rel=0.02)


def test_the_line_for_people_names_experts_where_there_are_any() -> None:
    assert parameters_line(model_of("qwen3-8b")) == "8.19 billion parameters"
    assert parameters_line(model_of("qwen3-30b-a3b")) == (
        "30.5 billion parameters, 3.35 billion of them for each token; 29 billion are of experts,"
        " of which a layer has 128 and a token uses 8"
    )
