"""Models with experts: greedy float32 tokens and logits equal those of transformers at every
tensor-parallel size, however requests are batched. See `test_exactness.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rank_pool import WorkerPool, executor_of
from tests.checkpoints import Shape
from tests.workers.conftest import config_of
from tests.workers.test_exactness import (
    LOGIT_TOLERANCE,
    Reference,
    Scenario,
    compare,
    make_reference,
    run_logits,
)


def experts(count: int, chosen: int, features: int = 32, **extra: Any) -> dict[str, Any]:
    sizes = {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": features}
    return {**sizes, "norm_topk_prob": True, "experts_implementation": "eager", **extra}


SHAPES = [
    Shape(name="8_top_1", extra=experts(8, 1)),
    Shape(name="8_top_2_raw_weights", tied=True, extra=experts(8, 2, norm_topk_prob=False)),
    Shape(name="16_top_4_odd", hidden=48, head_dim=32, extra=experts(16, 4, features=20)),
    Shape(name="128_top_8", heads=8, extra=experts(128, 8, features=16)),
    Shape(name="some_dense", heads=8, layers=3, extra=experts(8, 2, mlp_only_layers=[1])),
    Shape(name="every_second", layers=4, tied=True, extra=experts(8, 2, decoder_sparse_step=2)),
    Shape(name="all_experts", kv_heads=1, num_shards=3, extra=experts(8, 8)),
    Shape(name="bfloat16", dtype=torch.bfloat16, extra=experts(16, 4)),
]
CASES = [(shape.name, size) for shape in SHAPES for size in (1, 2, 4)]
# Each shape at one size, and each size with several shapes.
CASES_OF_LOGITS = [(shape.name, (1, 2, 4)[i % 3]) for i, shape in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Reference:
        shape = next(shape for shape in SHAPES if shape.name == name)
        return make_reference(shape, tmp_path_factory.mktemp(name))

    return make


@pytest.mark.parametrize(("name", "size"), CASES)
def test_greedy_tokens_equal_transformers(
    pool: WorkerPool, reference: Any, name: str, size: int
) -> None:
    check_greedy_tokens(pool, reference(name), size)


def test_greedy_tokens_of_eight_ranks_equal_transformers(pool: WorkerPool, reference: Any) -> None:
    """Layers of experts and dense ones."""
    pool.grow(8)
    check_greedy_tokens(pool, reference("some_dense"), 8)


def check_greedy_tokens(pool: WorkerPool, expected: Reference, size: int) -> None:
    config = config_of(expected.model_dir, tensor_parallel_size=size, dtype="float32")
    with executor_of(pool, config) as executor:
        outputs = Scenario(executor, expected.prompts).run()
    wrong, near = compare(expected, outputs)
    print(
        f"exactness {expected.model_dir.name} tp {size}: {len(wrong)} differences, near ties {near}"
    )
    assert not wrong
    distinct = {token for tokens in outputs.values() for token in tokens}
    assert len(distinct) >= 30, "the outputs collapsed: the comparison says little"


@pytest.mark.parametrize(("name", "size"), CASES_OF_LOGITS)
def test_teacher_forced_logits_equal_transformers(
    pool: WorkerPool, reference: Any, name: str, size: int
) -> None:
    expected: Reference = reference(name)
    tokens = [t for prompt in expected.prompts.values() for t in prompt][:40]
    config = config_of(expected.model_dir, tensor_parallel_size=size, dtype="float32")
    with executor_of(pool, config) as executor:
        ours = run_logits(executor, tokens)
    with torch.inference_mode():
        theirs = expected.model(torch.tensor([tokens])).logits[0].numpy()
    difference = float(np.abs(ours - theirs).max())
    print(f"logits {name} tp {size}: largest difference {difference:.2e}")
    assert difference < LOGIT_TOLERANCE
