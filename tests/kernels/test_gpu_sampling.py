"""The sampling kernels in Triton, on a GPU or in the interpreter, against the reference and against
their own weights, as the GPU check compares them, over more kinds of logits.

Gaps, tokens, counts and limits are equal bit by bit. Weights may differ by the rounding of two
exponentials, 1e-6 of each, and a token's by one more where that moves its floor. The interpreter is
slow: each kind of logits in one dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_check_numerics
from benchmarks.gpu_check_common import Row
from kernels.gpu import sampling as GPU
from kernels.interface import GapRows, SamplingKernels
from kernels.reference import sampling as reference
from kernels.reference.sampling import BLOCK_COLUMNS, TOP_P_ONE
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_sampling_backends import KINDS, assert_same_best, gap_limits_of, make_logits
from tests.kernels.test_sampling_backends import make_rows as make_cpu_rows

# The interpreter uses numpy, which warns about float arithmetic that the kernels rely on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning"),
]

kinds = pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, (torch.float32, torch.bfloat16)[i % 2]) for i, kind in enumerate(KINDS)],
    ids=str,
)
spreads = pytest.mark.parametrize("num_programs", [1, 15, 4096])


def make_rows(kind: str, num_columns: int, dtype: torch.dtype) -> GapRows:
    """`test_sampling_backends.make_rows`, on the device."""
    gaps = make_cpu_rows(make_logits(kind, num_columns, dtype))
    fields = {field.name: getattr(gaps, field.name) for field in dataclasses.fields(GapRows)}
    return GapRows(**{name: tensor.to(DEVICE) for name, tensor in fields.items()})


def with_rows(gaps: GapRows, rows: list[int]) -> GapRows:
    """The first rows in this order, each with its own maximum and temperature."""
    return dataclasses.replace(
        gaps,
        rows_R=torch.tensor(rows, device=DEVICE),
        max_R=reference.row_best(gaps.logits_BV)[0][rows] + 0.25,
        temperature_R=torch.linspace(0.3, 1.5, len(rows), device=DEVICE),
    )


@kinds
@pytest.mark.parametrize(
    ("part", "num_columns"),
    [
        (gpu_check_numerics._same_best, 1),
        (gpu_check_numerics._same_best, 1003),
        (gpu_check_numerics._same_weights, 127),
        (gpu_check_numerics._same_weights, 1003),
        (gpu_check_numerics._same_picks, 140),
        (gpu_check_numerics._same_histograms, 200),
    ],
)
def test_kernels_give_what_the_reference_gives(
    part: Callable[[SamplingKernels, GapRows], Row], num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    row = part(GPU, make_rows(kind, num_columns, dtype))
    assert row["passed"], row


@spreads
@pytest.mark.parametrize("rows", [[5], [2, 2, 0]], ids=str)
def test_how_rows_are_chosen_and_spread_changes_no_weight_and_no_count(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], num_programs: int
) -> None:
    monkeypatch.setattr(GPU, "_TARGET_PROGRAMS", num_programs)
    monkeypatch.setattr(GPU, "_NUM_HISTOGRAMS", min(num_programs, 2))
    gaps = with_rows(make_rows("masked", 3001, torch.float32), rows)
    assert_same_best(GPU.row_best(gaps.logits_BV), reference.row_best(gaps.logits_BV))
    gap_limit, prefix = gap_limits_of(gaps, 3.0, -1.0, 9.5).to(DEVICE), gaps.rows_R.int() * 0
    for got, want in zip(
        GPU.block_weights(gaps, gap_limit), reference.block_weights(gaps, gap_limit), strict=True
    ):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=3001)
    counts = reference.gap_histogram(gaps, gap_limit, prefix, 0, False)
    assert counts.sum() and torch.equal(
        GPU.gap_histogram(gaps, gap_limit, prefix, 0, False), counts
    )


def test_blocks_whose_best_token_lies_beyond_the_limit_are_not_read() -> None:
    gaps = with_rows(make_rows("equal", 3 * BLOCK_COLUMNS, torch.float32), [0])
    gaps.block_max_BX[:, 1] = -50.0  # larger than any block of such tokens could have
    gap_limit, prefix = torch.full_like(gaps.max_R, 9.5), gaps.rows_R.int() * 0
    sums, _ = GPU.block_weights(gaps, gap_limit)
    assert (sums > 0).tolist() == [[True, False, True]]
    assert int(GPU.gap_histogram(gaps, gap_limit, prefix, 0, False).sum()) == 2 * BLOCK_COLUMNS


# Lists of the nearest tokens


def test_packed_numbers_are_those_of_the_reference() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38] * 5)
    ids = torch.randint(2**31 - 1, (45,), generator=torch.Generator().manual_seed(0))
    ids[:2] = torch.tensor([0, 2**31 - 1])
    packed = reference.pack_value_and_id(values, ids).to(DEVICE)
    assert torch.equal(GPU.pack_value_and_id(values.to(DEVICE), ids.to(DEVICE)), packed)
    for got, want in zip(
        GPU.unpack_value_and_id(packed), reference.unpack_value_and_id(packed), strict=True
    ):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))  # zeros have no sign


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 1), (1, 32), (2, 33), (3, 100)])
def test_drawn_indices_are_those_of_the_reference(num_ranks: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    seeds, positions = (
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator).to(DEVICE)
        for _ in range(2)
    )
    kept = torch.randint(2**56, (num_ranks, num_rows), generator=generator).to(DEVICE)
    kept[:, 0], kept[-1, -1] = 0, 2**57
    for rank in range(num_ranks):
        arguments = (seeds, positions, kept, rank)
        assert torch.equal(GPU.target_weight(*arguments), reference.target_weight(*arguments))


@kinds
@pytest.mark.parametrize("num_columns", [1, 129, 9000])
def test_list_is_that_of_the_reference(num_columns: int, kind: str, dtype: torch.dtype) -> None:
    rows = make_rows(kind, num_columns, dtype)
    for top_k in ([1, 2, 3, 20, 21], [256, 1, 100, 7, 130]):
        arguments = (rows, torch.tensor(top_k, device=DEVICE), max(top_k))
        assert torch.equal(GPU.list_nearest(*arguments), reference.list_nearest(*arguments))


@kinds
@pytest.mark.parametrize("cuts", [(), (1, 300, 301)], ids=str)
def test_limits_of_lists_are_the_reference_s_and_each_rank_keeps_what_it_weighs(
    cuts: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(kind, 1003, dtype)
    top_k = torch.tensor([20, 1, 256, 40, 5], device=DEVICE)
    shares = [round(0.95 * TOP_P_ONE), TOP_P_ONE, round(0.5 * TOP_P_ONE), 1, TOP_P_ONE]
    top_p = torch.tensor(shares, device=DEVICE)
    min_p_gap_limit = torch.tensor([torch.inf, torch.inf, torch.inf, 2.0, 1.0], device=DEVICE)
    parts = [part.contiguous() for part in rows.logits_BV.tensor_split(cuts, dim=1)]
    shards = [
        dataclasses.replace(rows, logits_BV=part, block_max_BX=reference.row_best(part)[2])
        for part in parts
    ]
    lists = torch.stack([reference.list_nearest(shard, top_k, 256) for shard in shards])
    gap_limit, kept = GPU.gap_limits_from_lists(lists, top_k, top_p, min_p_gap_limit)
    assert torch.equal(
        gap_limit, reference.gap_limits_from_lists(lists, top_k, top_p, min_p_gap_limit)[0]
    )
    for rank, shard in enumerate(shards):
        assert torch.equal(kept[rank], GPU.block_weights(shard, gap_limit)[1])
