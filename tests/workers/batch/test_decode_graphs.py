"""Decoding through graphs on the stand-in for a GPU: which size runs, what padding does, and that
the tokens are the same as without graphs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import decode_parts
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.select import select_backend
from scheduler.errors import StepTimeoutError
from scheduler.messages import int32_array
from scheduler.params import ResolvedSampling
from tests.kernels.replaced import Replaced
from tests.workers.batch.graph_pair import (
    BLOCK_SIZE,
    Pair,
    admitted,
    captured_sizes,
    model_graphs,
)
from tests.workers.fake_gpu import FakeGpu, LateEvent
from tests.workers.planner import Planner, Row
from workers.batch import decode_graphs, mixed_graphs
from workers.batch.decode_graphs import graph_sizes
from workers.device import Device


@pytest.fixture(autouse=True)
def without_mixed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts run eagerly here; `test_mixed_graphs.py` is about their graphs."""
    monkeypatch.setattr(mixed_graphs, "_SIZES", ())


# Sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (16, (1, 2, 4, 8, 16)),
        (17, (1, 2, 4, 8, 16, 17)),
        (100, (1, 2, 4, *range(8, 100, 8), 100)),
        (513, (1, 2, 4, *range(8, 513, 8), 513)),
    ],
)
def test_sizes_end_in_the_largest_batch(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_graphs_are_captured_from_the_largest_down(make: Any) -> None:
    gpu = FakeGpu()
    seen: list[int] = []
    capture = gpu.capture

    def noting(run: Any, pool_graph: Any = None) -> Any:
        seen.append(run.args[0])
        return capture(run, pool_graph)

    gpu.capture = noting  # type: ignore[method-assign]
    runner = make(gpu, 12)
    assert seen[:5] == [12, 8, 4, 2, 1] and len(model_graphs(runner)) == 5


def test_enforce_eager_captures_nothing(make: Any) -> None:
    gpu = FakeGpu()
    assert make(gpu, 4, enforce_eager=True).decode_graphs is None and not gpu.graphs


# Batches around the edges of every size


def edges(max_num_seqs: int) -> Iterator[tuple[int, int]]:
    """(number of rows, the size they should run in): one below, at, and one above every captured
    size.
    """
    sizes = graph_sizes(max_num_seqs)
    for number in sorted(
        {n for size in sizes for n in (size - 1, size, size + 1) if 1 <= n <= max_num_seqs}
    ):
        yield number, next(size for size in sizes if size >= number)


@pytest.mark.parametrize("max_num_seqs", [1, 12])
def test_every_batch_gives_the_tokens_and_the_cache_of_an_eager_step(
    make: Any, max_num_seqs: int
) -> None:
    pair = Pair(make, max_num_seqs)
    rows = admitted(pair, max_num_seqs)
    assert pair.step([(row, 10) for row in rows]) is (
        max_num_seqs if all(len(r.tokens) == 1 for r in rows) else None
    )
    for number, size in edges(max_num_seqs):
        chosen = random.Random(number).sample(rows, number)
        assert pair.step([(row, 1) for row in chosen]) == size


@pytest.mark.parametrize("max_num_seqs", [100, 513])
def test_the_next_larger_size_is_chosen_at_every_edge(make: Any, max_num_seqs: int) -> None:
    # No loops over the rows.
    quick: Any = Replaced(REFERENCE, paged_attention=lambda q, *_: q.clone())
    runner = make(FakeGpu(), max_num_seqs, quick)
    pair_sizes = dict(edges(max_num_seqs))
    planner = Planner(BLOCK_SIZE)
    rows = [Row([1 + slot % 90], 1) for slot in range(max_num_seqs)]
    for slot, row in enumerate(rows):
        planner.admit(row, slot)
    wanted = [1, 9, 16, 17, 95, 96, 97, 99, 100, 504, 505, 511, 512, 513]
    for number in [n for n in wanted if n in pair_sizes and n <= max_num_seqs]:
        plan = planner.step([(row, 1) for row in rows[:number]])
        replays = [graph.num_replays for graph in model_graphs(runner)]
        tokens, _ = runner.run(plan).finish(1.0, "a step")
        assert len(tokens) == number
        planner.take(plan.step_id, int32_array(tokens))
        [size] = [
            size
            for size, graph, before in zip(
                captured_sizes(runner), model_graphs(runner), replays, strict=True
            )
            if graph.num_replays != before
        ]
        assert size == pair_sizes[number]


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
    pair.planner.admit(again, slot=1, shared=first.blocks[:2], num_cached=8)
    before = pair.with_graphs.cache.tensor.clone()
    assert pair.step([(again, 1)]) == 1
    assert torch.equal(before, pair.with_graphs.cache.tensor)
    assert again.output == first.output[:1]


def test_random_sampling_is_the_same_behind_a_graph(make: Any) -> None:
    pair = Pair(make, 8)
    rows = admitted(
        pair, 5, ResolvedSampling(seed=3, max_tokens=100, temperature=0.8, top_k=20, logprobs=2)
    )
    pair.step([(row, 10) for row in rows])
    for _ in range(6):
        assert pair.step([(row, 1) for row in rows]) == 8


def test_a_step_ahead_reads_the_token_that_the_host_has_not_seen(make: Any) -> None:
    pair = Pair(make, 4)
    rows = admitted(pair, 3)
    plans = [pair.planner.step([(row, 10) for row in rows])]
    plans += [pair.planner.step([(row, 1) for row in rows]) for _ in range(4)]
    outcomes = [[runner.run(plan) for plan in plans] for runner in (pair.with_graphs, pair.eager)]
    tokens, expected = ([step.finish(1.0, "a step")[0] for step in steps] for steps in outcomes)
    assert tokens == expected
    assert sum(graph.num_replays for graph in model_graphs(pair.with_graphs)) == 4


def test_padding_rows_write_nothing(make: Any) -> None:
    """Five rows in a graph of eight: only the five blocks of these rows change."""
    pair = Pair(make, 8)
    rows = admitted(pair, 5)
    pair.step([(row, 10) for row in rows])
    before = pair.with_graphs.cache.tensor.clone()
    assert pair.step([(row, 1) for row in rows]) == 8
    per_layer = pair.with_graphs.cache.layers[0][0].shape
    changed = (pair.with_graphs.cache.tensor != before).view(2, -1, *per_layer).flatten(4).any(-1)
    assert changed.any(0).any(0).sum() == 5, "one slot a row"


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


def test_a_replayed_step_uses_the_room_it_has(make: Any) -> None:
    """The graph and the sampler read memory that never moves and is never allocated again."""
    gpu = FakeGpu()
    runner, planner = make(gpu, 8), Planner(BLOCK_SIZE)
    rows = [Row([slot + 1], 1, FILTERS) for slot in range(5)]
    for slot, row in enumerate(rows):
        planner.admit(row, slot)
    buffer = runner.uploads.buffer
    begin, end = buffer.data_ptr(), buffer.data_ptr() + len(buffer)
    places: list[int] = []
    put = runner.uploads.put

    def noting(array: Any) -> torch.Tensor:
        tensor: torch.Tensor = put(array)
        places.append(tensor.data_ptr())
        return tensor

    runner.uploads.put = noting
    for _ in range(3):
        plan = planner.step([(row, 1) for row in rows])
        planner.take(plan.step_id, runner.run(plan).finish(1.0, "a step")[0])
    assert all(begin <= place < end for place in places)
    assert sum(graph.num_replays for graph in model_graphs(runner)) == 3


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
    gpu, triton = FakeGpu(), select_backend("cpu", "triton")
    with_graphs = make(gpu, 3, triton, 40)
    eager = make(Device(torch.device("cpu")), 3, num_blocks=40)
    # Two graphs each for one, two and three rows.
    assert [graph.num_replays for graph in model_graphs(with_graphs)] == [0] * 6
    planner = Planner(BLOCK_SIZE)
    rows = [Row([number % 90 for number in range(n)], n) for n in (29, 3, 40)]
    for slot, row in enumerate(rows):
        planner.admit(row, slot)
    steps = [[(row, 50) for row in rows], *[[(row, 1) for row in rows]] * 2]
    steps += [[(rows[0], 1)], [(rows[0], 1)], [(rows[0], 1)], [(rows[1], 1)], [(rows[0], 1)]]
    for step in steps:
        plan = planner.step(step)
        (tokens, _), (expected, _) = (
            runner.run(plan).finish(1.0, "a step") for runner in (with_graphs, eager)
        )
        assert tokens == expected
        planner.take(plan.step_id, tokens)
    replays = sorted(graph.num_replays for graph in model_graphs(with_graphs))
    assert replays == [0, 0, 0, 2, 2, 3]


# Waiting for the device


def test_a_device_that_does_not_finish_is_given_up_with_a_name(make: Any) -> None:
    gpu = FakeGpu()
    runner, planner = make(gpu, 2), Planner(BLOCK_SIZE)
    gpu.late = LateEvent()
    row = Row([1, 2], 2)
    planner.admit(row, slot=0)
    pending = runner.run(planner.step([(row, 2)]))
    assert gpu.late.num_looks == 0, "launching never waits"
    with pytest.raises(
        StepTimeoutError, match=r"step 7 of rank 1 did not finish on cpu within 0\.05 s"
    ):
        pending.finish(0.05, "step 7 of rank 1")
    gpu.late.passed = True
    assert len(pending.finish(0.05, "step 7 of rank 1")[0]) == 1


def test_a_step_is_timed_by_the_device(make: Any) -> None:
    """Even one that samples nothing, like most pieces of a prompt; it is waited for too."""
    gpu = FakeGpu()
    runner, planner = make(gpu, 2), Planner(BLOCK_SIZE)
    row = Row([1, 2, 3, 4, 5], 5)
    planner.admit(row, slot=0)
    gpu.moments_s = [10.0, 10.25, 20.0, 20.5]
    first, second = (runner.run(planner.step([(row, n)])) for n in (2, 3))
    assert len(first.finish(1.0, "a step")[0]) == 0 and first.device_s() == 0.25
    assert len(second.finish(1.0, "a step")[0]) == 1 and second.device_s() == 0.5

    gpu.late = LateEvent()
    planner.take(1, second.finish(1.0, "a step")[0])
    other = Row([1, 2], 2)
    planner.admit(other, slot=1)
    pending = runner.run(planner.step([(other, 1)]))
    with pytest.raises(StepTimeoutError, match="step 8 did not finish"):
        pending.finish(0.05, "step 8")
    gpu.late.passed = True
    assert len(pending.finish(0.05, "step 8")[0]) == 0


# The recorder itself


def test_the_stand_in_refuses_a_capture_that_waits() -> None:
    gpu = FakeGpu()
    values = torch.arange(3)
    waits: list[Any] = [lambda: values.sum().item(), lambda: values[values > 1], values.nonzero]
    for waiting in waits:
        with pytest.raises(AssertionError, match="waits for the device"):
            gpu.capture(waiting)


def test_the_stand_in_replays_on_the_tensors_it_saw() -> None:
    gpu = FakeGpu()
    source, target = torch.ones(2), torch.zeros(2)
    graph = gpu.capture(lambda: target.copy_(source * 2 + 1))
    source.fill_(5)
    graph.replay()
    assert target.tolist() == [11, 11]


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
