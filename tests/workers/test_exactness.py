"""Greedy float32 tokens equal those of transformers at every tensor-parallel size, however requests
are batched.

One scenario forces chunked prefill, mixed batches, shared prefix blocks, a full hit, preemption
with and without cached blocks, and runs one step ahead. A difference counts when the reference's
two best logits lie more than `NEAR_TIE` apart; other differences end the comparison of that
sequence and are printed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rank_pool import PoolExecutor, WorkerPool, executor_of
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of
from tests.workers.planner import Planner, Row

NEAR_TIE = 1e-4
LOGIT_TOLERANCE = 1e-4  # float32 sums in another order; logits here reach 20
BLOCK = 4
NUM_OUTPUT = 10

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

SHAPES = [
    Shape(name="heads_1_to_1", kv_heads=4),
    Shape(name="heads_2_to_1_tied", tied=True),
    Shape(name="heads_8_to_1", heads=16, kv_heads=2, head_dim=8),
    Shape(name="one_kv_head", kv_heads=1),
    Shape(name="odd_vocabulary", vocab=1003, tied=True),
    Shape(name="vocabulary_of_five", vocab=5),
    Shape(name="head_dim_apart", hidden=48, head_dim=32),
    Shape(name="yarn", max_positions=64, extra={"rope_parameters": YARN}),
    Shape(name="linear", extra={"rope_parameters": LINEAR}),
    Shape(name="attention_bias", extra={"attention_bias": True}),
    Shape(name="sharded_files", layers=3, num_shards=3),
    Shape(name="bfloat16_tied", vocab=1003, tied=True, dtype=torch.bfloat16),
    Shape(name="bfloat16_bias", dtype=torch.bfloat16, extra={"attention_bias": True}),
]


@dataclass(frozen=True)
class Reference:
    """A checkpoint, its transformers model, and what that model generates for each prompt of the
    scenario.
    """

    model_dir: Path
    model: Any
    vocab_size: int
    prompts: dict[str, list[int]]
    tokens: dict[str, list[int]]
    gaps: dict[str, list[float]]  # between the two best logits of each generated token


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(name: str) -> Reference:
        shape = next(shape for shape in SHAPES if shape.name == name)
        return make_reference(shape, tmp_path_factory.mktemp(name))

    return make


def make_reference(shape: Shape, model_dir: Path) -> Reference:
    """What transformers makes of a new checkpoint of this shape."""
    model = make_checkpoint(model_dir, shape)
    prompts = make_prompts(shape.vocab)
    outputs = {key: generate(model, prompt) for key, prompt in prompts.items()}
    tokens, gaps = ({key: output[part] for key, output in outputs.items()} for part in (0, 1))
    return Reference(model_dir, model, shape.vocab, prompts, tokens, gaps)


def make_prompts(vocab: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(7)

    def draw(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, vocab, length)]

    chunked = draw(13)
    return {
        "chunked": chunked,
        "short": draw(3),
        "shares_two_blocks": chunked[: 2 * BLOCK] + draw(3),
        "full_hit": chunked[: 3 * BLOCK],
        "preempted": draw(7),
        "preempted_cached": draw(9),
        "one_token": draw(1),
    }


def generate(model: Any, prompt: list[int]) -> tuple[Any, Any]:
    """(greedy tokens, gap between the two best logits at each) of the reference."""
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NUM_OUTPUT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


class Scenario:
    """Runs the prompts on an executor, a step ahead of the results."""

    CHUNK = 5

    def __init__(self, executor: PoolExecutor, prompts: dict[str, list[int]]) -> None:
        self.executor = executor
        self.planner = Planner(BLOCK)
        self.rows = {name: Row(list(prompt), len(prompt)) for name, prompt in prompts.items()}
        self.unread: list[int] = []

    def run(self) -> dict[str, list[int]]:
        rows, planner = self.rows, self.planner
        planner.admit(rows["chunked"], slot=0)
        planner.admit(rows["short"], slot=1)
        self.steps(2)
        planner.admit(rows["preempted"], slot=2)
        planner.admit(rows["preempted_cached"], slot=3)
        planner.admit(rows["one_token"], slot=6)
        self.steps(4)
        blocks = rows["chunked"].blocks  # long filled
        planner.admit(rows["shares_two_blocks"], slot=4, shared=blocks[:2], num_stored=2 * BLOCK)
        planner.admit(rows["full_hit"], slot=5, shared=blocks[:3], num_stored=3 * BLOCK)
        self.steps(1)
        self.read_all()
        kept = rows["preempted_cached"].blocks[:2]
        planner.release(rows["preempted"])
        planner.release(rows["preempted_cached"])
        self.steps(1)
        self.read_all()
        planner.admit(rows["preempted"], slot=3)
        planner.admit(rows["preempted_cached"], slot=7, shared=kept, num_stored=2 * BLOCK)
        self.steps(3 * NUM_OUTPUT)
        self.read_all()
        self.executor.check()
        return {name: row.output for name, row in rows.items()}

    def steps(self, number: int) -> None:
        """Run this many steps of every row that is admitted and not finished."""
        for _ in range(number):
            active = [row for row in self.rows.values() if row.slot >= 0]
            rows = [(row, self.CHUNK) for row in active if row.length - row.num_prompt < NUM_OUTPUT]
            if not rows:
                return
            plan = self.planner.step(rows)
            self.executor.launch(plan)
            self.unread.append(plan.step_id)
            if len(self.unread) > 1:
                self.read()

    def read(self) -> None:
        step_id = self.unread.pop(0)
        self.planner.take(step_id, self.executor.result(step_id).token_ids)

    def read_all(self) -> None:
        while self.unread:
            self.read()


def compare(expected: Reference, outputs: dict[str, list[int]]) -> tuple[list[str], list[str]]:
    """(differences that count, near ties)."""
    wrong: list[str] = []
    near: list[str] = []
    for name, tokens in outputs.items():
        reference_tokens, gaps = expected.tokens[name], expected.gaps[name]
        assert len(tokens) == len(reference_tokens), (name, tokens, reference_tokens)
        index = next(
            (i for i, (a, b) in enumerate(zip(tokens, reference_tokens, strict=True)) if a != b),
            None,
        )
        if index is not None:
            where = (
                f"{name}[{index}]: {tokens[index]}, reference {reference_tokens[index]}, gap"
                f" {gaps[index]:.2e}"
            )
            (wrong if gaps[index] > NEAR_TIE else near).append(where)
    return wrong, near


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_greedy_tokens_equal_transformers(
    pool: WorkerPool, reference: Any, name: str, size: int
) -> None:
    expected: Reference = reference(name)
    with executor_of(
        pool, config_of(expected.model_dir, tensor_parallel_size=size, dtype="float32")
    ) as executor:
        outputs = Scenario(executor, expected.prompts).run()
    wrong, near = compare(expected, outputs)
    print(f"exactness {name} tp {size}: {len(wrong)} differences, near ties {near}")
    assert not wrong
    distinct = {token for tokens in outputs.values() for token in tokens}
    assert len(distinct) >= min(30, expected.vocab_size // 2), (
        "the outputs collapsed: the comparison says little"
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [shape.name for shape in SHAPES])
def test_teacher_forced_logits_equal_transformers(
    pool: WorkerPool, reference: Any, name: str, size: int
) -> None:
    expected: Reference = reference(name)
    tokens = [t for prompt in expected.prompts.values() for t in prompt][:40]
    with executor_of(
        pool, config_of(expected.model_dir, tensor_parallel_size=size, dtype="float32")
    ) as executor:
        ours = run_logits(executor, tokens)
    with torch.inference_mode():
        theirs = expected.model(torch.tensor([tokens])).logits[0].numpy()
    difference = float(np.abs(ours - theirs).max())
    print(
        f"logits {name} tp {size}: largest difference {difference:.2e}, largest logit"
        f" {np.abs(theirs).max():.1f}"
    )
    assert difference < LOGIT_TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["heads_2_to_1_tied", "head_dim_apart", "one_kv_head"])
def test_bfloat16_logits_are_at_most_twice_as_far_from_float32_as_plain_bfloat16(
    pool: WorkerPool, reference: Any, name: str, size: int
) -> None:
    """Plain: the transformers model in bfloat16, every operation rounded."""
    expected: Reference = reference(name)
    tokens = [t for prompt in expected.prompts.values() for t in prompt][:40]
    with torch.inference_mode():
        exact = expected.model(torch.tensor([tokens])).logits[0].numpy()
        plain = (
            copy.deepcopy(expected.model)
            .bfloat16()(torch.tensor([tokens]))
            .logits[0]
            .float()
            .numpy()
        )
    config = config_of(expected.model_dir, tensor_parallel_size=size, dtype="bfloat16")
    with executor_of(pool, config) as executor:
        ours = run_logits(executor, tokens)
    (mean, largest), (plain_mean, plain_largest) = (
        (float(np.abs(x - exact).mean()), float(np.abs(x - exact).max())) for x in (ours, plain)
    )
    print(
        f"bfloat16 {name} tp {size}: mean {mean:.4f}, plain {plain_mean:.4f}; largest"
        f" {largest:.3f}, plain {plain_largest:.3f}"
    )
    assert mean <= 2 * plain_mean
    assert largest <= 2 * plain_largest


def run_logits(executor: PoolExecutor, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[T, vocab] of one sequence in one chunk."""
    planner = Planner(BLOCK)
    row = Row(tokens, len(tokens))
    planner.admit(row, slot=0)
    values, vocab = executor.logits(planner.step([(row, len(tokens))]))
    return np.frombuffer(values, np.float32).reshape(-1, vocab)
