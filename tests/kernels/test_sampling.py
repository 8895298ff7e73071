"""The pieces of sharded sampling, one shard at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.interface import GapRows
from kernels.reference import sampling as kernels
from tests.kernels.sampling_reference import chi_square, chi_square_limit, splitmix64

torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform_of(seeds: list[int], positions: list[int]) -> list[int]:
    return [
        int(bits) for bits in kernels.uniform_bits(torch.tensor(seeds), torch.tensor(positions))
    ]


def test_reference_generator_gives_the_published_numbers() -> None:
    """The first outputs from state 1234567, as listed on Rosetta Code under Pseudo-random
    numbers/Splitmix64.
    """
    assert [splitmix64(1234567, count) for count in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_uniform_bits_are_splitmix64_of_seed_and_position() -> None:
    seeds = [0, 1, 42, 2**63 - 1, 2**62 + 12345]
    positions = [0, 1, 7, 40959, 2**31]
    want = [splitmix64(splitmix64(s, 1), p + 1) >> 2 for s, p in zip(seeds, positions, strict=True)]
    assert uniform_of(seeds, positions) == want


def test_uniform_bits_of_fixed_inputs_never_change() -> None:
    """Recorded once: changing these would change every seeded output."""
    assert uniform_of([0, 1, 2**63 - 1], [0, 1, 1000]) == [
        3008887562355236763,
        4351421970967641211,
        1199702985289729561,
    ]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("shift", [54, 24, 0])
def test_uniform_bits_are_uniform_over_seeds_and_positions(vary: str, shift: int) -> None:
    numbers, fixed = torch.arange(100_000), torch.full((100_000,), 3)
    bits = kernels.uniform_bits(*((numbers, fixed) if vary == "seed" else (fixed, numbers)))
    counts = torch.bincount((bits >> shift) & 255, minlength=256).double().numpy()
    assert chi_square(counts, np.ones(256)) < chi_square_limit(255)


def test_consecutive_positions_and_seeds_are_not_correlated() -> None:
    grid = (
        kernels.uniform_bits(torch.arange(300)[:, None], torch.arange(300)[None]).double() / 2**62
        - 0.5
    )
    for a, b in (
        (grid[1:], grid[:-1]),
        (grid[:, 1:], grid[:, :-1]),
        (grid[1:, 1:], grid[:-1, :-1]),
    ):
        correlation = float((a * b).mean() * 12)
        assert abs(correlation) < 4 / a.numel() ** 0.5


@pytest.mark.parametrize("num_columns", [1, 2, 127, 128, 129, 1000])
def test_row_best_is_the_lowest_column_of_the_largest(num_columns: int) -> None:
    logits = normal(50, num_columns).mul(2).round()
    values, columns, _ = kernels.row_best(logits)
    for row in range(50):
        best = max(logits[row].tolist())
        assert (float(values[row]), int(columns[row])) == (best, logits[row].tolist().index(best))


def test_packed_candidates_order_by_value_then_lower_id() -> None:
    exact = torch.tensor(
        [-torch.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, 3e38, torch.inf]
    ).tolist()
    pairs = [(value, token) for value in exact for token in (2**31 - 1, 5, 0)]
    values, ids = torch.tensor([v for v, _ in pairs]), torch.tensor([t for _, t in pairs])
    packed = kernels.pack_value_and_id(values, ids)
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -pairs[i][1]))
    assert packed[order].tolist() == sorted(packed.tolist())
    assert len(set(packed.tolist())) == len(pairs) - 3  # both zeros count as the same value
    back_values, back_ids = kernels.unpack_value_and_id(packed)
    assert back_values.tolist() == values.tolist()
    assert back_ids.tolist() == ids.tolist()


def test_exponentials_do_not_depend_on_place_or_length() -> None:
    """The sampler's independence of shards and batches depends on it."""
    gaps = normal(1, 5000).abs() * 12
    whole = kernels.token_weights(gaps)
    for start in (0, 1, 3, 8, 17, 4001):
        for length in (1, 2, 5, 15, 16, 31, 33, 64, 900):
            part = gaps[:, start : start + length]
            assert torch.equal(kernels.token_weights(part), whole[:, start : start + length])
            assert torch.equal(
                kernels.token_weights(part.repeat(3, 1))[1:2], whole[:, start : start + length]
            )


def test_weights_are_scaled_exponentials_and_nothing_beyond_the_limit() -> None:
    gaps = torch.tensor([[0.0, 0.5, 3.0, 20.0, 28.0, torch.inf]])
    weights = kernels.token_weights(gaps)[0]
    want = torch.exp(-gaps[0].double()) * 2**40
    assert int(weights[0]) == kernels.WEIGHT_ONE
    torch.testing.assert_close(weights.double(), want.floor(), atol=1, rtol=2e-7)
    assert weights[4:].tolist() == [0, 0]
    assert kernels.token_weights(gaps, torch.tensor([3.0]))[0].count_nonzero() == 3


def test_gap_of_a_tiny_temperature_is_zero_for_the_best_and_never_a_nan() -> None:
    logits = torch.tensor([[3e38, -3e38, 5.0, -torch.inf]])
    gaps = kernels.token_gaps(logits, torch.tensor([3e38]), torch.tensor([1e-38]))
    assert gaps.tolist() == [[0.0, torch.inf, torch.inf, torch.inf]]


def rows_of(gaps: torch.Tensor) -> GapRows:
    """Rows with these gaps."""
    num_rows = len(gaps)
    _, _, block_max = kernels.row_best(-gaps)
    return GapRows(
        logits_BV=-gaps,
        block_max_BX=block_max,
        rows_R=torch.arange(num_rows),
        max_R=torch.zeros(num_rows),
        temperature_R=torch.ones(num_rows),
    )


def gap_limit_by_descent(gaps: torch.Tensor, wanted: torch.Tensor, by_weight: bool) -> torch.Tensor:
    prefix = torch.zeros(len(gaps), dtype=torch.int32)
    within = torch.full((len(gaps),), torch.inf)
    for radix_pass, (_, num_bits) in enumerate(kernels.RADIX_PASSES):
        histogram = kernels.gap_histogram(rows_of(gaps), within, prefix, radix_pass, by_weight)
        digit, wanted = kernels.next_digit(histogram, wanted)
        prefix = (prefix << num_bits) + digit.int()
    return prefix.clamp(max=kernels.INFINITY_BITS).view(torch.float32)


@pytest.mark.parametrize("rounded", [False, True])
def test_descent_finds_the_kth_smallest_gap_exactly(rounded: bool) -> None:
    gaps = normal(20, 3000).abs() * 10
    gaps = gaps.round() if rounded else gaps
    gaps[:, 100:120] = torch.inf
    gaps[:, 7] = 0.0
    top_k = torch.tensor([1, 2, 3, 10, 2980, 2981, 3000, *range(50, 63)])
    want = torch.stack(
        [row.sort().values[k - 1] for row, k in zip(gaps, top_k.tolist(), strict=True)]
    )
    assert torch.equal(gap_limit_by_descent(gaps, top_k, by_weight=False), want)


def test_descent_finds_the_weighted_quantile_exactly() -> None:
    generator = random.Random(1)
    gaps = (normal(30, 500).abs() * 6).mul(4).round().div(4)
    weights = kernels.token_weights(gaps)
    targets = [generator.randint(1, int(row.sum())) for row in weights]
    for gap_row, weight_row, target, found in zip(
        gaps.tolist(),
        weights.tolist(),
        targets,
        gap_limit_by_descent(gaps, torch.tensor(targets), by_weight=True),
        strict=True,
    ):
        within = {
            gap: sum(w for g, w in zip(gap_row, weight_row, strict=True) if g <= gap)
            for gap in set(gap_row)
        }
        assert float(found) == min(gap for gap, mass in within.items() if mass >= target)


def test_uniform_below_and_top_p_target_are_exact_in_large_integers() -> None:
    generator = random.Random(2)
    totals = [
        1,
        2,
        2**31 - 1,
        2**31,
        2**40,
        2**58 - 1,
        *(generator.getrandbits(58) | 1 for _ in range(200)),
    ]
    bits = [generator.getrandbits(62) for _ in totals]
    bits[:6] = [0, 2**62 - 1, 2**62 - 1, 2**31, 2**62 - 1, 2**62 - 1]
    numbers = kernels.uniform_below(torch.tensor(bits), torch.tensor(totals)).tolist()
    assert numbers == [b * t >> 62 for b, t in zip(bits, totals, strict=True)]
    parts = [generator.randint(0, 2**30) for _ in totals]
    target = kernels.top_p_target(torch.tensor(totals), torch.tensor(parts)).tolist()
    assert target == [max(1, -(-t * p // 2**30)) for t, p in zip(totals, parts, strict=True)]


def test_target_weight_counts_from_the_start_of_each_ranks_weights() -> None:
    seeds, positions = torch.arange(50) - 20, torch.arange(50) * 7
    kept = torch.randint(2**40, (3, 50), generator=torch.Generator().manual_seed(0))
    bits = kernels.uniform_bits(seeds, positions).tolist()
    whole = [b * total >> 62 for b, total in zip(bits, kept.sum(dim=0).tolist(), strict=True)]
    for rank in range(3):
        want = [
            index - before
            for index, before in zip(whole, kept[:rank].sum(dim=0).tolist(), strict=True)
        ]
        assert kernels.target_weight(seeds, positions, kept, rank).tolist() == want
