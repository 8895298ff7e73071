"""Sampling through graphs on the stand-in for a GPU: which steps it takes, and that tokens are
those of a step that is launched kernel by kernel.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.reference import sampling
from scheduler.params import ResolvedSampling
from tests.workers.batch.graph_pair import MakeRunner, Pair, sampling_graphs
from tests.workers.planner import Row
from workers.parallel.group import TensorParallelGroup
from workers.sampling import state
from workers.sampling.next_tokens import sampling_sizes
from workers.sampling.sampler import Sampler

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.8}
LISTED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
USUAL = {"greedy": GREEDY, "drawn": DRAWN, "listed": LISTED}
OTHERS: dict[str, dict[str, Any]] = {
    "a long list": DRAWN | {"top_k": 33},
    "no list": DRAWN | {"top_p": 0.9},
    "penalties": GREEDY | {"presence_penalty": 0.5},
    "a bias": GREEDY | {"logit_bias": ((3, 5.0),)},
    "a minimum of tokens": GREEDY | {"min_tokens": 9, "stop_token_ids": frozenset({1})},
    "log probabilities": GREEDY | {"logprobs": 2},
}

# For each parameter that decides a token, a value other than that of a row of `LISTED`.
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 10},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": ((3, 5.0),)},
    "min_tokens": {"min_tokens": 9},
    "logprobs": {"logprobs": 2},
}
# These decide when an output ends, or what is said of its prompt.
DECIDE_NO_TOKEN = {"max_tokens", "stop_token_ids", "prompt_logprobs"}


@pytest.fixture(scope="session")
def make(small_checkpoint: Path) -> MakeRunner:
    return MakeRunner(small_checkpoint)


def rows_of(pair: Pair, *ways: dict[str, Any]) -> list[Row]:
    """A row of three tokens for each way of sampling, in slots from 0 on."""
    rows = []
    for slot, way in enumerate(ways):
        rng = random.Random(slot)
        row = Row([rng.randrange(100) for _ in range(3)], 3)
        row.sampling = ResolvedSampling(seed=slot, max_tokens=100, **way)
        pair.planner.admit(row, slot)
        rows.append(row)
    return rows


def sampled_by(pair: Pair, rows: list[Row], num_tokens: int = 1) -> int | None:
    """Run a step on both runners; the place of the graph that sampled, counted from the largest
    size and greedy rows; None if none did.
    """
    graphs = sampling_graphs(pair.with_graphs)
    replays = [graph.num_replays for graph in graphs]
    pair.step([(row, num_tokens) for row in rows])
    ran = [i for i, graph in enumerate(graphs) if graph.num_replays != replays[i]]
    assert len(ran) <= 1
    return ran[0] if ran else None


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (3, (1, 2, 3)),
        (256, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)),
    ],
)
def test_sizes_end_in_the_largest_batch(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert sampling_sizes(max_num_seqs) == expected


@pytest.mark.parametrize("name", USUAL)
def test_rows_of_one_kind_that_has_a_graph_are_one_graph(make: MakeRunner, name: str) -> None:
    pair = Pair(make, 5)  # sizes 5, 4, 2, 1
    rows = rows_of(pair, *[USUAL[name]] * 5)
    kind = list(USUAL).index(name)
    assert sampled_by(pair, rows, 3) == kind, "after prompts that ran without a graph"
    for number, size in ((5, 0), (4, 1), (3, 1), (2, 2), (1, 3)):
        assert sampled_by(pair, rows[:number]) == 3 * size + kind


@pytest.mark.parametrize("name", ["drawn", "listed"])
def test_greedy_rows_beside_others_take_the_best_token(make: MakeRunner, name: str) -> None:
    pair = Pair(make, 4)
    rows = rows_of(pair, USUAL[name], GREEDY, USUAL[name], GREEDY)
    for _ in range(5):
        assert sampled_by(pair, rows, 3 if not rows[0].output else 1) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_graph_does_not_know_is_launched(make: MakeRunner, name: str) -> None:
    pair = Pair(make, 4)
    rows = rows_of(pair, GREEDY, OTHERS[name])
    assert sampled_by(pair, rows, 3) is None
    assert sampled_by(pair, rows) is None


@pytest.mark.parametrize(
    "name",
    [
        each.name
        for each in dataclasses.fields(ResolvedSampling)
        if each.name not in DECIDE_NO_TOKEN
    ],
)
def test_a_parameter_is_known_to_graphs_or_keeps_its_row_away_from_them(name: str) -> None:
    """Else a graph would ignore it in silence."""
    usual_row = {"seed": 0, "max_tokens": 100, **LISTED}
    with_other_value = usual_row | OTHER_VALUES[name]
    assert sampled_in_a_graph(with_other_value) != sampled_in_a_graph(usual_row)


def sampled_in_a_graph(row: dict[str, Any]) -> str | None:
    """All that the graph of one row reads of these parameters; None if no graph samples it."""
    cpu = torch.device("cpu")
    shard = Sampler(TensorParallelGroup(0, 1, cpu), sampling, 100, 0, 100, 4, cpu).state
    shard.admit(2, ResolvedSampling(**row), 3)
    slots, static_rows = np.array([2]), state.StaticSamplingRows(4, torch.from_numpy)
    if (kind := shard.graph_kind(slots)) is None:
        return None
    shard.fill(static_rows, slots, np.array([3]))
    return repr(static_rows.batch(1, kind))


def test_two_kinds_of_draw_in_one_step_are_launched(make: MakeRunner) -> None:
    pair = Pair(make, 4)
    rows = rows_of(pair, DRAWN, LISTED)
    assert sampled_by(pair, rows, 3) is None
    assert sampled_by(pair, rows[1:]) is not None, "each alone is not"


def test_rows_of_padding_change_no_token(make: MakeRunner) -> None:
    """Their slots are those that rows had in an earlier step."""
    pair = Pair(make, 4)
    rows = rows_of(pair, *[DRAWN] * 4)
    sampled_by(pair, rows, 3)
    before = pair.with_graphs.batch_state.tokens_SL.clone()
    sampled_by(pair, rows[:3])
    changed = (pair.with_graphs.batch_state.tokens_SL != before).nonzero()[:, 0]
    assert set(changed.tolist()) <= {0, 1, 2}
    assert torch.equal(pair.with_graphs.batch_state.tokens_SL, pair.eager.batch_state.tokens_SL)


def test_the_largest_list_of_a_graph_gives_the_tokens_of_the_list_a_step_needs(
    make: MakeRunner,
) -> None:
    pair = Pair(make, 4)
    tops = (1, 2, 31, state.MAX_GRAPH_TOP_K)
    rows = rows_of(pair, *[{"temperature": 1.5, "top_k": k} for k in tops])
    for _ in range(6):
        assert sampled_by(pair, rows, 3 if not rows[0].output else 1) is not None


def test_padding_takes_no_top_k_from_greedy_rows_of_an_earlier_step(make: MakeRunner) -> None:
    """A greedy row may have any top-k, more than the list of a graph has entries."""
    pair = Pair(make, 8)
    rows = rows_of(pair, *[GREEDY | {"top_k": 90}] * 4, *[LISTED] * 3)
    greedy, listed = rows[:4], rows[4:]
    assert sampled_by(pair, greedy, 3) is not None
    assert sampled_by(pair, listed, 3) is not None, "a graph with room for four rows"


def test_a_greedy_row_with_a_long_list_is_sampled_by_a_graph_beside_others(
    make: MakeRunner,
) -> None:
    pair = Pair(make, 4)
    rows = rows_of(pair, LISTED, GREEDY | {"top_k": 90})
    sampled_by(pair, rows, 3)
    assert sampled_by(pair, rows) is not None


@pytest.mark.parametrize("name", USUAL | OTHERS)
def test_all_ranks_sample_a_step_the_same_way(name: str) -> None:
    """Else their sums would not pair up: even where only one shard has the tokens that a row names,
    and where a shard is all padding.
    """
    cpu = torch.device("cpu")
    samplers = [
        Sampler(TensorParallelGroup(rank, 4, cpu), sampling, 100, 40 * rank, 40 * rank + 40, 4, cpu)
        for rank in range(4)
    ]
    shards = [sampler.state for sampler in samplers]
    for shard in shards:
        shard.admit(2, ResolvedSampling(seed=0, max_tokens=100, **(USUAL | OTHERS)[name]), 3)
    kinds = [shard.graph_kind(np.array([2])) for shard in shards]
    assert kinds == [list(USUAL).index(name) if name in USUAL else None] * 4
    for shard in shards:
        shard.release(2)
        shard.admit(1, ResolvedSampling(seed=0, max_tokens=100, temperature=0.0), 3)
    assert {shard.graph_kind(np.array([1])) for shard in shards} == {state.GREEDY_KIND}
