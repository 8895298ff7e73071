"""The rotary table against transformers' own initializers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.model import ModelConfig
from workers.models.rope import cos_sin_table, rotary_frequencies

HEAD_DIM = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn_attention_factor": YARN | {"attention_factor": 1.3},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn_mscale_alone": YARN | {"mscale": 0.7},
    "yarn_untruncated": YARN | {"truncate": False},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_no_ramp": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn_factor_one": YARN | {"factor": 1.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}


def reference(scaling: dict[str, Any], theta: float) -> Any:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta} | scaling,
    )
    return config, Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_table_equal_those_of_transformers(name: str, theta: float) -> None:
    config, embedding = reference(SCALINGS[name], theta)
    rope = ModelConfig.from_dict(config.to_dict()).rope
    frequencies_F, factor = rotary_frequencies(rope, HEAD_DIM)
    torch.testing.assert_close(frequencies_F, embedding.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(embedding.attention_scaling)

    length = 300  # below every original length: dynamic is the default there
    cos_1LD, sin_1LD = embedding(
        torch.zeros(1, dtype=torch.float32), torch.arange(length).unsqueeze(0)
    )
    table_LD = cos_sin_table(rope, HEAD_DIM, length, torch.device("cpu"))
    assert table_LD.shape == (length, HEAD_DIM) and table_LD.dtype == torch.float32
    expected_LD = torch.cat((cos_1LD[0, :, : HEAD_DIM // 2], sin_1LD[0, :, : HEAD_DIM // 2]), dim=1)
    # An angle near 300 has float32 steps of 3e-5.
    torch.testing.assert_close(table_LD, expected_LD, rtol=0, atol=6e-5)
