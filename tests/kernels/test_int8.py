"""8-bit products on a CPU: the same bits as the definition, few rows and many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu import int8
from kernels.cpu.capabilities import has_int8
from kernels.cpu.int8 import CpuInt8
from kernels.cpu.packed import max_few_rows, packed_address
from kernels.cpu.tile import has_dot_products
from kernels.interface import GroupedCodes
from kernels.reference.int8 import ReferenceInt8, quantize_rows

pytestmark = [
    pytest.mark.skipif(not has_int8(), reason="no dot products of 8-bit numbers here"),
    pytest.mark.usefixtures("two_threads"),
]
SHAPES = [(64, 64), (128, 1024), (100, 72), (130, 96), (1, 4), (608, 130), (64, 3072), (3, 1)]
OURS, DEFINITION = CpuInt8(), ReferenceInt8()


def weight_of(size_out: int, size_in: int) -> GroupedCodes:
    values = torch.randn(size_out, size_in, generator=torch.Generator().manual_seed(1))
    return codes_of(*quantize_rows(values))


def codes_of(codes_YX: Tensor, scale_Y: Tensor) -> GroupedCodes:
    return GroupedCodes(words=codes_YX, zeros=None, scale=scale_Y[:, None], num_rows=len(scale_Y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weight_of(*shape)
    packed, generator = OURS.pack_weight(weight), torch.Generator().manual_seed(2)
    if has_dot_products() and shape[1] % 4 == 0:
        assert packed.address is not None
    most = max_few_rows(shape[1], shape[0])
    for rows in (*range(1, 10), most, most + 1, 100):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        for bias in (None, torch.randn(shape[0], generator=generator).to(dtype)):
            assert torch.equal(OURS.linear(x, packed, bias), DEFINITION.linear(x, weight, bias))


def test_few_rows_and_many_are_different_code_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = OURS.pack_weight(weight_of(192, 320))
    if packed.address is None:
        pytest.skip("products of few rows are oneDNN's on this processor")
    x = torch.randn(max_few_rows(320, 192), 320).bfloat16()
    few = OURS.linear(x, packed, None)
    monkeypatch.setattr(int8, "max_few_rows", lambda *_: 0)
    monkeypatch.setattr(int8, "_multiply_few_rows", None)
    assert torch.equal(OURS.linear(x, packed, None), few)


def test_rows_of_zeros_and_of_tiny_numbers_are_zero() -> None:
    packed = OURS.pack_weight(weight_of(64, 64))
    x = torch.zeros(3, 64)
    x[1, 5], x[2] = 1e-31, 1e-42
    for rows in (x, x.repeat(max_few_rows(64, 64), 1)):
        assert not OURS.linear(rows, packed, None).any()


def test_extreme_codes_do_not_saturate() -> None:
    """Every product at its largest: with 16-bit sums, as on processors without the instruction, it
    would overflow.
    """
    codes = torch.full((64, 4096), -127, dtype=torch.int8)
    packed = OURS.pack_weight(codes_of(codes, torch.ones(64)))
    for rows in (1, max_few_rows(4096, 64) + 1):
        for sign in (1.0, -1.0):
            out = OURS.linear(torch.full((rows, 4096), 127 * sign), packed, None)
            assert (out == -127.0 * 127 * sign * 4096).all()


def test_another_layout_is_left_to_onednn() -> None:
    """A later oneDNN, or one for another processor, may pack differently."""
    weight = weight_of(128, 64)
    other = torch.ops.onednn.qlinear_prepack(weight.words.flip(0).contiguous(), None)
    assert packed_address(weight.words, other) is None


def test_codes_of_a_part_with_the_largest_of_the_whole() -> None:
    values = torch.randn(5, 64)
    codes, scale = quantize_rows(values)
    part, same_scale = quantize_rows(values[:, 16:32], values.abs().amax(dim=1))
    assert torch.equal(part, codes[:, 16:32]) and torch.equal(same_scale, scale)
    assert codes.abs().amax() == 127
    assert (codes * scale.unsqueeze(1) - values).abs().max() <= scale.max() / 2 * 1.001
