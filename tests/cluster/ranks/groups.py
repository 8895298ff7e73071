"""Groups of real ranks for tests, and prompts that run on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.ranks.calls import StepCalls
from cluster.ranks.group import RankGroup, RankMaker
from cluster.resources.placement import Placement
from configs.engine import ResolvedConfig
from scheduler.engine import Engine, Grammars
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from tests.cluster.conftest import SmallModel
from tests.workers.conftest import config_of
from tests.workers.test_engine_exactness import (
    NEAR_TIE,
    NUM_OUTPUT,
    first_difference,
    limits_of,
    prompts,
)


def reserved(size: int, device: str) -> Placement:
    """Room for so many ranks."""
    placement = Placement(size, device, "test")
    placement.reserve()
    return placement


def group_with(small_model: SmallModel, refs: list[Any], **options: Any) -> RankGroup:
    """Two ranks that do not exist, whose answers to step 7 are `refs`."""
    placement: Any = None
    config = config_of(small_model.path, tensor_parallel_size=2, **options)
    group = RankGroup(RankMaker(config, placement, "test"))
    group._calls_by_step[7] = StepCalls([None] * len(refs))
    group._calls_by_step[7].step_refs = refs
    return group


@contextmanager
def two_ranks(config: ResolvedConfig) -> Iterator[RankGroup]:
    """Two ranks that are not started yet."""
    placement = reserved(2, "cpu")
    group = RankGroup(RankMaker(config, placement, "test"))
    try:
        yield group
    finally:
        group.close()
        placement.remove()


def check_every_token(
    small_model: SmallModel, grammars: Grammars | None = None, **options: int
) -> None:
    """Run some prompts on two ranks, and compare each token with the reference. With `grammars`,
    every second one has a grammar. `options` are the engine's.
    """
    config = config_of(small_model.path, tensor_parallel_size=2, num_kv_blocks=64, **options)
    with two_ranks(config) as group:
        scheduler = Scheduler(limits_of(config, group.start().num_blocks))
        engine = Engine(scheduler, group, num_steps_ahead=1, grammars=grammars)
        sampling = ResolvedSampling(seed=0, temperature=0.0, max_tokens=NUM_OUTPUT)
        sequences = [
            engine.add(
                Request(
                    request_id=str(i),
                    token_ids=int32_array(prompt),
                    num_prompt_tokens=len(prompt),
                    sampling=sampling,
                    structural_tag=b"all" if grammars is not None and i % 2 else b"",
                )
            )
            for i, prompt in enumerate(prompts())
        ]
        while engine.has_work:
            engine.step()
    for seq, prompt in zip(sequences, prompts(), strict=True):
        gap = first_difference(small_model.model, prompt, seq.token_ids[len(prompt) :].tolist())
        assert gap is None or gap <= NEAR_TIE
