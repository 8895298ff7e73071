"""A rank on which masks are late gives the same tokens: rows start again in place, in the middle of
a block, with what they had.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import xxhash

from benchmarks.in_process import InProcessExecutor
from scheduler.engine import MASK_LATE, Engine, MaskAnswer
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepPlan, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.scheduler.fake_model import mask_bytes
from tests.workers.conftest import config_of

NUM_REQUESTS, NUM_TOKENS = 6, 20


class RandomlyLate:
    """A grammar that allows half of the tokens, which ones depends on the tokens so far."""

    def __init__(self, probability: float, num_mask_bytes: int) -> None:
        self.probability = probability
        self.num_late = 0
        self._num_mask_bytes = num_mask_bytes
        self._random = Random(3)
        self._given: set[tuple[str, int]] = set()

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        return [self._mask(seq) for seq in sequences]

    def is_quick(self, seq: Sequence) -> bool:
        return seq.request_id != "0"

    def forget(self, request_id: str) -> None:
        """The answers depend on nothing that is kept."""

    def _mask(self, seq: Sequence) -> MaskAnswer:
        key = seq.request_id, len(seq.token_ids)
        if key not in self._given and self._random.random() < self.probability:
            self.num_late += 1
            return MASK_LATE
        self._given.add(key)
        pattern = 0b01010101 << xxhash.xxh32_intdigest(bytes(int32_array(seq.token_ids))) % 2
        return bytes([pattern]) * self._num_mask_bytes


class OnAThread(InProcessExecutor):
    """Steps run on a thread of their own, so that masks may come after the launch."""

    thread: ThreadPoolExecutor

    def launch(self, plan: StepPlan) -> None:
        self.thread.submit(super().launch, plan)


def outputs(
    checkpoint: Path, probability: float, num_steps_ahead: int
) -> tuple[list[list[int]], int]:
    """(the tokens of all requests, how many masks were late)"""
    config = config_of(checkpoint, max_num_seqs=NUM_REQUESTS)
    executor = OnAThread(config)
    executor.thread = ThreadPoolExecutor(1)
    limits = SchedulerLimits(
        num_blocks=min(executor.num_kv_blocks, 64),
        block_size=config.block_size,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=64,
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
    )
    grammars = RandomlyLate(probability, mask_bytes(config.model.vocab_size))
    engine = Engine(Scheduler(limits), executor, num_steps_ahead=num_steps_ahead, grammars=grammars)
    sequences = []
    for number in range(NUM_REQUESTS):
        prompt = int32_array(range(5 + number, 8 + 3 * number))
        sampling = ResolvedSampling(
            seed=number, max_tokens=NUM_TOKENS, temperature=1.0, frequency_penalty=0.7
        )
        request = Request(
            request_id=str(number),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
        )
        if number % 3 < 2:
            request = dataclasses.replace(request, structural_tag=b"half")
        sequences.append(engine.add(request))
    while engine.has_work:
        engine.step()
        engine.check()
    executor.thread.shutdown()
    executor.worker.check()
    executor.close()
    return [seq.token_ids.tolist() for seq in sequences], grammars.num_late


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2])
def test_tokens_are_the_same_when_masks_are_late(
    small_checkpoint: Path, num_steps_ahead: int
) -> None:
    expected, _ = outputs(small_checkpoint, 0.0, 1)
    tokens, num_late = outputs(small_checkpoint, 0.4, num_steps_ahead)
    assert num_late > 20
    assert tokens == expected
