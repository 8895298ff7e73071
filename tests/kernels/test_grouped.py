"""Products with codes in groups, whole numbers of 4 bits and e4m3 numbers: the CPU's kernels beside
the reference, which widens the weight.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.grouped import CpuGrouped
from kernels.interface import GroupedCodes
from kernels.reference.grouped import ReferenceGrouped, dequantize, pack_codes

CPU, REFERENCE = {form: CpuGrouped(form) for form in ("int4", "fp8")}, ReferenceGrouped()
# Rows of x, features out and in, inputs of a group: of one panel and of several, the last one not
# full, groups of one word, longer than a chunk, and as long as the matrix.
SHAPES = [
    (1, 64, 128, 128),
    (1, 200, 384, 32),
    (2, 65, 24, 8),
    (3, 65, 24, 8),
    (4, 100, 256, 128),
    (5, 1, 1024, 1024),
    (17, 130, 288, 96),
    (64, 192, 512, 128),
    (300, 64, 256, 64),
]
KINDS = {
    "int4_float16": ("int4", torch.float16),
    "int4_bfloat16": ("int4", torch.bfloat16),
    "fp8": ("fp8", torch.float32),
}
E4M3_CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def drawn(rows: int, inputs: int, group_size: int, kind: tuple[str, torch.dtype]) -> GroupedCodes:
    """A weight with every code and zero point."""
    (form, scale_dtype), groups = kind, inputs // group_size
    is_e4m3 = form == "fp8"
    codes = torch.randint(0, len(E4M3_CODES) if is_e4m3 else 16, (rows, inputs))
    return GroupedCodes(
        words=E4M3_CODES[codes] if is_e4m3 else pack_codes(codes),
        zeros=None if is_e4m3 else torch.randint(0, 16, (rows, groups)).to(torch.uint8),
        scale=(torch.rand(rows, groups) + 0.5).to(scale_dtype),
        num_rows=rows,
    )


def product(x: Tensor, weight: GroupedCodes, bias: Tensor | None) -> Tensor:
    cpu = CPU["fp8" if weight.zeros is None else "int4"]
    return cpu.linear(x, cpu.pack_weight(weight), bias)


def test_codes_of_words_are_those_that_were_packed() -> None:
    codes = torch.randint(0, 16, (5, 24))
    weight = GroupedCodes(
        words=pack_codes(codes),
        zeros=torch.zeros(5, 1, dtype=torch.uint8),
        scale=torch.ones(5, 1, dtype=torch.float16),
        num_rows=5,
    )
    assert torch.equal(dequantize(weight), codes.float())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_reference(
    shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype, has_bias: bool
) -> None:
    """But for the order of sums in float32, and its rounding to bfloat16."""
    torch.manual_seed(sum(shape))
    num_rows, size_out, size_in, group_size = shape
    weight = drawn(size_out, size_in, group_size, KINDS[kind])
    x = torch.randn(num_rows, size_in).to(dtype)
    bias = torch.randn(size_out).to(dtype) if has_bias else None
    ours, expected = product(x, weight, bias), REFERENCE.linear(x, weight, bias)
    assert ours.dtype is dtype and ours.shape == expected.shape
    error = (ours.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 2**-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    weight = drawn(200, 384, 128, KINDS[kind])
    x = torch.randn(40, 384).to(dtype)
    together = product(x, weight, None)
    for row in (0, 7, 39):
        assert torch.equal(product(x[row : row + 1], weight, None)[0], together[row])


def test_products_of_codes_are_exact_where_sums_are() -> None:
    """Whole numbers: each code times each zero point and each input comes out as it should."""
    weight = drawn(128, 256, 64, KINDS["int4_bfloat16"])
    weight.scale.fill_(1)
    x = torch.randint(-4, 5, (3, 256)).float()
    expected = x.double() @ dequantize(weight).double().T
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(product(x.to(dtype), weight, None), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_every_e4m3_number_is_widened_exactly(dtype: torch.dtype, num_rows: int) -> None:
    """The largest, the smallest, subnormal ones and both zeros, at each place of a word."""
    weight = GroupedCodes(
        words=torch.stack([E4M3_CODES.roll(shift) for shift in range(4)], 1).repeat(1, 2),
        zeros=None,
        scale=torch.ones(len(E4M3_CODES), 2),
        num_rows=len(E4M3_CODES),
    )
    for place in range(8):
        x = torch.zeros(num_rows, 8, dtype=dtype)
        x[:, place] = 1
        numbers = weight.words[:, place].view(torch.float8_e4m3fn)
        expected = numbers.to(dtype).expand(num_rows, -1)
        assert torch.equal(product(x, weight, None), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_possible(kind: str) -> None:
    weight = drawn(64, 128, 128, KINDS[kind])
    assert product(torch.empty(0, 128), weight, None).shape == (0, 64)
