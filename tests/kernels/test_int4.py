"""Products with 4-bit codes: the CPU's kernels beside the reference, which widens the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.int4 import CpuInt4
from kernels.interface import Int4Weight
from kernels.reference.int4 import ReferenceInt4, pack_codes, widened

CPU, REFERENCE = CpuInt4(), ReferenceInt4()
# Rows of x, features out and in, inputs of a group: of one panel and of several, the last one not
# full, groups of one word, longer than a chunk, and as long as the matrix.
SHAPES = [
    (1, 64, 128, 128),
    (1, 200, 384, 32),
    (3, 65, 24, 8),
    (5, 1, 1024, 1024),
    (17, 130, 288, 96),
    (300, 64, 256, 64),
]


def drawn(rows: int, inputs: int, group_size: int, scale_dtype: torch.dtype) -> Int4Weight:
    """A weight with every code and zero point."""
    groups = inputs // group_size
    return Int4Weight(
        words_YW=pack_codes(torch.randint(0, 16, (rows, inputs))),
        zeros_YG=torch.randint(0, 16, (rows, groups)).to(torch.uint8),
        scale_YG=(torch.rand(rows, groups) + 0.5).to(scale_dtype),
        num_rows=rows,
    )


def product(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    return CPU.linear(x, CPU.pack_weight(weight), bias)


def test_codes_of_words_are_those_that_were_packed() -> None:
    codes = torch.randint(0, 16, (5, 24))
    weight = Int4Weight(
        words_YW=pack_codes(codes),
        zeros_YG=torch.zeros(5, 1, dtype=torch.uint8),
        scale_YG=torch.ones(5, 1, dtype=torch.float16),
        num_rows=5,
    )
    assert torch.equal(widened(weight), codes.float())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_reference(
    shape: tuple[int, int, int, int],
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    """But for the order of sums in float32, and its rounding to bfloat16."""
    torch.manual_seed(sum(shape))
    num_rows, size_out, size_in, group_size = shape
    weight = drawn(size_out, size_in, group_size, scale_dtype)
    x = torch.randn(num_rows, size_in).to(dtype)
    bias = torch.randn(size_out).to(dtype) if has_bias else None
    ours, expected = product(x, weight, bias), REFERENCE.linear(x, weight, bias)
    assert ours.dtype is dtype and ours.shape == expected.shape
    error = (ours.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight = CPU.pack_weight(drawn(200, 384, 128, torch.float16))
    x = torch.randn(40, 384).to(dtype)
    together = CPU.linear(x, weight, None)
    for row in (0, 7, 39):
        assert torch.equal(CPU.linear(x[row : row + 1], weight, None)[0], together[row])


def test_products_of_codes_are_exact_where_sums_are() -> None:
    """Whole numbers: each code times each zero point and each input comes out as it should."""
    weight = drawn(128, 256, 64, torch.bfloat16)
    weight.scale_YG.fill_(1)
    x = torch.randint(-4, 5, (3, 256)).float()
    expected = x.double() @ widened(weight).double().T
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(product(x.to(dtype), weight, None), expected.to(dtype))


def test_an_empty_batch_is_possible() -> None:
    weight = CPU.pack_weight(drawn(64, 128, 128, torch.float16))
    assert CPU.linear(torch.empty(0, 128), weight, None).shape == (0, 64)
