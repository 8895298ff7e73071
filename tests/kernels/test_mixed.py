"""Products of float32 with bfloat16 weights: exact to rounding, with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import pool
from kernels.cpu.mixed import PANEL_FEATURES, CpuMixedPrecision

MIXED = CpuMixedPrecision()
# Whole and broken panels; rows within a chunk, of several chunks, and of several spans.
SHAPES = [(1, 8), (16, 1), (100, 96), (256, 256), (320, 1000), (77, 2500)]
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 33, 300]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weight(size_out: int, size_in: int) -> torch.Tensor:
    """bfloat16, padded with rows of ones, which must not show."""
    weight = torch.ones(
        -(-size_out // PANEL_FEATURES) * PANEL_FEATURES, size_in, dtype=torch.bfloat16
    )
    weight[:size_out] = normal(size_out, size_in)
    return weight


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    pool.set_num_threads(request.param)
    yield request.param
    pool.set_num_threads(1)


@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_exact_to_rounding(
    size_out: int, size_in: int, with_bias: bool, threads: int
) -> None:
    weight, bias = make_weight(size_out, size_in), normal(size_out, seed=1) if with_bias else None
    packed = MIXED.pack_weight(weight.clone())
    for rows in ROWS:
        x = normal(rows, 2 * size_in, seed=2)[:, ::2]  # not contiguous
        wanted = x.double() @ weight[:size_out].double().t()
        wanted += 0 if bias is None else bias.double()
        product = MIXED.linear(x, packed, size_out, bias)
        assert product.shape == wanted.shape and product.dtype is torch.float32
        torch.testing.assert_close(product.double(), wanted, rtol=1e-5, atol=3e-7 * size_in)


@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    size_out: int, size_in: int
) -> None:
    packed, x = (
        MIXED.pack_weight(make_weight(size_out, size_in)),
        normal(max(ROWS), size_in, seed=1),
    )
    try:
        found = []
        for threads in (1, 2, 3):
            pool.set_num_threads(threads)
            found += [MIXED.linear(x[:rows], packed, size_out, None) for rows in ROWS]
            found += [MIXED.linear(x[rows:], packed, size_out, None) for rows in ROWS[:-1]]
    finally:
        pool.set_num_threads(1)
    whole = found[len(ROWS) - 1]
    for part in found:
        first = 0 if torch.equal(part, whole[: len(part)]) else len(whole) - len(part)
        assert torch.equal(part, whole[first : first + len(part)])


@pytest.mark.parametrize("rows", [1, 40])
def test_every_value_of_bfloat16_is_multiplied_as_it_is(rows: int) -> None:
    """Including infinities, zeros of both signs and subnormal numbers."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    weight = torch.zeros(
        -(-len(values) // PANEL_FEATURES) * PANEL_FEATURES, 1, dtype=torch.bfloat16
    )
    weight[: len(values), 0] = values
    product = MIXED.linear(torch.ones(rows, 1), MIXED.pack_weight(weight), len(values), None)
    assert torch.equal(product, values.to(torch.float32).expand(rows, -1))


@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_rows_are_found_in_the_packed_weight(size_out: int, size_in: int, threads: int) -> None:
    weight = make_weight(size_out, size_in)
    room = weight.clone()
    packed = MIXED.pack_weight(room)
    assert packed.data_ptr() == room.data_ptr(), "packed in its own memory"
    ids = torch.randint(0, size_out, (50,), generator=torch.Generator().manual_seed(3))
    for chosen in (ids, ids[:0]):
        rows = MIXED.rows(packed, chosen)
        assert rows.dtype is torch.float32
        assert torch.equal(rows, weight[chosen].to(torch.float32))
