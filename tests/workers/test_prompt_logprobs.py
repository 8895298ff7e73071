"""Log probabilities of prompts equal those of transformers in float32, however the prompts were
divided into steps and over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.paths import DEFAULT_MODEL_DIR
from kernels.select import select_backend
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import PromptLogprobs, Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of
from tests.workers.planner import Planner, Row
from workers.batch.state import BatchState
from workers.device import Device
from workers.parallel.group import TensorParallelGroup
from workers.sampling.prompt_logprobs import POSITIONS_AT_ONCE, PromptScorer
from workers.sampling.shard import VocabularyShard

TOLERANCE = 1e-4
NUM_TOP = 5
BLOCK = 4
WHOLE = 512  # more than any step here has
VOCAB = 512


@dataclass(frozen=True)
class Checkpoint:
    model_dir: Path
    model: Any


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    @cache
    def make(name: str) -> Checkpoint:
        if name == "default":
            from transformers import Qwen3ForCausalLM

            model: Any = Qwen3ForCausalLM.from_pretrained(DEFAULT_MODEL_DIR, dtype=torch.float32)
            return Checkpoint(Path(DEFAULT_MODEL_DIR), model.eval())
        shape = Shape(name=name, heads=8, kv_heads=4, vocab=VOCAB + 491, tied=name == "tied")
        model_dir = tmp_path_factory.mktemp(name)
        return Checkpoint(model_dir, make_checkpoint(model_dir, shape))

    return make


def prompts() -> list[list[int]]:
    """Around the sizes of blocks and chunks; the last three begin alike."""
    rng = np.random.default_rng(5)
    own = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 4, 7, 8, 9, 30)]
    head = own[-1][: 3 * BLOCK]
    return [*own, head + own[0], list(own[-1])]


@dataclass
class Run:
    """Engine and scheduler over ranks, and what arrived of each prompt."""

    engine: Engine
    parts: dict[str, list[PromptLogprobs]]

    def add(self, name: str, prompt: list[int], **sampling: Any) -> None:
        wanted = {"seed": 0, "max_tokens": 3, "temperature": 0.0, "prompt_logprobs": NUM_TOP}
        request = Request(
            request_id=name,
            token_ids=int32_array(prompt),
            num_prompt_tokens=len(prompt),
            sampling=ResolvedSampling(**wanted | sampling),
        )
        self.parts[name] = []
        self.engine.add(request)

    def finish(self) -> None:
        while self.engine.has_work:
            output = self.engine.step()
            self.engine.check()
            if output is not None:
                for seq, part in output.prompt_logprobs:
                    self.parts[seq.request_id].append(part)

    def scores(self, name: str) -> PromptLogprobs:
        """Everything that arrived, which must be without gaps and repetitions."""
        together = PromptLogprobs.empty(NUM_TOP)
        for part in self.parts[name]:
            assert part.first_position == together.end_position, (
                f"{name}: {part.first_position} after {together.end_position}"
            )
            together = together.followed_by(part)
        return together


def run(
    pool: WorkerPool, model_dir: Path, work: Callable[[Run], None], size: int = 1, **options: Any
) -> Scheduler:
    """Have `work` add and finish requests on an engine of `size` ranks. Returns its scheduler."""
    config = config_of(
        model_dir,
        **{
            "tensor_parallel_size": size,
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "max_num_batched_tokens": WHOLE,
            "max_model_len": 64,
            "dtype": "float32",
        }
        | options,
    )
    with executor_of(pool, config) as executor:
        limits = SchedulerLimits(
            num_blocks=executor.num_kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            vocab_size=config.model.vocab_size,
        )
        scheduler = Scheduler(limits)
        work(Run(Engine(scheduler, executor, num_steps_ahead=1), {}))
        executor.check()
    return scheduler


def largest_difference(model: Any, prompt: list[int], scores: PromptLogprobs) -> float:
    """From transformers, over tokens and alternatives; the alternatives must be the best ones."""
    assert (scores.first_position, scores.end_position) == (1, len(prompt))
    if len(prompt) == 1:
        return 0.0
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(dim=1)
    targets = torch.tensor(prompt[1:])[:, None]
    own = exact.gather(1, targets)[:, 0]
    best = exact.topk(scores.num_top_logprobs, dim=1).values
    top_ids = torch.tensor(scores.top_token_ids.tolist()).view(-1, scores.num_top_logprobs)
    top = torch.tensor(scores.top_logprobs.tolist()).view(-1, scores.num_top_logprobs)
    near = 1e-4
    fewest = (exact > own[:, None] + near).sum(dim=1) + 1
    most = (exact >= own[:, None] - near).sum(dim=1)
    ranks = torch.tensor(scores.token_ranks.tolist())
    assert bool(((fewest <= ranks) & (ranks <= most)).all())
    differences = [
        (torch.tensor(scores.logprobs.tolist()) - own).abs().max(),
        (top - best).abs().max(),
        (top - exact.gather(1, top_ids)).abs().max(),
    ]
    return float(max(differences))


# Every pair of a checkpoint and a size, of a checkpoint and a chunk, and of a size and a chunk.
@pytest.mark.parametrize(
    ("name", "size", "chunk"),
    [
        (name, size, (1, 7, WHOLE)[(i + j) % 3])
        for i, name in enumerate(("default", "tied", "untied"))
        for j, size in enumerate((1, 2, 4))
    ],
)
def test_prompt_logprobs_are_those_of_transformers(
    pool: WorkerPool,
    checkpoint: Callable[[str], Checkpoint],
    name: str,
    size: int,
    chunk: int,
) -> None:
    tested, differences = checkpoint(name), []

    def work(engine: Run) -> None:
        for i, prompt in enumerate(prompts()):
            engine.add(str(i), prompt)
        engine.finish()
        for i, prompt in enumerate(prompts()):
            differences.append(largest_difference(tested.model, prompt, engine.scores(str(i))))

    seqs = min(chunk, 4)
    run(pool, tested.model_dir, work, size, max_num_batched_tokens=chunk, max_num_seqs=seqs)
    print(f"{name}, tp {size}, chunks of {chunk}: {max(differences):.1e}")
    assert max(differences) <= TOLERANCE


def test_a_cached_prefix_is_scored_too(
    pool: WorkerPool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    tested, prompt = checkpoint("tied"), prompts()[-1]
    cached: list[int | None] = []

    def work(engine: Run) -> None:
        engine.add("first", prompt, prompt_logprobs=-1)
        engine.finish()
        engine.add("second", prompt)
        engine.finish()
        assert largest_difference(tested.model, prompt, engine.scores("second")) <= TOLERANCE
        cached.append(engine.engine.scheduler.stats.num_cached_tokens)
        engine.add("third", prompt, prompt_logprobs=-1)
        engine.finish()

    scheduler = run(pool, tested.model_dir, work)
    assert cached == [0], "a request whose prompt is scored reads no cached prefix"
    assert scheduler.stats.num_cached_tokens > 0, "but others find what it has filled"


def test_preempted_prompts_are_scored_once(
    pool: WorkerPool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    tested = checkpoint("tied")

    def work(engine: Run) -> None:
        for i, prompt in enumerate(prompts()):
            engine.add(str(i), prompt, max_tokens=20)
        engine.finish()
        for i, prompt in enumerate(prompts()):
            difference = largest_difference(tested.model, prompt, engine.scores(str(i)))
            assert difference <= TOLERANCE, (i, difference)

    scheduler = run(
        pool, tested.model_dir, work, size=2, num_kv_blocks=14, max_num_batched_tokens=9
    )
    assert scheduler.stats.num_preemptions > 0, "the pool is too large for this test"


def test_other_rows_of_the_same_steps_get_the_same_tokens_and_no_scores(
    pool: WorkerPool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    tested, outputs = checkpoint("untied"), list[dict[str, list[int]]]()

    def work(engine: Run, num_top_logprobs: int = NUM_TOP) -> None:
        sequences = {}
        for i, prompt in enumerate(prompts()):
            engine.add(str(i), prompt, prompt_logprobs=num_top_logprobs if i % 2 else -1)
            sequences[str(i)] = engine.engine._sequences[str(i)]
        engine.finish()
        outputs.append({name: seq.token_ids.tolist() for name, seq in sequences.items()})
        scored = {name for name, parts in engine.parts.items() if parts}
        assert scored <= {str(i) for i in range(1, len(prompts()), 2)}
        assert bool(scored) == (num_top_logprobs >= 0)

    run(pool, tested.model_dir, work, max_num_batched_tokens=7)
    run(pool, tested.model_dir, lambda engine: work(engine, -1), max_num_batched_tokens=7)
    assert outputs[0] == outputs[1]


class CountingHead:
    """Logits that follow from the hidden states, and how many positions they had at a time."""

    def __init__(self, weight_VE: torch.Tensor) -> None:
        self.weight_VE = weight_VE
        self.sizes: list[int] = []

    def logits(self, hidden_BE: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden_BE))
        return hidden_BE @ self.weight_VE.T


def test_logits_of_few_positions_exist_at_a_time(small_checkpoint: Path) -> None:
    config = config_of(small_checkpoint, max_model_len=256, max_num_batched_tokens=256)
    kernels, device = select_backend("cpu", "reference"), Device(torch.device("cpu"))
    state = BatchState(config, 128, device, kernels, 2)
    group = TensorParallelGroup(0, 1, device.torch_device)
    shard = VocabularyShard(group, kernels.sampling, 50, 0, 50, device.torch_device)
    generator = torch.Generator().manual_seed(1)
    head = CountingHead(torch.randn(50, 8, generator=generator))
    scorer = PromptScorer(head, shard, state)
    lengths = (150, 1, 60)
    planner, rows = Planner(BLOCK), []
    for slot, length in enumerate(lengths):
        sampling = ResolvedSampling(seed=0, max_tokens=1, prompt_logprobs=slot)
        rows.append(Row([(7 * i + slot) % 50 for i in range(length)], length, sampling))
        planner.admit(rows[-1], slot)
        scorer.admit(slot, sampling)
    plan = planner.step([(row, 256) for row in rows])
    plan = dataclasses.replace(plan, scoring_flags=bytes([1, 0, 1]))
    state.apply(plan)
    scoring = scorer.stage(plan, state.take(plan), lambda array: device.upload(array)[0])
    assert scoring is not None
    hidden_TE = torch.randn(sum(lengths), 8, generator=generator)
    first, second = scorer.score(hidden_TE, scoring).messages()
    assert sum(head.sizes) == 149 + 59 and max(head.sizes) == POSITIONS_AT_ONCE
    assert (
        first.end_position,
        first.num_top_logprobs,
        second.end_position,
        second.num_top_logprobs,
    ) == (
        150,
        0,
        60,
        2,
    )
    exact = (hidden_TE @ head.weight_VE.T).double().log_softmax(dim=1)
    for part, row, begin in ((first, rows[0], 0), (second, rows[2], 151)):
        want = [float(exact[begin + i, token]) for i, token in enumerate(row.tokens[1:])]
        np.testing.assert_allclose(part.logprobs, want, atol=1e-5)
        better = [
            int((exact[begin + i] >= exact[begin + i, token]).sum())
            for i, token in enumerate(row.tokens[1:])
        ]
        assert part.token_ranks.tolist() == better
