"""The sampling kernels in Triton, on a GPU or in the interpreter, against the reference and against
their own weights.

Gaps, tokens, counts and limits are equal bit by bit. Weights may differ by the rounding of two
exponentials, 1e-6 of each, and a token's by one more where that moves its floor. The interpreter is
slow: each kind of logits in one dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.gpu import sampling
from kernels.gpu import sampling as GPU
from kernels.interface import GapRows, SamplingKernels
from kernels.reference import sampling as reference
from kernels.reference.sampling import BLOCK_COLUMNS, RADIX_PASSES, TOP_P_ONE, WEIGHT_ONE
from scheduler.params import ResolvedSampling
from tests.kernels.gpu_device import DEVICE
from tests.kernels.replaced import Replaced, functions_of
from tests.kernels.test_sampling_backends import (
    COLUMNS,
    KINDS,
    assert_same_best,
    gaps_of,
    limits_of,
    make_logits,
)
from tests.kernels.test_sampling_backends import make_rows as make_some_rows
from workers.parallel.group import TensorParallelGroup
from workers.sampling.sampler import Sampler

# The interpreter uses numpy, which warns about float arithmetic that the kernels rely on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning"),
]

needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
kinds = pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, (torch.float32, torch.bfloat16)[i % 2]) for i, kind in enumerate(KINDS)],
    ids=str,
)
spreads = pytest.mark.parametrize("num_programs", [1, 15, 4096])
# Shuffled, a single row, one row twice, all in reverse.
ROWS = (
    [4, 0, 2, 1, 3],
    [5],
    [2, 2, 0],
    [5, 4, 3, 2, 1, 0],
)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, tuples of them and `GapRows`, moved to `device`; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if isinstance(value, GapRows):
        fields = [field.name for field in dataclasses.fields(GapRows)]
        return GapRows(**{name: moved(getattr(value, name), device) for name in fields})
    return value


def on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with arguments and results on the CPU."""
    return lambda *arguments: moved(kernel(*moved(arguments, DEVICE)), torch.device("cpu"))


gpu: Any = Replaced(
    GPU, **{name: on_device(getattr(GPU, name)) for name in functions_of(SamplingKernels)}
)


def make_rows(logits: torch.Tensor, rows: list[int] | None = None) -> GapRows:
    """`test_sampling_backends.make_rows`, optionally of other rows; the best token of the last row
    is on another rank.
    """
    gaps = make_some_rows(logits)
    if rows is None:
        return gaps
    max_R = reference.row_best(logits)[0][rows] + 0.0
    max_R[-1] += 1.25
    return dataclasses.replace(
        gaps,
        rows_R=torch.tensor(rows),
        max_R=max_R,
        temperature_R=torch.linspace(0.3, 1.5, len(rows)),
    )


def weights_alone(gap_rows: GapRows, limit: torch.Tensor) -> torch.Tensor:
    """Each token's weight as the kernel computes it if the token is the only one in its block,
    int64 [R, V].
    """
    logits = gap_rows.logits_BV
    apart = torch.full(
        (len(logits), logits.shape[1] * BLOCK_COLUMNS), -torch.inf, dtype=logits.dtype
    )
    apart[:, ::BLOCK_COLUMNS] = logits
    apart_gaps = dataclasses.replace(
        gap_rows, logits_BV=apart, block_max_BX=reference.row_best(apart)[2]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sampling, "_BLOCKS_PER_TILE", 32
        )  # this is four times as fast in the interpreter
        return torch.as_tensor(gpu.block_weights(apart_gaps, limit)[0])


def block_sums(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum(dim=1) for part in values.split(BLOCK_COLUMNS, dim=1)], dim=1)


# The best token


@kinds
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_best_is_that_of_the_reference(num_columns: int, kind: str, dtype: torch.dtype) -> None:
    logits = make_logits(kind, num_columns, dtype)
    assert_same_best(gpu.row_best(logits), reference.row_best(logits))


# Weights


def test_weights_are_scaled_exponentials_of_the_gap() -> None:
    gaps = torch.linspace(0, 30, 1001)
    rows = make_rows(-gaps[None].contiguous(), [0])
    rows = dataclasses.replace(rows, max_R=torch.zeros(1), temperature_R=torch.ones(1))
    weights = weights_alone(rows, torch.tensor([torch.inf]))[0]
    want = torch.exp(-gaps.double()) * WEIGHT_ONE
    assert int(weights[0]) == WEIGHT_ONE
    torch.testing.assert_close(weights.double(), want.floor(), rtol=5e-7, atol=1)
    assert (weights[gaps > 28] == 0).all()


@kinds
@pytest.mark.parametrize("num_columns", [1, 127, 200])
def test_sums_are_those_of_each_token_alone(
    num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, num_columns, dtype))
    limit = limits_of(rows, torch.inf, 3.0, 9.5, 0.0, 50.0)
    weights = weights_alone(rows, limit)
    assert not weights[~(gaps_of(rows) <= limit[:, None])].any()
    sums, total = gpu.block_weights(rows, limit)
    assert torch.equal(sums, block_sums(weights))
    assert torch.equal(total, weights.sum(dim=1))


@spreads
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(rows, (torch.float32, torch.bfloat16)[i % 2]) for i, rows in enumerate(ROWS)],
    ids=str,
)
def test_weights_are_the_reference_s_up_to_rounding_however_rows_are_chosen_and_spread(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], num_programs: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sampling, "_MAX_PROGRAMS", num_programs)
    gaps = make_rows(make_logits("normal", 3001, dtype), rows)
    assert_same_best(gpu.row_best(gaps.logits_BV), reference.row_best(gaps.logits_BV))
    for limit in (limits_of(gaps, torch.inf), limits_of(gaps, 3.0, -1.0, 9.5)):
        for got, want in zip(
            gpu.block_weights(gaps, limit), reference.block_weights(gaps, limit), strict=True
        ):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=3001)


# The pick


@kinds
@pytest.mark.parametrize("num_columns", [1, 200])
def test_pick_walks_the_running_sum_of_the_weights(
    num_columns: int, kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, num_columns, dtype))
    limit = limits_of(rows, torch.inf, 9.5)
    running = weights_alone(rows, limit).cumsum(dim=1)
    sums, total = gpu.block_weights(rows, limit)
    edges = [
        running[:, place].contiguous() for place in {0, min(127, num_columns - 1), num_columns - 1}
    ]
    for index in (
        total * 3 // 7,
        torch.full_like(total, -1),
        *edges,
        *(edge - 1 for edge in edges),
    ):
        place = (running <= index[:, None]).sum(dim=1)
        want = torch.where((index >= 0) & (index < total), place, -1)
        assert torch.equal(gpu.pick_column(rows, limit, sums, index), want)


# Lists of the nearest tokens


def test_packed_numbers_are_those_of_the_reference() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38] * 5)
    ids = torch.randint(2**31 - 1, (45,), generator=torch.Generator().manual_seed(0))
    ids[:2] = torch.tensor([0, 2**31 - 1])
    packed = reference.pack_value_and_id(values, ids)
    assert torch.equal(gpu.pack_value_and_id(values, ids), packed)
    for got, want in zip(
        gpu.unpack_value_and_id(packed), reference.unpack_value_and_id(packed), strict=True
    ):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))  # zeros have no sign


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 1), (1, 32), (2, 33), (3, 100)])
def test_drawn_indices_are_those_of_the_reference(num_ranks: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    seeds, positions = (
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator) for _ in range(2)
    )
    kept = torch.randint(2**56, (num_ranks, num_rows), generator=generator)
    kept[:, 0], kept[-1, -1] = 0, 2**57
    for rank in range(num_ranks):
        arguments = (seeds, positions, kept, rank)
        assert torch.equal(gpu.target_weight(*arguments), reference.target_weight(*arguments))


@kinds
@pytest.mark.parametrize("num_columns", [1, 129, 9000])
def test_list_is_that_of_the_reference(num_columns: int, kind: str, dtype: torch.dtype) -> None:
    rows = make_rows(make_logits(kind, num_columns, dtype))
    for top_k in ([1, 2, 3, 20, 21], [256, 1, 100, 7, 130]):
        arguments = (rows, torch.tensor(top_k), max(top_k))
        assert torch.equal(gpu.list_nearest(*arguments), reference.list_nearest(*arguments))


@kinds
@pytest.mark.parametrize("cuts", [(), (1, 300, 301)], ids=str)
def test_limits_of_lists_are_the_reference_s_and_each_rank_keeps_what_it_weighs(
    cuts: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    rows = make_rows(make_logits(kind, 1003, dtype))
    top_k = torch.tensor([20, 1, 256, 40, 5])
    top_p = torch.tensor([round(0.95 * TOP_P_ONE), TOP_P_ONE, round(0.5 * TOP_P_ONE), 1, TOP_P_ONE])
    min_p_limit = torch.tensor([torch.inf, torch.inf, torch.inf, 2.0, 1.0])
    parts = [part.contiguous() for part in rows.logits_BV.tensor_split(cuts, dim=1)]
    shards = [
        dataclasses.replace(rows, logits_BV=part, block_max_BX=reference.row_best(part)[2])
        for part in parts
    ]
    lists = torch.stack([reference.list_nearest(shard, top_k, 256) for shard in shards])
    limit, kept = gpu.limits_from_lists(lists, top_k, top_p, min_p_limit)
    assert torch.equal(limit, reference.limits_from_lists(lists, top_k, top_p, min_p_limit)[0])
    for rank, shard in enumerate(shards):
        assert torch.equal(kept[rank], gpu.block_weights(shard, limit)[1])


# Histograms


@kinds
@pytest.mark.parametrize("rows", [None, [2, 2, 0]], ids=str)
def test_histograms_count_the_gaps_within_by_their_digits(
    rows: list[int] | None, kind: str, dtype: torch.dtype
) -> None:
    gaps = make_rows(make_logits(kind, 200, dtype), rows)
    within = limits_of(gaps, torch.inf, 9.5, 2.0, -1.0)
    weights = weights_alone(gaps, within)
    bits = gaps_of(gaps).view(torch.int32).long()
    for radix_pass, (shift, num_bits) in enumerate(RADIX_PASSES):
        prefix = (
            bits[:, 17] >> (shift + num_bits)
            if radix_pass
            else torch.zeros(len(bits), dtype=torch.int64)
        )
        prefix = torch.where(gaps_of(gaps)[:, 17].isnan(), 0, prefix).int()
        counts = reference.gap_histogram(gaps, within, prefix, radix_pass, False)
        assert torch.equal(gpu.gap_histogram(gaps, within, prefix, radix_pass, False), counts)
        counted = (gaps_of(gaps) <= within[:, None]) & (
            bits >> (shift + num_bits) == prefix[:, None]
        )
        digits = (bits >> shift) & ((1 << num_bits) - 1)
        want = torch.zeros_like(counts).scatter_add_(1, digits, weights * counted)
        assert torch.equal(gpu.gap_histogram(gaps, within, prefix, radix_pass, True), want)


@spreads
def test_histogram_does_not_depend_on_how_rows_are_spread(
    monkeypatch: pytest.MonkeyPatch, num_programs: int
) -> None:
    monkeypatch.setattr(sampling, "_MAX_PROGRAMS", num_programs)
    monkeypatch.setattr(sampling, "_NUM_HISTOGRAMS", min(num_programs, 2))
    gaps = make_rows(make_logits("masked", 3001, torch.float32), [3, 1])
    within, prefix = torch.full((2,), torch.inf), torch.zeros(2, dtype=torch.int32)
    want = reference.gap_histogram(gaps, within, prefix, 0, False)
    assert int(want.sum()) == 2 * 3001
    assert torch.equal(gpu.gap_histogram(gaps, within, prefix, 0, False), want)


def test_blocks_whose_best_token_lies_beyond_the_limit_are_not_read() -> None:
    gaps = make_rows(make_logits("equal", 3 * BLOCK_COLUMNS, torch.float32), [0])
    gaps.block_max_BX[:, 1] = -50.0  # larger than any block of such tokens could have
    limit, prefix = torch.full((1,), 9.5), torch.zeros(1, dtype=torch.int32)
    sums, _ = gpu.block_weights(gaps, limit)
    assert (sums > 0).tolist() == [[True, False, True]]
    assert int(gpu.gap_histogram(gaps, limit, prefix, 0, False).sum()) == 2 * BLOCK_COLUMNS


# The whole width, whole steps


def test_one_row_of_151936_columns_is_that_of_the_reference() -> None:
    logits = make_logits("normal", 151_936, torch.bfloat16, num_rows=1)
    gaps = make_rows(logits, [0])
    assert_same_best(gpu.row_best(logits), reference.row_best(logits))
    limit = torch.tensor([12.0])
    sums, total = gpu.block_weights(gaps, limit)
    torch.testing.assert_close(
        sums.double(), reference.block_weights(gaps, limit)[0].double(), rtol=1e-6, atol=128
    )
    index = total * 2 // 3
    assert torch.equal(
        gpu.pick_column(gaps, limit, sums, index), reference.pick_column(gaps, limit, sums, index)
    )
    top_k = torch.tensor([50])
    assert torch.equal(gpu.list_nearest(gaps, top_k, 50), reference.list_nearest(gaps, top_k, 50))


def test_sampler_draws_the_tokens_that_it_draws_with_the_reference() -> None:
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(3)) * 3
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 400, "top_p": 0.95},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "top_k": 5},
    ]
    drawn = []
    for kernels in (gpu, reference):
        sampler = Sampler(
            TensorParallelGroup(0, 1, torch.device("cpu")), kernels, 1003, 0, 1003, 8, "cpu"
        )
        for slot, some in enumerate(options):
            sampler.admit(
                slot, ResolvedSampling(**({"seed": slot, "max_tokens": 100} | some)), [5, 9], 1
            )
        for position in (1, 2):
            drawn.append(
                sampler.sample(logits, sampler.state.batch(range(7), [position] * 7)).token_ids_B
            )
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


@needs_gpu
def test_a_graph_replays_every_kernel_over_new_logits() -> None:
    def step(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        max_B, column_B, block_max = GPU.row_best(logits)
        gap_rows = GapRows(
            logits_BV=logits,
            block_max_BX=block_max,
            rows_R=rows,
            max_R=max_B,
            temperature_R=temperatures,
        )
        lists = GPU.list_nearest(gap_rows, top_k, 20)
        limit, kept = GPU.limits_from_lists(
            lists[None], top_k, top_k, torch.full_like(max_B, torch.inf)
        )
        sums, total = GPU.block_weights(gap_rows, limit)
        counts = GPU.gap_histogram(gap_rows, limit, rows.int() * 0, 0, True)
        return (
            max_B,
            column_B,
            lists,
            limit,
            kept,
            total,
            counts,
            GPU.pick_column(gap_rows, limit, sums, total // 2),
        )

    first = make_logits("normal", 9000, torch.bfloat16).to(DEVICE)
    second = first.flip(1)
    rows, top_k = torch.arange(6, device=DEVICE), torch.full((6,), 20, device=DEVICE)
    temperatures = torch.full((6,), 0.7, device=DEVICE)
    step(first)  # compiles
    logits, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = step(logits)
    logits.copy_(second)
    graph.replay()
    assert_same_best(answers, step(second))
