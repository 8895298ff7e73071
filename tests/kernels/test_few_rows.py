"""Products of few rows with a weight that oneDNN has packed."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import linear, torch_c
from kernels.cpu.packed import max_few_rows, packed_address
from kernels.cpu.tile import has_dot_products

pytestmark = pytest.mark.skipif(
    not has_dot_products(), reason="this processor has no dot products of bfloat16 (AVX-512-BF16)"
)
SHAPES = [(64, 64), (128, 1024), (100, 70), (130, 96), (1, 2), (608, 130)]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The packed weight, which must live as long as its address."""
    whole = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    address = packed_address(weight, whole)
    assert address is not None
    return whole, address


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_is_near_that_of_float64(shape: tuple[int, int], with_bias: bool) -> None:
    size_out, size_in = shape
    weight, bias = normal(*shape, seed=1), normal(size_out, seed=2) if with_bias else None
    whole, address = pack(weight)
    for rows in (*range(1, 10), 16, 31, 32, 33, 95, 96):
        x = normal(rows, size_in, seed=rows)
        out = linear.linear_of_few_rows(x, address, size_out, bias)
        want = x.double() @ weight.double().T
        want = want if bias is None else want + bias.double()
        # One rounding to bfloat16, and the roundings of the float32 sums.
        torch.testing.assert_close(out.double(), want, atol=1e-4 * size_in**0.5, rtol=2**-8)
    assert whole.is_mkldnn


@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    _whole, address = pack(normal(192, 320, seed=1))
    x = normal(96, 320, seed=2)
    whole = linear.linear_of_few_rows(x, address, 192, None)
    for first in range(96):
        for last in (first + 1, min(96, first + 6)):
            alone = linear.linear_of_few_rows(x[first:last], address, 192, None)
            assert torch.equal(alone, whole[first:last])


def test_another_layout_is_seen() -> None:
    """A later oneDNN, or one for another processor, may pack differently."""
    weight = normal(256, 128, seed=1)
    other = torch.ops.mkldnn._reorder_linear_weight(weight.flip(0).contiguous(), 16)
    assert packed_address(weight, other) is None
    odd = normal(64, 63, seed=1)
    assert packed_address(odd, torch.ops.mkldnn._reorder_linear_weight(odd, 16)) is None


def test_a_torch_without_the_interface_leaves_products_to_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_c, "_torch_library", object)
    weight, x = normal(128, 64, seed=1), normal(3, 64, seed=2)
    want = x.double() @ weight.double().T
    out = linear.linear(x, linear.pack_weight(weight), None)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=2**-8)


def test_linear_takes_it_for_few_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(128, 64, seed=1)
    whole = linear.pack_weight(weight)
    taken: list[int] = []

    def spy(x: torch.Tensor, address: int, size_out: int, bias: object) -> torch.Tensor:
        taken.append(len(x))
        return torch.zeros(len(x), size_out, dtype=torch.bfloat16)

    monkeypatch.setattr(linear, "linear_of_few_rows", spy)
    most = max_few_rows(64, 128)
    for rows in (1, most, most + 1):
        out = linear.linear(normal(rows, 64, seed=2), whole, None)
        assert out.shape == (rows, 128)
    assert taken == [1, most]
