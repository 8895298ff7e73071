"""Triton's products with 4-bit codes against the reference, on a GPU or in the interpreter."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu import int4
from kernels.gpu.int4 import MAX_FUSED_ROWS, TritonInt4, split_of
from kernels.interface import GroupedCodes
from kernels.reference.grouped import ReferenceGrouped, pack_codes, widened
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_gpu_elementwise import BFLOAT16, DTYPES, normal
from tests.workers.fake_gpu import FakeGpu

OURS, REFERENCE = TritonInt4(), ReferenceGrouped()
# Rows of x, features out and in, inputs of a group.
IN_PARTS = (2, 20, 1152, 128)
SIZES = [
    (1, 130, 256, 128),
    IN_PARTS,
    (16, 33, 256, 32),
    (3, 130, 512, 256),
    (18, 40, 192, 64),  # a block that is not full, and larger tiles
    (5, 20, 152, 152),  # one group, of all inputs
    (2, 10, 192, 96),  # groups that are divided
    (2, 35, 48, 16),  # groups that are too small for registers
    (MAX_FUSED_ROWS + 1, 70, 512, 256),
]


def drawn(size_out: int, size_in: int, group_size: int, dtype: torch.dtype) -> GroupedCodes:
    """A weight with every code and zero point, scales of this dtype."""
    draws, groups = torch.Generator().manual_seed(size_in), size_in // group_size
    zeros_YG = torch.randint(0, 16, (size_out, groups), generator=draws).to(torch.uint8)
    return GroupedCodes(
        words_YW=pack_codes(torch.randint(0, 16, (size_out, size_in), generator=draws)).to(DEVICE),
        zeros_YG=zeros_YG.to(DEVICE),
        scale_YG=(torch.rand(size_out, groups, generator=draws) + 0.5).to(DEVICE, dtype),
        num_rows=size_out,
    )


def product(x: Tensor, weight: GroupedCodes, bias: Tensor | None = None) -> Tensor:
    return OURS.linear(x, OURS.pack_weight(weight), bias)


def assert_near(got: Tensor, want: Tensor) -> None:
    """But for the order of sums in float32, the rounding of the result, and that of weights."""
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}[want.dtype]
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_those_of_the_reference(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_rows, size_out, size_in, group_size = sizes
    x, bias = normal(num_rows, size_in, dtype=dtype), normal(size_out, seed=1, dtype=dtype)
    weight = drawn(size_out, size_in, group_size, torch.float16)
    assert_near(product(x, weight, bias), REFERENCE.linear(x, weight, bias))


@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
def test_scales_may_be_bfloat16_and_a_bias_missing(num_rows: int) -> None:
    x, weight = normal(num_rows, 128, dtype=BFLOAT16), drawn(9, 128, 128, torch.bfloat16)
    assert_near(product(x, weight), REFERENCE.linear(x, weight, None))


@pytest.mark.parametrize("num_rows", [2, MAX_FUSED_ROWS + 1])
def test_products_of_codes_are_exact_where_sums_are(num_rows: int) -> None:
    """Whole numbers: each code, less each zero point, times each input comes out as it should."""
    weight = drawn(40, 256, 64, torch.bfloat16)
    weight.scale_YG.fill_(1)
    x = torch.randint(-2, 3, (num_rows, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = x.double() @ widened(weight).double().T
    assert expected.abs().max() < 2048
    for dtype in DTYPES:
        exact = expected.to(dtype).double()
        assert torch.equal(product(x.to(dtype), weight).double(), exact)


def test_a_matrix_may_be_widened_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "_WIDENED_BYTES", 1)  # so, the fewest features
    weight, x = drawn(300, 64, 32, torch.float16), normal(MAX_FUSED_ROWS + 1, 64)
    bias = normal(300, seed=1)
    assert_near(product(x, weight, bias), REFERENCE.linear(x, weight, bias))


def test_a_row_has_the_same_bits_in_any_batch_of_the_same_tiles() -> None:
    weight = OURS.pack_weight(drawn(*IN_PARTS[1:], torch.float16))
    x = normal(16, IN_PARTS[2], dtype=BFLOAT16)
    together = OURS.linear(x, weight, None)
    for row in (0, 11):
        assert torch.equal(OURS.linear(x[row : row + 1], weight, None)[0], together[row])


def test_parts_have_every_block_once() -> None:
    counts = set()
    for num_panels in (1, 32, 192, 1187):
        for num_blocks in (1, 4, 7, 8, 9, 32, 96):
            blocks_per_part, num_parts = split_of(num_panels, num_blocks)
            assert (num_parts - 1) * blocks_per_part < num_blocks <= num_parts * blocks_per_part
            counts.add(num_parts)
    assert max(counts) > 8 and split_of(1, IN_PARTS[2] // 128)[1] > 1


@pytest.mark.parametrize("size_out", [0, 8])
def test_an_empty_batch_is_possible(size_out: int) -> None:
    weight = OURS.pack_weight(drawn(size_out, 128, 128, torch.float16))
    assert OURS.linear(normal(0, 128), weight, None).shape == (0, size_out)


@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a real capture would tell more")
def test_nothing_waits_for_the_device(num_rows: int) -> None:
    weight, x = OURS.pack_weight(drawn(*IN_PARTS[1:], torch.float16)), normal(num_rows, IN_PARTS[2])
    FakeGpu().capture(lambda: OURS.linear(x, weight, None))


@pytest.mark.parametrize(
    ("dtype", "power", "programs"),
    [
        (torch.bfloat16, int4._BFLOAT16_POWER, int4._BFLOAT16_PAIRS),
        (torch.float16, int4._FLOAT16_POWER, int4._FLOAT16_PAIRS),
    ],
    ids=["bfloat16", "float16"],
)
def test_instructions_for_pairs_give_code_less_zero_point(
    dtype: torch.dtype, power: Any, programs: Any
) -> None:
    """Instructions that the interpreter does not have, by what the PTX ISA says of them."""
    for place, program in enumerate(programs.value):
        for code in range(16):
            for zero in range(16):
                word = 0x5A96_C3E1 & ~(0xF000F << 4 * place) | (code << 16 | 15 - code) << 4 * place
                low, high = run_ptx(program, dtype, word, -(power.value + zero))
                assert (low, high) == (15 - code - zero, code - zero)


def run_ptx(program: str, dtype: torch.dtype, word: int, offset: int) -> tuple[float, float]:
    """The halves of $0, with `word` in $1 and `offset` in both halves of $2."""
    registers = {"$1": word, "$2": bits_of(torch.tensor([offset, offset]).to(dtype))}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for name, operands in re.findall(r"^([a-z]\S+) (.*);$", program, re.MULTILINE):
        target, *sources = operands.split(", ")
        numbers = [value(source) for source in sources]
        if name == "mov.b32":
            registers[target] = numbers[0]
        elif name == "shr.u32":
            registers[target] = numbers[0] >> numbers[1]
        elif name == "lop3.b32":
            a, b, c, table = numbers
            registers[target] = sum(
                (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit
                for bit in range(32)
            )
        else:
            assert name == {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}[dtype]
            x, y, z = (numbers_of(bits, dtype).double() for bits in numbers)
            registers[target] = bits_of((x * y + z).to(dtype))
    low, high = numbers_of(registers["$0"], dtype).tolist()
    return low, high


def numbers_of(bits: int, dtype: torch.dtype) -> Tensor:
    """The two numbers of 16 bits, the lower half first."""
    return torch.tensor([bits], dtype=torch.uint32).view(dtype)


def bits_of(numbers: Tensor) -> int:
    return int(numbers.view(torch.uint32).item())
