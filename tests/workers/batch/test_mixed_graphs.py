"""Steps with prompts through graphs on the stand-in for a GPU: which size runs, what padding does,
and that tokens and cache are those of an eager step.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import QWEN3_0_6B
from benchmarks.gpu_check_engine import QWEN3_8B
from configs.model import ModelConfig
from kernels import decode_parts
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.select import select_backend
from scheduler.messages import int32_array
from scheduler.params import ResolvedSampling
from tests.kernels.replaced import Replaced
from tests.workers.batch.graph_pair import MakeRunner, Pair, admitted, model_graphs
from tests.workers.fake_gpu import FakeGpu
from tests.workers.planner import Row
from workers.batch import mixed_graphs
from workers.batch.mixed_graphs import mixed_sizes

SIZES = (10, 20, 40)  # none of them is a size of decode graphs


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_SIZES", SIZES)


def prompt(pair: Pair, slot: int, length: int, sampling: ResolvedSampling | None = None) -> Row:
    """A new row of random tokens."""
    rng = random.Random(100 * slot + length)
    row = Row([rng.randrange(100) for _ in range(length)], length)
    row.sampling = sampling or row.sampling
    pair.planner.admit(row, slot)
    return row


# Sizes


def test_only_steps_that_a_gpu_computes_faster_than_a_host_launches_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    small, large = (ModelConfig.from_dict(raw) for raw in (QWEN3_0_6B, QWEN3_8B))
    assert mixed_sizes(small, 1, 16384) == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert mixed_sizes(large, 1, 16384) == (64, 128, 256, 384, 512, 768, 1024)
    assert mixed_sizes(large, 4, 16384) == (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    assert mixed_sizes(small, 1, 300) == (64, 128, 256), "no step has more tokens"


def test_the_next_larger_size_runs_at_every_edge(make: MakeRunner) -> None:
    pair = Pair(make, 8, num_blocks=60)
    for slot, (length, size) in enumerate(
        [(9, 10), (10, 10), (11, 20), (20, 20), (21, 40), (40, 40), (41, None)]
    ):
        assert pair.step([(prompt(pair, slot, length), length)]) == size


# Every kind of step


def test_chunks_beside_decode_rows_give_the_tokens_and_the_cache_of_an_eager_step(
    make: MakeRunner,
) -> None:
    """The largest step fills the room that a step has for its numbers."""
    pair = Pair(make, 8, max_num_batched_tokens=40)
    rows = admitted(pair, 4)
    assert pair.step([(row, 10) for row in rows]) in SIZES
    long = prompt(pair, 5, 33)
    assert pair.step([(row, 1) for row in rows] + [(long, 6)]) == 10
    assert pair.step([(row, 1) for row in rows] + [(long, 7)]) == 20
    other = prompt(pair, 6, 3)
    assert pair.step([*((row, 1) for row in rows), (long, 20), (other, 3)]) == 40
    assert pair.step([(row, 1) for row in [*rows, long, other]]) == 8, "a decode graph"


def test_rows_that_do_not_sample_take_no_token(make: MakeRunner) -> None:
    pair = Pair(make, 8)
    rows = admitted(pair, 2)
    pair.step([(row, 10) for row in rows])
    long = prompt(pair, 3, 20)
    assert pair.step([(long, 1)]) == 10
    assert pair.step([(rows[0], 1), (long, 1), (rows[1], 1)]) == 10, "a row behind a prompt"
    assert pair.step([(long, 5)]) == 10
    assert len(rows[0].output) == 2 and not long.output


def test_a_fully_cached_prompt_writes_nothing_beside_one_that_is_not(make: MakeRunner) -> None:
    pair = Pair(make, 8)
    first = prompt(pair, 0, 8)
    pair.step([(first, 8)])
    again, other = Row(first.tokens[:8], 8), prompt(pair, 2, 5)
    pair.planner.admit(again, slot=1, shared=first.blocks[:2], num_stored=8)
    assert pair.step([(again, 1), (other, 5)]) == 10
    assert again.output == first.output[:1]


def test_more_prompts_than_there_is_room_for_run_eagerly(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "_MAX_PROMPTS", 2)
    pair = Pair(make, 8)
    rows = [prompt(pair, slot, 3) for slot in range(3)]
    assert pair.step([(row, 3) for row in rows]) is None
    assert pair.step([(row, 1) for row in rows] + [(prompt(pair, 4, 6), 6)]) == 10


def test_steps_ahead_read_tokens_that_the_host_has_not_seen(make: MakeRunner) -> None:
    pair = Pair(make, 8)
    rows, long = admitted(pair, 3), prompt(pair, 4, 30)
    plans = [pair.planner.step([(row, 10) for row in rows])]
    for _ in range(4):
        plans.append(pair.planner.step([*((row, 1) for row in rows), (long, 5)]))
        plans.append(pair.planner.step([(row, 1) for row in rows]))
    outcomes = [[runner.run(plan) for plan in plans] for runner in (pair.with_graphs, pair.eager)]
    tokens, expected = ([step.finish(1.0, "a step")[0] for step in steps] for steps in outcomes)
    assert tokens == expected
    replays = sum(graph.num_replays for graph in model_graphs(pair.with_graphs))
    assert replays == len(plans)


# Padding


def test_what_attention_leaves_for_padding_is_not_used(
    make: MakeRunner,
) -> None:
    """Attention gives NaN to tokens of padding, which the last row owns."""

    def attention(q_THD: Any, k_cache: Any, v_cache: Any, attn: Any, scale: float) -> torch.Tensor:
        out_THD = REFERENCE.paged_attention(q_THD, k_cache, v_cache, attn, scale)
        out_THD[int(attn.query_start_B1[-2]) :] = torch.nan
        return out_THD

    pair = Pair(make, 8, Replaced(REFERENCE, paged_attention=attention))
    rows = admitted(pair, 3)
    pair.step([(row, 10) for row in rows])
    assert pair.step([*((row, 1) for row in rows), (prompt(pair, 4, 6), 4)]) == 10


@pytest.mark.parametrize(("max_parts", "starts"), [(3, [0, 1, 1, 1]), (5, [0, 5, 5, 5])])
def test_a_long_row_takes_parts_of_padding_only_where_parts_have_memory(
    make: MakeRunner, max_parts: int, starts: list[int]
) -> None:
    """The kernel keeps parts apart from outputs if there are more parts than rows."""
    state, lens_B = make(FakeGpu(), 4).batch_state, np.array([900], np.int32)
    decode = state.stage_decode(lens_B, max_parts, torch.from_numpy, num_rows=3)
    assert decode is not None and decode.part_start_B1.tolist() == starts


# The kernels of a GPU


@pytest.mark.parametrize("part_tokens", [16, 64])
def test_triton_finds_rows_between_padding(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, part_tokens: int
) -> None:
    """Decode rows in several parts and in one, prompts behind them, and neither."""
    monkeypatch.setattr(mixed_graphs, "_SIZES", (20,))
    monkeypatch.setattr(decode_parts, "CHUNK_TOKENS", part_tokens)
    pair = Pair(make, 3, select_backend("cpu", "triton"), tolerance=1e-4, num_blocks=40)
    rows = [Row([number % 90 for number in range(n)], n) for n in (29, 3, 17)]
    for slot, row in enumerate(rows):
        pair.planner.admit(row, slot)
    a, b, c = rows
    steps = [[(a, 15)], [(a, 14), (b, 3)], [(a, 1), (b, 1), (c, 9)], [(b, 1), (c, 8), (a, 1)]]
    assert [pair.step(step) for step in steps] == [20] * 4


def test_a_step_with_prompts_to_be_scored_runs_without_a_graph(
    make: MakeRunner,
) -> None:
    """A graph has no hidden states of the tokens within prompts."""
    pair = Pair(make, 4)
    sampling = ResolvedSampling(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=3)
    rows = [(prompt(pair, 0, 7, sampling), 7), (prompt(pair, 1, 5), 5)]
    plan = dataclasses.replace(pair.planner.step(rows), scoring_flags=bytes([1, 0]))
    graphs = model_graphs(pair.with_graphs)
    replays = [graph.num_replays for graph in graphs]
    steps = [runner.run(plan) for runner in (pair.with_graphs, pair.eager)]
    tokens, expected = (step.finish(1.0, "a step")[0] for step in steps)
    assert [graph.num_replays for graph in graphs] == replays
    assert tokens == expected
    [scores], [wanted] = (step.prompt_logprobs() for step in steps)
    assert scores == wanted and (
        scores.first_position,
        scores.end_position,
        scores.num_top_logprobs,
    ) == (
        1,
        7,
        3,
    )
    pair.planner.take(plan.step_id, int32_array(tokens))
    assert pair.step([(row, 1) for row, _ in rows]) is not None, "the next one does"
