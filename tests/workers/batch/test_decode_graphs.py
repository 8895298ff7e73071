"""Decoding through graphs on the stand-in for a GPU: which size runs, what padding does, and that
the tokens are the same as without graphs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels import decode_parts
from kernels.select import select_backend
from scheduler.errors import StepTimeoutError
from scheduler.params import ResolvedSampling
from tests.workers.batch.graph_pair import (
    BLOCK_SIZE,
    Pair,
    admitted,
    model_graphs,
)
from tests.workers.fake_gpu import FakeGpu, LateEvent
from tests.workers.planner import Planner, Row
from workers.batch import decode_graphs, mixed_graphs
from workers.batch.decode_graphs import graph_sizes


@pytest.fixture(autouse=True)
def without_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts run eagerly here; `test_mixed_graphs.py` is about their graphs."""
    monkeypatch.setattr(mixed_graphs, "_SIZES", ())


# Sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (17, (1, 2, 4, 8, 16, 17)),
        (513, (1, 2, 4, *range(8, 513, 8), 513)),
    ],
)
def test_sizes_end_in_the_largest_batch(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_enforce_eager_captures_nothing(make: Any) -> None:
    gpu = FakeGpu()
    assert make(gpu, 4, enforce_eager=True).decode_graphs is None and not gpu.graphs


@pytest.mark.parametrize("max_num_seqs", [1, 12])
def test_every_batch_gives_the_tokens_and_the_cache_of_an_eager_step(
    make: Any, max_num_seqs: int
) -> None:
    pair = Pair(make, max_num_seqs)
    rows = admitted(pair, max_num_seqs)
    pair.step([(row, 10) for row in rows])
    for number in range(1, max_num_seqs + 1):
        chosen = random.Random(number).sample(rows, number)
        size = next(size for size in graph_sizes(max_num_seqs) if size >= number)
        assert pair.step([(row, 1) for row in chosen]) == size


# What does not fit a graph


def test_prefill_and_mixed_steps_run_eagerly(make: Any) -> None:
    pair = Pair(make, 8)
    rows = admitted(pair, 4)
    long = Row(list(range(20)), 20)
    assert pair.step([(row, 10) for row in rows]) is None
    pair.planner.admit(long, slot=5)
    assert pair.step([(row, 1) for row in rows] + [(long, 6)]) is None
    assert pair.step([(row, 1) for row in rows] + [(long, 1)]) is None, "a row that does not sample"
    assert pair.step([(row, 1) for row in rows] + [(long, 20)]) is None
    assert pair.step([(row, 1) for row in [*rows, long]]) == 8


def test_a_fully_cached_prompt_is_replayed_and_writes_nothing(make: Any) -> None:
    pair = Pair(make, 4)
    first = Row(list(range(8)), 8)
    pair.planner.admit(first, slot=0)
    pair.step([(first, 8)])
    again = Row(list(range(8)), 8)
    pair.planner.admit(again, slot=1, shared=first.blocks[:2], num_stored=8)
    before = pair.with_graphs.cache.tensor.clone()
    assert pair.step([(again, 1)]) == 1
    assert torch.equal(before, pair.with_graphs.cache.tensor)
    assert again.output == first.output[:1]


def test_padding_writes_nothing_into_blocks_that_a_row_has_left(make: Any) -> None:
    pair = Pair(make, 8)
    rows = admitted(pair, 4)
    pair.step([(row, 10) for row in rows])
    assert pair.step([(row, 1) for row in rows]) == 4
    blocks, other = rows[3].blocks, Row(list(range(20, 28)), 8)
    pair.planner.release(rows[3])
    pair.planner.admit(other, slot=5, shared=blocks)
    pair.step([(other, 8)])
    assert pair.step([(row, 1) for row in rows[:3]]) == 4


# What a step sends to the device


FILTERS = ResolvedSampling(seed=3, max_tokens=100, temperature=0.8, top_k=20, top_p=0.9, logprobs=2)


def test_a_step_sends_its_numbers_in_one_copy_and_changes_of_tables_in_another(make: Any) -> None:
    gpu = FakeGpu()
    runner, planner = make(gpu, 8, num_blocks=60), Planner(BLOCK_SIZE)
    rows = [Row([slot] * 3, 3, FILTERS) for slot in range(5)]
    for slot, row in enumerate(rows):
        planner.admit(row, slot)
    chunks = [(row, 10) for row in rows]
    num_appended: list[int] = []
    for step in range(9):
        plan = planner.step(chunks if step == 0 else [(row, 1) for row in rows])
        changes_tables = plan.admitted_rows is not None or len(plan.appended_slots) > 0
        num_appended.append(len(plan.appended_slots))
        before = len(gpu.uploads)
        tokens, _ = runner.run(plan).finish(1.0, "a step")
        assert len(gpu.uploads) - before == 1 + changes_tables
        planner.take(plan.step_id, tokens)
    assert any(num_appended[1:]) and not all(num_appended[1:])


def test_more_than_there_is_room_for_is_sent_on_its_own(make: Any) -> None:
    pair = Pair(make, 8)
    bias = tuple((token, 0.5 * token) for token in range(90))
    rows = admitted(
        pair, 5, ResolvedSampling(seed=3, max_tokens=9, temperature=0.0, logit_bias=bias)
    )
    pair.step([(row, 10) for row in rows])
    before = len(pair.gpu.uploads)
    for _ in range(3):
        assert pair.step([(row, 1) for row in rows]) == 8
    assert len(pair.gpu.uploads) > before + 4


# The kernels of a GPU


def test_triton_behind_graphs_for_short_and_for_long_rows(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "_MAX_SHORT_ROW_TOKENS", 32)
    monkeypatch.setattr(decode_parts, "CHUNK_TOKENS", 16)
    pair = Pair(make, 3, select_backend("cpu", "triton"), tolerance=1e-4, num_blocks=40)
    assert len(model_graphs(pair.with_graphs)) == 6, "two each for one, two and three rows"
    rows = [Row([number % 90 for number in range(n)], n) for n in (29, 3, 40)]
    for slot, row in enumerate(rows):
        pair.planner.admit(row, slot)
    steps = [[(row, 50) for row in rows], *[[(row, 1) for row in rows]] * 2]
    steps += [[(rows[0], 1)], [(rows[0], 1)], [(rows[0], 1)], [(rows[1], 1)], [(rows[0], 1)]]
    assert [pair.step(step) for step in steps] == [None, 3, 3, 1, 1, 1, 1, 1]
    replays = sorted(graph.num_replays for graph in model_graphs(pair.with_graphs))
    assert replays == [0, 0, 0, 2, 2, 3]


# Waiting for the device


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_device_that_does_not_finish_is_given_up_with_a_name(make: Any, num_tokens: int) -> None:
    """Even where a step samples nothing, like most pieces of a prompt."""
    gpu = FakeGpu()
    runner, planner = make(gpu, 2), Planner(BLOCK_SIZE)
    gpu.late = LateEvent()
    row = Row([1, 2], 2)
    planner.admit(row, slot=0)
    pending = runner.run(planner.step([(row, num_tokens)]))
    assert gpu.late.num_looks == 0, "launching never waits"
    with pytest.raises(
        StepTimeoutError, match=r"step 7 of rank 1 did not finish on cpu within 0\.05 s"
    ):
        pending.finish(0.05, "step 7 of rank 1")
    gpu.late.passed = True
    assert len(pending.finish(0.05, "step 7 of rank 1")[0]) == num_tokens - 1


def test_a_step_is_timed_by_the_device(make: Any) -> None:
    gpu = FakeGpu()
    runner, planner = make(gpu, 2), Planner(BLOCK_SIZE)
    row = Row([1, 2, 3, 4, 5], 5)
    planner.admit(row, slot=0)
    gpu.moments_s = [10.0, 10.25, 20.0, 20.5]
    first, second = (runner.run(planner.step([(row, n)])) for n in (2, 3))
    assert len(first.finish(1.0, "a step")[0]) == 0 and first.device_s() == 0.25
    assert len(second.finish(1.0, "a step")[0]) == 1 and second.device_s() == 0.5


# The recorder itself


def test_a_replay_of_the_stand_in_spoils_what_other_graphs_computed() -> None:
    """And nothing that lay outside of them."""
    gpu, source, kept = FakeGpu(), torch.ones(2), torch.zeros(2)
    computed: list[torch.Tensor] = []
    first = gpu.capture(lambda: computed.append(kept.copy_(source + 1) + 1))
    second = gpu.capture(lambda: source + 2, first)
    first.replay()
    assert computed[-1].tolist() == [3, 3]
    second.replay()
    assert computed[-1].tolist() != [3, 3]
    assert kept.tolist() == [2, 2] and source.tolist() == [1, 1]
