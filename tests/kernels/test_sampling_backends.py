"""The kernels of sampling on every backend: each against plain loops over its own weights, and
against each other.

Gaps, tokens, counts and limits are equal bit by bit. Weights of the CPU backend may differ from the
reference's by the rounding of two exponentials, 1e-6 of each, and a token's by one more where that
moves its floor.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from kernels.interface import GapRows, SamplingKernels
from kernels.reference import sampling as reference
from kernels.reference.sampling import (
    BLOCK_COLUMNS,
    MAX_LISTED_TOP_K,
    RADIX_PASSES,
    TOP_P_ONE,
    WEIGHT_ONE,
)
from kernels.select import select_backend

set_num_threads = select_backend("cpu").set_num_threads
set_num_threads(1)
cpu = select_backend("cpu").sampling
both = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
COLUMNS = (1, 7, 127, 128, 129, 1003, 9000)
KINDS = ("normal", "ties", "equal", "masked", "nothing", "broken", "peak", "zeros")


def make_logits(kind: str, num_columns: int, dtype: torch.dtype, num_rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(num_rows, num_columns, generator=generator) * 4
    scattered = torch.rand(num_rows, num_columns, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits[:] = 3.5
    elif kind == "masked":
        logits[scattered < 0.7] = -torch.inf
    elif kind == "nothing":
        logits[::2] = -torch.inf
    elif kind == "broken":
        logits[scattered < 0.3] = torch.nan
        logits[scattered > 0.7] = -torch.nan
        logits[1] = torch.nan
        logits[2, -1] = torch.inf
    elif kind == "peak":
        logits[:, num_columns // 2] = 1e30
    elif kind == "zeros":
        logits = torch.where(scattered < 0.5, 0.0, -0.0)
    logits = logits.to(dtype)
    if kind == "broken" and dtype is torch.bfloat16:  # torch rounds every NaN to a negative one
        logits.view(torch.int16)[scattered < 0.15] = 0x7FC0
    return logits


def make_rows(logits: torch.Tensor, kernels: SamplingKernels = reference) -> GapRows:
    """Some rows in some order, each at its own temperature; another rank holds the best token of
    the last row.
    """
    max_B, _, block_max = kernels.row_best(logits)
    rows = torch.tensor([4, 0, 2, 1, 3]) if len(logits) == 6 else torch.arange(len(logits))
    temperatures = torch.tensor([0.6, 1.0, 1e-40, 0.013, 2.5])
    max_R = max_B[rows] + 0.0
    max_R[-1] += 1.25
    return GapRows(
        logits_BV=logits,
        block_max_BX=block_max,
        rows_R=rows,
        max_R=max_R,
        temperature_R=temperatures.repeat(len(rows) // 5 + 1)[: len(rows)],
    )


def gap_limits_of(gap_rows: GapRows, *values: float) -> torch.Tensor:
    return torch.tensor(values).repeat(len(gap_rows.rows_R) // len(values) + 1)[
        : len(gap_rows.rows_R)
    ]


def gaps_of(gap_rows: GapRows) -> torch.Tensor:
    """[R, V], from the definition."""
    logits = gap_rows.logits_BV[gap_rows.rows_R].float()
    return (gap_rows.max_R[:, None] - logits) / gap_rows.temperature_R[:, None]


def weights_alone(
    kernels: SamplingKernels, gap_rows: GapRows, gap_limit: torch.Tensor
) -> torch.Tensor:
    """Each token's weight as the kernel computes it if the token is the only one, int64 [R,
    V].
    """
    weights = []
    for r, row in enumerate(gap_rows.rows_R.tolist()):
        tokens = gap_rows.logits_BV[row][:, None].contiguous()
        _, _, block_max = kernels.row_best(tokens)
        one = dataclasses.replace(
            gap_rows,
            logits_BV=tokens,
            block_max_BX=block_max,
            rows_R=torch.arange(len(tokens)),
            max_R=gap_rows.max_R[r].expand(len(tokens)).contiguous(),
            temperature_R=gap_rows.temperature_R[r].expand(len(tokens)).contiguous(),
        )
        weights.append(kernels.block_weights(one, gap_limit[r].expand(len(tokens)).contiguous())[1])
    return torch.stack(weights)


def assert_same_best(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


# The best token


@both
@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_best_is_the_lowest_column_of_the_largest_number(
    kernels: SamplingKernels, num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    logits = make_logits(kind, num_columns, dtype)
    max_B, column_B, block_max = kernels.row_best(logits)
    assert (max_B.dtype, column_B.dtype, block_max.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
    )
    numbers = torch.where(logits.isnan(), -torch.inf, logits.float()).numpy()
    assert max_B.tolist() == numbers.max(axis=1).tolist()
    for row in range(len(logits)):
        if numbers[row].max() > -np.inf:
            assert int(column_B[row]) == int(numbers[row].argmax())
        assert 0 <= int(column_B[row]) < num_columns
    blocks = [
        numbers[:, start : start + BLOCK_COLUMNS].max(axis=1)
        for start in range(0, num_columns, BLOCK_COLUMNS)
    ]
    assert np.array_equal(block_max.numpy(), np.stack(blocks, axis=1))


# Weights


@both
def test_weights_are_scaled_exponentials_of_the_gap(kernels: SamplingKernels) -> None:
    gaps = torch.linspace(0, 30, 4001)
    rows = make_rows(-gaps[None].contiguous(), kernels)
    rows = dataclasses.replace(rows, max_R=torch.zeros(1), temperature_R=torch.ones(1))
    weights = weights_alone(kernels, rows, torch.tensor([torch.inf]))[0]
    want = torch.exp(-gaps.double()) * WEIGHT_ONE
    assert int(weights[0]) == WEIGHT_ONE
    torch.testing.assert_close(weights.double(), want.floor(), rtol=5e-7, atol=1)
    assert (weights[gaps > 28] == 0).all()


@both
@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_columns", COLUMNS[:-1])
def test_sums_are_those_of_each_token_alone(
    kernels: SamplingKernels, num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, num_columns, dtype))
    for gap_limit in (
        gap_limits_of(rows, torch.inf),
        gap_limits_of(rows, 3.0, 0.0, 9.5, -1.0, 50.0),
    ):
        weights = weights_alone(kernels, rows, gap_limit)
        gaps = gaps_of(rows)
        assert not weights[~(gaps <= gap_limit[:, None])].any()
        sums, total = kernels.block_weights(rows, gap_limit)
        assert torch.equal(total, weights.sum(dim=1))
        want = [
            weights[:, start : start + BLOCK_COLUMNS].sum(dim=1)
            for start in range(0, num_columns, BLOCK_COLUMNS)
        ]
        assert torch.equal(sums, torch.stack(want, dim=1))


@both
@dtypes
def test_weight_has_the_same_bits_at_every_place_of_a_block_of_every_length(
    kernels: SamplingKernels, dtype: torch.dtype
) -> None:
    """In the body of a vector loop, in its tail, and alone."""
    logits = make_logits("normal", BLOCK_COLUMNS, dtype, num_rows=1)
    gap_limit = torch.tensor([torch.inf])
    rows = make_rows(logits)
    alone = weights_alone(kernels, rows, gap_limit)[0]
    for start in (0, 1, 5):
        for length in range(1, BLOCK_COLUMNS - start + 1):
            part = logits[:, start : start + length].contiguous()
            cut = dataclasses.replace(rows, logits_BV=part, block_max_BX=kernels.row_best(part)[2])
            assert int(kernels.block_weights(cut, gap_limit)[1]) == int(
                alone[start : start + length].sum()
            )


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_backends_weigh_alike_up_to_the_rounding_of_the_exponential(
    kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, 1003, dtype))
    for gap_limit in (gap_limits_of(rows, torch.inf), gap_limits_of(rows, 3.0, 0.0, 9.5)):
        for got, want in zip(
            cpu.block_weights(rows, gap_limit),
            reference.block_weights(rows, gap_limit),
            strict=True,
        ):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1003)


def test_bfloat16_logits_weigh_as_their_float32_values() -> None:
    logits = make_logits("normal", 1003, torch.bfloat16)
    half, full = make_rows(logits, cpu), make_rows(logits.float(), cpu)
    gap_limit = gap_limits_of(half, torch.inf)
    top_k = torch.tensor([5, 1, 20, 7, 20])
    prefix = torch.zeros(5, dtype=torch.int32)
    assert_same_best(cpu.row_best(half.logits_BV), cpu.row_best(full.logits_BV))
    assert_same_best(cpu.block_weights(half, gap_limit), cpu.block_weights(full, gap_limit))
    assert torch.equal(cpu.list_nearest(half, top_k, 20), cpu.list_nearest(full, top_k, 20))
    for by_weight in (False, True):
        first, second = (
            cpu.gap_histogram(rows, gap_limit, prefix, 0, by_weight) for rows in (half, full)
        )
        assert torch.equal(first, second)


# The pick


@both
@dtypes
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("num_columns", COLUMNS[:-1])
def test_pick_walks_the_running_sum_of_the_weights(
    kernels: SamplingKernels, num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    rng = random.Random(num_columns)
    rows = make_rows(make_logits(kind, num_columns, dtype))
    for gap_limit in (gap_limits_of(rows, torch.inf), gap_limits_of(rows, 3.0, 9.5)):
        sums, total = kernels.block_weights(rows, gap_limit)
        running = weights_alone(kernels, rows, gap_limit).cumsum(dim=1)
        edges = [
            running[:, place]
            for place in (
                0,
                min(BLOCK_COLUMNS - 1, num_columns - 1),
                *range(num_columns // 2, num_columns, 40),
            )
        ]
        drawn = torch.tensor([rng.randrange(max(1, int(t))) for t in total])
        for index in (
            drawn,
            torch.zeros_like(total),
            total - 1,
            total,
            torch.full_like(total, -1),
            *edges,
        ):
            place = (running <= index[:, None]).sum(dim=1)
            want = torch.where((index >= 0) & (index < total), place, -1)
            assert torch.equal(kernels.pick_column(rows, gap_limit, sums, index), want)


@both
@dtypes
@pytest.mark.parametrize("cuts", [(1,), (128,), (500,), (129, 130, 700), (256, 512, 768)], ids=str)
def test_shards_add_up_and_pick_what_the_whole_row_picks(
    kernels: SamplingKernels, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits("normal", 1003, dtype))
    gap_limit = gap_limits_of(rows, torch.inf, 4.0)
    sums, total = kernels.block_weights(rows, gap_limit)
    index = (
        torch.rand(len(total), generator=torch.Generator().manual_seed(1)).double() * total
    ).long()
    starts = (0, *cuts)
    parts = [part.contiguous() for part in rows.logits_BV.tensor_split(cuts, dim=1)]
    shards = [
        dataclasses.replace(rows, logits_BV=part, block_max_BX=kernels.row_best(part)[2])
        for part in parts
    ]
    picked, before = torch.full_like(total, -1), torch.zeros_like(total)
    for start, shard in zip(starts, shards, strict=True):
        shard_sums, mine = kernels.block_weights(shard, gap_limit)
        column = kernels.pick_column(shard, gap_limit, shard_sums, index - before)
        picked = torch.where(column >= 0, column + start, picked)
        before += mine
    assert torch.equal(before, total)
    assert torch.equal(picked, kernels.pick_column(rows, gap_limit, sums, index))


# Lists of the nearest tokens


@both
@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_list_holds_the_k_smallest_gaps_and_how_many_tie_with_the_last(
    kernels: SamplingKernels, num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, num_columns, dtype))
    for top_k in ([1, 2, 3, 20, 21], [MAX_LISTED_TOP_K, 1, 100, 7, 130]):
        got = kernels.list_nearest(rows, torch.tensor(top_k), max(top_k))
        assert got.shape == (5, max(top_k))
        for r, (k, gaps) in enumerate(zip(top_k, gaps_of(rows), strict=True)):
            finite = gaps[gaps < torch.inf].sort().values
            nearest = finite[:k].tolist()
            entries = [(gap, 1) for gap in nearest] + [(float("inf"), 0)] * (
                max(top_k) - len(nearest)
            )
            if len(finite) >= k:
                entries[k - 1] = (nearest[-1], 1 + int((finite[k:] == nearest[-1]).sum()))
            listed = (got[r] >> 32).to(torch.int32).view(torch.float32)
            assert (
                list(zip(listed.tolist(), (got[r] & 0xFFFFFFFF).tolist(), strict=True)) == entries
            )


@both
@dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(), (500,), (1, 300, 301)], ids=str)
def test_limits_of_lists_are_those_of_a_sort_and_tell_what_each_rank_keeps(
    kernels: SamplingKernels, cuts: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, 1003, dtype))
    top_k = torch.tensor([20, 1, 256, 40, 5])
    top_p = torch.tensor([round(0.95 * TOP_P_ONE), TOP_P_ONE, round(0.5 * TOP_P_ONE), 0, TOP_P_ONE])
    min_p_gap_limit = torch.tensor([torch.inf, torch.inf, torch.inf, 2.0, 1.0])
    parts = [part.contiguous() for part in rows.logits_BV.tensor_split(cuts, dim=1)]
    shards = [
        dataclasses.replace(rows, logits_BV=part, block_max_BX=kernels.row_best(part)[2])
        for part in parts
    ]
    lists = torch.stack([kernels.list_nearest(shard, top_k, 256) for shard in shards])
    gap_limit, kept = kernels.gap_limits_from_lists(lists, top_k, top_p, min_p_gap_limit)
    everything = gap_limits_of(rows, torch.inf)
    for r, gaps in enumerate(gaps_of(rows)):
        weights = weights_alone(kernels, rows, everything)[r]
        ascending = gaps[gaps < torch.inf].sort().values.tolist()
        want = ascending[int(top_k[r]) - 1] if len(ascending) >= top_k[r] else float("inf")
        if top_p[r] < TOP_P_ONE:
            target = max(1, -(-int(weights[gaps <= want].sum()) * int(top_p[r]) // TOP_P_ONE))
            enough = (
                gap
                for gap in ascending
                if gap <= want and int(weights[gaps <= gap].sum()) >= target
            )
            want = next(enough, want)
        assert float(gap_limit[r]) == min(want, float(min_p_gap_limit[r]))
    for rank, shard in enumerate(shards):
        assert torch.equal(kept[rank], kernels.block_weights(shard, gap_limit)[1])


# Histograms


@both
@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_histograms_count_the_gaps_within_by_their_digits(
    kernels: SamplingKernels, kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, 1003, dtype))
    within = gap_limits_of(rows, torch.inf, 9.5, 2.0, -1.0)
    weights = weights_alone(kernels, rows, within)
    gaps = gaps_of(rows)
    bits = gaps.view(torch.int32).long()
    for radix_pass, (shift, num_bits) in enumerate(RADIX_PASSES):
        prefix = (
            bits[:, 17] >> (shift + num_bits) if radix_pass else torch.zeros(5, dtype=torch.int64)
        )
        prefix = torch.where(gaps[:, 17].isnan(), 0, prefix)
        counted = (gaps <= within[:, None]) & (bits >> (shift + num_bits) == prefix[:, None])
        digits = (bits >> shift) & ((1 << num_bits) - 1)
        for by_weight, amounts in ((False, counted.long()), (True, weights * counted)):
            want = torch.zeros(5, 1 << num_bits, dtype=torch.int64).scatter_add_(1, digits, amounts)
            assert torch.equal(
                kernels.gap_histogram(rows, within, prefix.int(), radix_pass, by_weight), want
            )


# The whole width, and threads


@dtypes
def test_threads_and_company_change_nothing_over_a_vocabulary_of_151936(dtype: torch.dtype) -> None:
    logits = make_logits("normal", 151_936, dtype)
    prefix, top_k = torch.zeros(5, dtype=torch.int32), torch.tensor([20, 1, 200, 50, 20])
    answers = []
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        rows = make_rows(logits, cpu)
        gap_limit = gap_limits_of(rows, torch.inf)
        sums, total = cpu.block_weights(rows, gap_limit)
        answers.append(
            (
                *cpu.row_best(logits),
                sums,
                total,
                cpu.pick_column(rows, gap_limit, sums, total // 3),
                cpu.list_nearest(rows, top_k, 200),
                cpu.gap_histogram(rows, gap_limit, prefix, 0, True),
            )
        )
    assert_same_best(*answers)
    assert_same_best(cpu.row_best(logits), reference.row_best(logits))
    assert torch.equal(cpu.list_nearest(rows, top_k, 200), reference.list_nearest(rows, top_k, 200))
    for r in range(5):  # one row uses both threads
        alone = GapRows(
            logits_BV=logits,
            block_max_BX=rows.block_max_BX,
            rows_R=rows.rows_R[r : r + 1],
            max_R=rows.max_R[r : r + 1],
            temperature_R=rows.temperature_R[r : r + 1],
        )
        assert torch.equal(cpu.block_weights(alone, gap_limit[:1])[0][0], sums[r])
        histogram = cpu.gap_histogram(alone, gap_limit[:1], prefix[:1], 0, True)
        assert torch.equal(histogram[0], answers[0][-1][r])
    set_num_threads(1)
