"""Triton's products with codes in groups beside the reference, on a GPU or in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu import grouped
from kernels.gpu.grouped import MAX_FUSED_ROWS, TritonGrouped, choose_split
from kernels.interface import GroupedCodes
from kernels.reference.grouped import ReferenceGrouped, dequantize, pack_codes
from tests.kernels.gpu_device import DEVICE
from tests.kernels.ptx import bits_of, numbers_of, run_ptx
from tests.kernels.test_gpu_elementwise import BFLOAT16, DTYPES, normal
from tests.kernels.test_grouped import E4M3_CODES
from tests.workers.fake_gpu import FakeGpu

OURS, REFERENCE = TritonGrouped(), ReferenceGrouped()
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
FORMS = {"int4": torch.float16, "fp8": torch.float32}  # with the dtype of their scales


def drawn(size_out: int, size_in: int, group_size: int, dtype: torch.dtype) -> GroupedCodes:
    """A weight with every code and zero point, scales of this dtype, and e4m3 codes if that is
    float32.
    """
    draws, groups = torch.Generator().manual_seed(size_in), size_in // group_size
    is_e4m3 = dtype is torch.float32
    codes = torch.randint(0, 254 if is_e4m3 else 16, (size_out, size_in), generator=draws)
    zeros_YG = torch.randint(0, 16, (size_out, groups), generator=draws).to(torch.uint8)
    return GroupedCodes(
        words=(E4M3_CODES[codes] if is_e4m3 else pack_codes(codes)).to(DEVICE),
        zeros=None if is_e4m3 else zeros_YG.to(DEVICE),
        scale=(torch.rand(size_out, groups, generator=draws) + 0.5).to(DEVICE, dtype),
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
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_reference(
    form: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_rows, size_out, size_in, group_size = sizes
    x, bias = normal(num_rows, size_in, dtype=dtype), normal(size_out, seed=1, dtype=dtype)
    weight = drawn(size_out, size_in, group_size, FORMS[form])
    assert_near(product(x, weight, bias), REFERENCE.linear(x, weight, bias))


@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
def test_scales_may_be_bfloat16_and_a_bias_missing(num_rows: int) -> None:
    x, weight = normal(num_rows, 128, dtype=BFLOAT16), drawn(9, 128, 128, torch.bfloat16)
    assert_near(product(x, weight), REFERENCE.linear(x, weight, None))


@pytest.fixture
def exact_cublas() -> Iterator[None]:
    """cuBLAS adds the sums of parts in float32, and not, as it may, in 16 bits."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.mark.parametrize("num_rows", [2, MAX_FUSED_ROWS + 1])
def test_products_of_codes_are_exact_where_sums_are(num_rows: int, exact_cublas: None) -> None:
    """Whole numbers: each code, less each zero point, times each input comes out as it should."""
    weight = drawn(40, 256, 64, torch.bfloat16)
    weight.scale.fill_(1)
    x = torch.randint(-2, 3, (num_rows, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = x.double() @ dequantize(weight).double().T
    assert expected.abs().max() < 2048
    for dtype in DTYPES:
        exact = expected.to(dtype).double()
        assert torch.equal(product(x.to(dtype), weight).double(), exact)


def test_a_matrix_may_be_widened_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_WIDENED_TILE_BYTES", 1)  # so, the fewest features
    weight, x = drawn(300, 64, 32, torch.float16), normal(MAX_FUSED_ROWS + 1, 64)
    bias = normal(300, seed=1)
    assert_near(product(x, weight, bias), REFERENCE.linear(x, weight, bias))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch_of_the_same_tiles(form: str) -> None:
    weight = OURS.pack_weight(drawn(*IN_PARTS[1:], FORMS[form]))
    x = normal(16, IN_PARTS[2], dtype=BFLOAT16)
    together = OURS.linear(x, weight, None)
    for row in (0, 11):
        assert torch.equal(OURS.linear(x[row : row + 1], weight, None)[0], together[row])


def test_parts_have_every_block_once() -> None:
    counts = set()
    for num_panels in (1, 32, 192, 1187):
        for num_blocks in (1, 4, 7, 8, 9, 32, 96):
            blocks_per_part, num_parts = choose_split(num_panels, num_blocks)
            assert (num_parts - 1) * blocks_per_part < num_blocks <= num_parts * blocks_per_part
            counts.add(num_parts)
    assert max(counts) > 8 and choose_split(1, IN_PARTS[2] // 128)[1] > 1


@pytest.mark.parametrize("size_out", [0, 8])
def test_an_empty_batch_is_possible(size_out: int) -> None:
    weight = OURS.pack_weight(drawn(size_out, 128, 128, torch.float16))
    assert OURS.linear(normal(0, 128), weight, None).shape == (0, size_out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a real capture would tell more")
def test_nothing_waits_for_the_device(num_rows: int, form: str) -> None:
    weight, x = OURS.pack_weight(drawn(*IN_PARTS[1:], FORMS[form])), normal(num_rows, IN_PARTS[2])
    FakeGpu().capture(lambda: OURS.linear(x, weight, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
def test_every_e4m3_number_is_widened_exactly(num_rows: int, dtype: torch.dtype) -> None:
    """At each place of a word."""
    weight = GroupedCodes(
        words=torch.stack([E4M3_CODES.roll(place) for place in range(4)], 1)
        .repeat_interleave(32, 1)
        .to(DEVICE),
        zeros=None,
        scale=torch.ones(len(E4M3_CODES), 1, device=DEVICE),
        num_rows=len(E4M3_CODES),
    )
    for place in range(0, 128, 32):
        x = torch.zeros(num_rows, 128, dtype=dtype, device=DEVICE)
        x[:, place] = 1
        numbers = weight.words[:, place].view(torch.float8_e4m3fn)
        assert torch.equal(product(x, weight), numbers.to(dtype).expand(num_rows, -1))


@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
def test_scales_of_e4m3_numbers_keep_every_bit(num_rows: int) -> None:
    """Only those of 4-bit codes share their word with zero points."""
    one = torch.ones(40, 128).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.rand(40, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    weight = GroupedCodes(words=one.to(DEVICE), zeros=None, scale=scale.to(DEVICE), num_rows=40)
    x = torch.zeros(num_rows, 128, device=DEVICE)
    x[:, 70] = 1
    assert torch.equal(product(x, weight), weight.scale.T.expand(num_rows, -1))


@pytest.mark.parametrize(
    ("dtype", "power", "programs"),
    [
        (torch.bfloat16, grouped._BFLOAT16_POWER, grouped._BFLOAT16_DIFFERENCES),
        (torch.float16, grouped._FLOAT16_POWER, grouped._FLOAT16_DIFFERENCES),
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
                offset = -(power.value + zero)
                offsets = bits_of(torch.tensor([offset, offset]).to(dtype))
                result = run_ptx(program, dtype, {"$1": word, "$2": offsets})["$0"]
                assert numbers_of(result, dtype).tolist() == [15 - code - zero, code - zero]


@pytest.mark.parametrize(
    ("dtype", "programs"),
    [(torch.bfloat16, grouped._BFLOAT16_E4M3), (torch.float16, grouped._FLOAT16_E4M3)],
    ids=["bfloat16", "float16"],
)
def test_instructions_for_pairs_give_e4m3_numbers(dtype: torch.dtype, programs: Any) -> None:
    for byte, program in enumerate(programs.value):
        for code, other in zip(E4M3_CODES, E4M3_CODES.roll(1), strict=True):
            first, second = (
                0x5A96_C3E1 & ~(0xFF << 8 * byte) | int(each) << 8 * byte for each in (code, other)
            )
            want = torch.stack([code, other]).view(torch.float8_e4m3fn).to(dtype)
            got = numbers_of(run_ptx(program, dtype, {"$1": first, "$2": second})["$0"], dtype)
            # As bits, because -0 is 0.
            assert torch.equal(got.view(torch.int16), want.view(torch.int16))
