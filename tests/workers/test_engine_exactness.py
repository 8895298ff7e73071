"""The real scheduler over real ranks: the output does not depend on how the work was divided.

A pool so small that sequences are preempted, a budget so small that prompts are chunked, prompts
that share prefixes and repeat each other: greedy tokens must be those of transformers, seeded ones
those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, int32_array
from scheduler.params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of

NEAR_TIE = 1e-4
NUM_OUTPUT = 12
VOCAB = 1003


@dataclass(frozen=True)
class Sizes:
    """Sizes of blocks and heads: small ones, and those for which the CPU's attention has a fast
    path.
    """

    block: int
    head_dim: int
    num_tokens: int  # tokens of a step, where the budget is tight
    num_blocks: int  # blocks, where the pool is tight
    max_model_len: int


SMALL = Sizes(4, 16, 9, 24, 64)
FAST = Sizes(64, 64, 100, 9, 384)


@dataclass(frozen=True)
class Checkpoint:
    sizes: Sizes
    model_dir: Path
    model: Any


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sizes], Checkpoint]:
    @cache
    def checkpoint(sizes: Sizes) -> Checkpoint:
        shape = Shape(
            name="engine",
            heads=8,
            kv_heads=2,
            head_dim=sizes.head_dim,
            vocab=VOCAB,
            tied=True,
            max_positions=512,
        )
        model_dir = tmp_path_factory.mktemp("engine")
        return Checkpoint(sizes, model_dir, make_checkpoint(model_dir, shape))

    return checkpoint


def prompts(block: int = SMALL.block) -> list[list[int]]:
    """Two thirds share a prefix; lengths are around block edges; there are twins, and one prompt
    that is cached to its last token.
    """
    rng = np.random.default_rng(3)
    head = rng.integers(0, VOCAB, 3 * block).tolist()
    lengths = [1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 17]
    own = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    shared = [head + tail for tail in own]
    return own + shared + [head, list(head), shared[0], shared[3]]


def limits_of(config: ResolvedConfig, num_blocks: int) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
    )


def run(
    pool: WorkerPool,
    model: Checkpoint,
    size: int,
    params: list[SamplingParams],
    *,
    ahead: int = 1,
    tight: bool = True,
) -> tuple[list[list[int]], Scheduler]:
    """Output tokens by prompt, and the scheduler afterwards."""
    sizes = model.sizes
    config = config_of(
        model.model_dir,
        tensor_parallel_size=size,
        num_kv_blocks=sizes.num_blocks if tight else 256,
        max_num_seqs=6,
        max_num_batched_tokens=sizes.num_tokens if tight else 512,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block,
    )
    with executor_of(pool, config) as executor:
        scheduler = Scheduler(limits_of(config, executor.num_kv_blocks))
        engine = Engine(scheduler, executor, num_steps_ahead=ahead)
        sequences = []
        for i, (prompt, wanted) in enumerate(zip(prompts(sizes.block), params, strict=True)):
            sampling = wanted.resolve(seed=wanted.seed or 0)
            request = Request(
                request_id=str(i),
                token_ids=int32_array(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
            )
            sequences.append(engine.add(request))
        while engine.has_work:
            engine.step()
            engine.check()
        executor.check()
    return [seq.token_ids[seq.num_prompt_tokens :].tolist() for seq in sequences], scheduler


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sizes", [SMALL, FAST], ids=lambda sizes: f"block{sizes.block}")
def test_greedy_tokens_equal_transformers_through_the_scheduler(
    pool: WorkerPool, make: Callable[[Sizes], Checkpoint], sizes: Sizes, size: int, ahead: int
) -> None:
    checkpoint, work = make(sizes), prompts(sizes.block)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT)
    outputs, scheduler = run(pool, checkpoint, size, [greedy] * len(work), ahead=ahead)
    assert scheduler.stats.num_preemptions > 0, (
        "nothing was preempted: the pool is too large for this test"
    )
    assert scheduler.stats.num_cached_tokens > 0, "no prefix was found"
    differences, near = [], 0
    for prompt, output in zip(work, outputs, strict=True):
        gap = first_difference(checkpoint.model, prompt, output)
        if gap is not None:
            near += gap <= NEAR_TIE
            differences += [gap] if gap > NEAR_TIE else []
    preemptions, cached = scheduler.stats.num_preemptions, scheduler.stats.num_cached_tokens
    print(
        f"tp {size}, {ahead} ahead: {len(differences)} differences, {near} near ties, {preemptions}"
        f" preemptions, {cached} cached tokens"
    )
    assert not differences


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_seeds_give_the_same_tokens_at_every_size_and_in_any_batch(
    pool: WorkerPool, make: Callable[[Sizes], Checkpoint], size: int
) -> None:
    checkpoint, params = make(SMALL), mixed_params(len(prompts(SMALL.block)))
    alone, _ = run(pool, checkpoint, 1, params, ahead=0, tight=False)
    split, scheduler = run(pool, checkpoint, size, params, ahead=1, tight=True)
    assert scheduler.stats.num_preemptions > 0
    assert split == alone


def mixed_params(count: int) -> list[SamplingParams]:
    """A different mix for each prompt, in one batch."""
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {7: 5.0, 9: -100.0}},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
        {"stop_token_ids": [3, 5], "min_tokens": 6},
        {"logprobs": 3},
    ]
    return [
        SamplingParams(max_tokens=NUM_OUTPUT, seed=100 + i, **variants[i % len(variants)])
        for i in range(count)
    ]


def first_difference(model: Any, prompt: list[int], output: list[int]) -> float | None:
    """Gap between the reference's two best logits where a greedy output first differs from it; None
    if it never does.
    """
    assert len(output) == NUM_OUTPUT
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, output, strict=True):
        best = row.topk(2)
        if int(best.indices[0]) != token:
            return float(best.values[0] - best.values[1])
    return None
