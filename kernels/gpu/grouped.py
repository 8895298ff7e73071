"""Products with weights of codes in groups on a GPU, in Triton. Codes keep their 4 or 8 bits.

Up to `MAX_FUSED_ROWS` rows of x, `_multiply_codes` reads each code once for every tile of rows,
widens it in registers and multiplies there; the matrix units see code - zero or an e4m3 number,
which every dtype holds exactly. Sums of a group of inputs are multiplied by its scale in float32.
Where the output features alone make too few programs, each sums a part of the inputs, and
`_add_parts` adds the parts up in their order: no result depends on which program was first.

Of more rows, products are bound by the matrix units, not by reading: `_widen_codes` writes a tile
of features, rounded to the dtype of x, into memory that the next tile uses again and that mostly
stays in the second-level cache, and torch multiplies it.

A packed weight has blocks of 128 inputs. Word w of a block, of 16 bits for 4-bit codes and of 32
for e4m3 codes, holds those of the inputs w, 32 + w, 64 + w and 96 + w, from the lowest bits on: so
shifting a tile of words gives 32 consecutive inputs of each feature, all in one group, and no
number has to change its place. Scale and zero point of a group are one int32, which is fetched
ahead like the codes (16 bits could not be): the scale in float32, whose last four bits, 0 in every
number of 16 bits, are the zero point; of e4m3 codes, which have none, all bits are the scale's.

Launches depend on shapes alone and nothing waits for the device: CUDA graphs can hold them.
Legend: T tokens, X features in, Y features out, G groups, W words, B blocks, S subblocks of 32
inputs of a block, P parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.interface import GroupedCodes
from kernels.reference.grouped import INT4_CODES_PER_WORD, ReferenceGrouped, int4_device_shifts

# Above it, products in registers cost more than writing the codes once in 16 bits: each program
# reads its rows again, which by the bytes that an H100's second-level cache moves (5.5 TB/s) takes
# the 8B shape's products 5 ms at 128 rows and 10 at 256; writing them takes 3.5, and torch's
# products at least 5. An estimate for 4-bit codes: reading those of FP8 takes 1 ms longer.
MAX_FUSED_ROWS = 128
_BLOCK_INPUTS = 128
_SUBBLOCKS_PER_BLOCK = 4  # of a block: the codes of a word
_SUBBLOCK_INPUTS = _BLOCK_INPUTS // _SUBBLOCKS_PER_BLOCK
# Several on each processor of a chip with up to 144, so that enough bytes are on their way; but
# parts with less to read than what they write are of no use.
_TARGET_PROGRAMS = 512
_MIN_BLOCKS_PER_PART = 4
_FEATURES_PER_PROGRAM = 256  # of one that adds up parts
_FEATURES_PER_WIDENING = 32  # of a program that writes widened codes
_WIDENED_TILE_BYTES = 32 * 2**20  # of a tile: fits the second-level cache of an A100
_ROWS_AT_ONCE = 1024  # output features of a weight that are packed at a time

# How codes become numbers; both ways give the same.
# "pairs": two codes at a time are cut out and completed to bfloat16 or float16 numbers. There are
#     no fast instructions that convert integers, nor e4m3 numbers to bfloat16 (`fp8.py`).
# "singly": without inline assembly: for the interpreter, and for float32.
Widening = Literal["pairs", "singly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Rows of x and output features of a program, its warps, and the stages of its loads."""

    rows: int
    features: int
    num_warps: int
    num_stages: int


def choose_tile_config(num_rows: int, itemsize: int) -> TileConfig:
    """Tiles for so many rows."""
    if itemsize == 4:  # float32 has no matrix instructions that are exact
        return TileConfig(rows=16, features=32, num_warps=4, num_stages=2)
    if num_rows <= 16:
        return TileConfig(rows=16, features=128, num_warps=4, num_stages=4)
    return TileConfig(rows=32, features=128, num_warps=8, num_stages=3)


class TritonGrouped(ReferenceGrouped):
    """`QuantizedKernels` in Triton, for "int4" and "fp8". Each kernel is compiled at its first use,
    in the steps before the first request.
    """

    def pack_weight(self, weight: GroupedCodes, /) -> GroupedCodes:
        """Words [Y, W], int16 or int32, of whole blocks; scales with zero points, int32 [G, Y], of
        groups that `_packed_group_size` gives; no other zero points.
        """
        num_groups, scale_YG = weight.scale.shape[1], weight.scale.to(torch.float32)
        codes_per_word = 1 if weight.zeros is None else INT4_CODES_PER_WORD
        group_size = codes_per_word * weight.words.shape[1] // num_groups
        repeats = 1 if num_groups == 1 else group_size // _packed_group_size(group_size)
        scale_YG = scale_YG.view(torch.int32)
        if weight.zeros is not None:
            scale_YG = scale_YG | weight.zeros
        return GroupedCodes(
            words=_pack_blocks(weight),
            zeros=None,
            scale=scale_YG.repeat_interleave(repeats, 1).T.contiguous(),
            num_rows=weight.num_rows,
        )

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """See `QuantizedKernels`. Of more than `MAX_FUSED_ROWS` rows, and where groups are below 32
        inputs, weights are rounded to the dtype of x.
        """
        x_TX = x_TX.contiguous()
        out_TY = x_TX.new_empty(len(x_TX), weight.num_rows)
        if out_TY.numel() == 0:
            return out_TY
        if (
            len(x_TX) <= MAX_FUSED_ROWS
            and _group_size(weight, x_TX.shape[1]) % _SUBBLOCK_INPUTS == 0
        ):
            _multiply_in_registers(x_TX, weight, bias_Y, out_TY)
        else:
            _multiply_widened(x_TX, weight, bias_Y, out_TY)
        return out_TY


def _packed_group_size(group_size: int) -> int:
    """Whole blocks, or what a block is divided into; scales of larger groups are repeated."""
    return group_size if group_size % _BLOCK_INPUTS == 0 else math.gcd(group_size, _BLOCK_INPUTS)


def _group_size(weight: GroupedCodes, size_in: int) -> int:
    """Of a packed weight. One group has all inputs, those that fill up the last block too."""
    num_groups = len(weight.scale)
    if num_groups == 1:
        num_input_blocks: int = triton.cdiv(size_in, _BLOCK_INPUTS)
        return num_input_blocks * _BLOCK_INPUTS
    return size_in // num_groups


def _pack_blocks(weight: GroupedCodes) -> Tensor:
    """The words [Y, W] of a weight that is not packed; the last block is filled with zeros."""
    words_YW, is_e4m3 = weight.words, weight.zeros is None
    size_in = words_YW.shape[1] * (1 if is_e4m3 else INT4_CODES_PER_WORD)
    num_input_blocks = triton.cdiv(size_in, _BLOCK_INPUTS)
    dtype, bits_per_code = (torch.int32, 8) if is_e4m3 else (torch.int16, 4)
    packed_YW = words_YW.new_empty(len(words_YW), num_input_blocks * _SUBBLOCK_INPUTS, dtype=dtype)
    shifts = int4_device_shifts(words_YW.device)
    for first_row in range(0, len(words_YW), _ROWS_AT_ONCE):
        rows = slice(first_row, first_row + _ROWS_AT_ONCE)
        if is_e4m3:
            codes_YX = words_YW[rows].to(torch.int32)
        else:
            codes_YX = ((words_YW[rows].unsqueeze(2) >> shifts) & 15).flatten(1)
        codes_YX = functional.pad(codes_YX, (0, num_input_blocks * _BLOCK_INPUTS - size_in))
        codes_YBSW = codes_YX.unflatten(
            1, (num_input_blocks, _SUBBLOCKS_PER_BLOCK, _SUBBLOCK_INPUTS)
        )
        words_YBW = codes_YBSW[:, :, 0].clone()
        for subblock in range(1, _SUBBLOCKS_PER_BLOCK):
            words_YBW |= codes_YBSW[:, :, subblock] << bits_per_code * subblock
        packed_YW[rows] = words_YBW.flatten(1).to(dtype)
    return packed_YW


def choose_widening(device: torch.device, dtype: torch.dtype) -> Widening:
    """The way that suits a device and the dtype of x."""
    return "pairs" if device.type == "cuda" and dtype.itemsize == 2 else "singly"


def _multiply_in_registers(
    x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, out_TY: Tensor
) -> None:
    (num_rows, size_out), size_in = out_TY.shape, x_TX.shape[1]
    tile_config = choose_tile_config(num_rows, x_TX.itemsize)
    num_panels = triton.cdiv(size_out, tile_config.features)
    num_input_blocks = triton.cdiv(size_in, _BLOCK_INPUTS)
    blocks_per_part, num_parts = choose_split(num_panels, num_input_blocks)
    group_size = _group_size(weight, size_in)
    sums_PTY = out_TY
    if num_parts > 1:
        sums_PTY = out_TY.new_empty(num_parts, num_rows, size_out, dtype=torch.float32)
    _multiply_codes[(triton.cdiv(num_rows, tile_config.rows) * num_panels * num_parts,)](
        *(x_TX, weight.words, weight.scale),
        bias_Y if num_parts == 1 else None,
        sums_PTY,
        *(num_rows, size_in, size_out, num_input_blocks, blocks_per_part),
        max(1, group_size // _BLOCK_INPUTS),
        GROUPS_PER_BLOCK=max(1, _BLOCK_INPUTS // group_size),
        HAS_WHOLE_BLOCKS=size_in % _BLOCK_INPUTS == 0,
        ROWS=tile_config.rows,
        FEATURES=tile_config.features,
        WIDENING=choose_widening(x_TX.device, x_TX.dtype),
        num_warps=tile_config.num_warps,
        num_stages=tile_config.num_stages,
    )
    if num_parts > 1:
        _add_parts[(num_rows * triton.cdiv(size_out, _FEATURES_PER_PROGRAM),)](
            *(sums_PTY, bias_Y, out_TY, num_rows, size_out, num_parts),
            FEATURES=_FEATURES_PER_PROGRAM,
            num_warps=2,
        )


def choose_split(num_panels: int, num_input_blocks: int) -> tuple[int, int]:
    """(blocks of a part, parts): those of a weight are the same for every number of rows that has
    the same tiles, so a row's results do not depend on the others.
    """
    num_parts = max(
        1, min(num_input_blocks // _MIN_BLOCKS_PER_PART, _TARGET_PROGRAMS // num_panels)
    )
    blocks_per_part = triton.cdiv(num_input_blocks, num_parts)
    return blocks_per_part, triton.cdiv(num_input_blocks, blocks_per_part)


def _multiply_widened(
    x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, out_TY: Tensor
) -> None:
    size_out, size_in = out_TY.shape[1], x_TX.shape[1]
    tile_features = (
        max(1, _WIDENED_TILE_BYTES // (size_in * x_TX.itemsize * _BLOCK_INPUTS)) * _BLOCK_INPUTS
    )
    tile_YX = x_TX.new_empty(min(tile_features, size_out), size_in)
    group_size, num_input_blocks = _group_size(weight, size_in), triton.cdiv(size_in, _BLOCK_INPUTS)
    for first_feature in range(0, size_out, tile_features):
        features = slice(first_feature, min(first_feature + tile_features, size_out))
        num_features = features.stop - first_feature
        _widen_codes[(triton.cdiv(num_features, _FEATURES_PER_WIDENING) * num_input_blocks,)](
            *(weight.words, weight.scale, tile_YX),
            *(first_feature, num_features, size_in, size_out, num_input_blocks),
            GROUP_SIZE=min(group_size, _BLOCK_INPUTS),
            BLOCKS_PER_GROUP=max(1, group_size // _BLOCK_INPUTS),
            FEATURES=_FEATURES_PER_WIDENING,
        )
        weight_XY = tile_YX[:num_features].T
        if bias_Y is None:
            torch.mm(x_TX, weight_XY, out=out_TY[:, features])
        else:
            torch.addmm(bias_Y[features], x_TX, weight_XY, out=out_TY[:, features])


def _difference_pairs(type_: str, shift: int, base: int, one: int) -> str:
    """PTX that widens a 4-bit code of each half of $1 to a number in the same half of $0: with the
    bits of a power of two above it, the code is the end of the mantissa of power + code; $2 holds
    -(power + zero). The product with 1 is there because bfloat16 has no sum alone before compute
    capability 9.0. All of these numbers are whole and exact.
    """
    lines = [
        ".reg .b32 codes, base, one;",
        f"mov.b32 base, 0x{base:04X}{base:04X};",
        f"mov.b32 one, 0x{one:04X}{one:04X};",
        f"shr.u32 codes, $1, {shift};",
        "lop3.b32 codes, codes, 0x000F000F, base, 0xEA;",
        f"fma.rn.{type_} $0, codes, one, $2;",
    ]
    return "\n".join(("{", *lines, "}"))


def _e4m3_pairs(type_: str, byte: int, shift: int, mask: int, scale: int) -> str:
    """PTX that widens an e4m3 code of $1 and one of $2, the same byte of both, to the halves of $0,
    as the cache's (`_pair_widening_ptx` in `fp8.py`): sign, exponent and mantissa are moved into
    place, and a product with a power of two, which is exact, corrects the exponent's bias.
    """
    selector = byte | (8 + byte) << 4 | (4 + byte) << 8 | (12 + byte) << 12  # 8: the byte's sign
    lines = [
        ".reg .b32 codes, scale, zero;",
        f"mov.b32 scale, 0x{scale:04X}{scale:04X};",
        "mov.b32 zero, 0x80008000;",
        f"prmt.b32 codes, $1, $2, 0x{selector:04X};",
        f"shl.b32 codes, codes, {shift};",
        f"and.b32 codes, codes, 0x{mask:04X}{mask:04X};",
        f"fma.rn.{type_} $0, codes, scale, zero;",
    ]
    return "\n".join(("{", *lines, "}"))


def _of_subblocks(ptx: Callable[[int], str]) -> tl.constexpr:
    return tl.constexpr(tuple(map(ptx, range(_SUBBLOCKS_PER_BLOCK))))


# The smallest power of two whose unit in the last place is 1.
_BFLOAT16_POWER, _FLOAT16_POWER = tl.constexpr(128), tl.constexpr(1024)
_BFLOAT16_DIFFERENCES = _of_subblocks(
    lambda i: _difference_pairs("bf16x2", 4 * i, base=0x4300, one=0x3F80)
)
_FLOAT16_DIFFERENCES = _of_subblocks(
    lambda i: _difference_pairs("f16x2", 4 * i, base=0x6400, one=0x3C00)
)
_BFLOAT16_E4M3 = _of_subblocks(lambda i: _e4m3_pairs("bf16x2", i, 4, mask=0x87F0, scale=0x7B80))
_FLOAT16_E4M3 = _of_subblocks(lambda i: _e4m3_pairs("f16x2", i, 7, mask=0xBF80, scale=0x5C00))


@triton.jit
def _scale_and_zero(words, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """(scales, float32; zero points, int32)"""
    if IS_E4M3:
        scale, zeros = words.to(tl.float32, bitcast=True), tl.zeros_like(words)
    else:
        scale, zeros = (words & -16).to(tl.float32, bitcast=True), words & 15
    return scale, zeros


@triton.jit
def _widen_singly(words, zeros, SUBBLOCK_INDEX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of one subblock, float32. zeros: broadcast to the words."""
    if words.dtype == tl.int32:
        code = (words >> 8 * SUBBLOCK_INDEX) & 0xFF
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.uint16)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        numbers = (((words.to(tl.int32) >> 4 * SUBBLOCK_INDEX) & 15) - zeros).to(tl.float32)
    return numbers


@triton.jit
def _widen_subblock(  # type: ignore[no-untyped-def]
    words, zeros, SUBBLOCK_INDEX: tl.constexpr, dtype: tl.constexpr, WIDENING: tl.constexpr
):
    """What the codes of one subblock stand for but for the scale, [features, 32], exactly; zeros
    are int32, [features].
    """
    if WIDENING == "singly":
        numbers = _widen_singly(words, zeros[:, None], SUBBLOCK_INDEX).to(dtype)
    else:
        # The bits of either dtype: an instruction's result has a dtype that is no parameter.
        IS_BFLOAT16: tl.constexpr = dtype == tl.bfloat16
        if words.dtype == tl.int32:
            bits = tl.inline_asm_elementwise(
                _BFLOAT16_E4M3[SUBBLOCK_INDEX] if IS_BFLOAT16 else _FLOAT16_E4M3[SUBBLOCK_INDEX],
                "=r,r,r",
                [words],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
        else:
            power = _BFLOAT16_POWER if IS_BFLOAT16 else _FLOAT16_POWER
            bits = tl.inline_asm_elementwise(
                _BFLOAT16_DIFFERENCES[SUBBLOCK_INDEX]
                if IS_BFLOAT16
                else _FLOAT16_DIFFERENCES[SUBBLOCK_INDEX],
                "=r,r,r",
                [words, (-(zeros + power)).to(dtype)[:, None]],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
        numbers = bits.to(dtype, bitcast=True)
    return numbers


@triton.jit(
    do_not_specialize=["num_rows", "num_input_blocks", "blocks_per_part", "blocks_per_group"]
)
def _multiply_codes(  # type: ignore[no-untyped-def]
    x_TX,
    words_YW,
    scale_and_zero_GY,
    bias_Y,
    out_PTY,
    num_rows,
    size_in,
    size_out,
    num_input_blocks,
    blocks_per_part,
    blocks_per_group,
    GROUPS_PER_BLOCK: tl.constexpr,
    HAS_WHOLE_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDENING: tl.constexpr,
):
    """One tile of rows by `FEATURES` output features, over the inputs of one part. A block has
    `GROUPS_PER_BLOCK` groups, or is one of `blocks_per_group`.
    """
    num_row_tiles, num_panels = tl.cdiv(num_rows, ROWS), tl.cdiv(size_out, FEATURES)
    row = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    panel = tl.program_id(0) // num_row_tiles % num_panels
    part = tl.program_id(0) // num_row_tiles // num_panels
    y, i = panel * FEATURES + tl.arange(0, FEATURES), tl.arange(0, 32)
    is_row, is_feature = row < num_rows, y < size_out
    words_YW += y.to(tl.int64)[:, None] * (num_input_blocks * 32) + i[None, :]
    x_TX += row[None, :] * size_in + i[:, None]
    dtype: tl.constexpr = x_TX.dtype.element_ty
    IS_E4M3: tl.constexpr = words_YW.dtype.element_ty == tl.int32
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    first_block = part * blocks_per_part
    for block in range(first_block, min(first_block + blocks_per_part, num_input_blocks)):
        words = tl.load(words_YW + block * 32, mask=is_feature[:, None], other=0)
        for subblock in tl.static_range(4):
            start = block * 128 + subblock * 32
            if subblock % (4 // GROUPS_PER_BLOCK) == 0:
                # Behind the last input there is no group.
                place = (
                    block // blocks_per_group * GROUPS_PER_BLOCK + subblock * GROUPS_PER_BLOCK // 4
                ) * size_out + y
                is_group = is_feature & (HAS_WHOLE_BLOCKS | (start < size_in))
                scale, zeros = _scale_and_zero(
                    tl.load(scale_and_zero_GY + place, mask=is_group, other=0), IS_E4M3
                )
                product = tl.zeros([FEATURES, ROWS], tl.float32)
            mask = is_row[None, :] & (HAS_WHOLE_BLOCKS | (start + i < size_in)[:, None])
            x = tl.load(x_TX + start, mask=mask, other=0.0)
            numbers = _widen_subblock(words, zeros, subblock, dtype, WIDENING)
            product = tl.dot(numbers, x, product, input_precision="ieee")
            if (subblock + 1) % (4 // GROUPS_PER_BLOCK) == 0:
                total += product * scale[:, None]
    if bias_Y is not None:
        total += tl.load(bias_Y + y, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    out_PTY += (part * num_rows + row)[None, :] * size_out + y[:, None]
    tl.store(out_PTY, total, mask=is_row[None, :] & is_feature[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _add_parts(  # type: ignore[no-untyped-def]
    sums_PTY, bias_Y, out_TY, num_rows, size_out, num_parts, FEATURES: tl.constexpr
):
    row = tl.program_id(0) // tl.cdiv(size_out, FEATURES)
    y = tl.program_id(0) % tl.cdiv(size_out, FEATURES) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros([FEATURES], tl.float32)
    for part in range(num_parts):
        place = (part * num_rows + row) * size_out + y
        total += tl.load(sums_PTY + place, mask=y < size_out, other=0.0)
    if bias_Y is not None:
        total += tl.load(bias_Y + y, mask=y < size_out, other=0.0).to(tl.float32)
    tl.store(out_TY + row * size_out + y, total, mask=y < size_out)


@triton.jit(do_not_specialize=["first_feature", "num_features", "num_input_blocks"])
def _widen_codes(  # type: ignore[no-untyped-def]
    words_YW,
    scale_and_zero_GY,
    out_YX,
    first_feature,
    num_features,
    size_in,
    size_out,
    num_input_blocks,
    GROUP_SIZE: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """A block of inputs of `FEATURES` features, from feature `first_feature` on. Groups have
    `GROUP_SIZE` inputs of a block, or `BLOCKS_PER_GROUP` blocks.
    """
    block = tl.program_id(0) % num_input_blocks
    feature = tl.program_id(0) // num_input_blocks * FEATURES + tl.arange(0, FEATURES)[:, None]
    i = tl.arange(0, 32)[None, :]
    y, is_feature = first_feature + feature, feature < num_features
    IS_E4M3: tl.constexpr = words_YW.dtype.element_ty == tl.int32
    words = tl.load(
        words_YW + (y.to(tl.int64) * num_input_blocks + block) * 32 + i, mask=is_feature, other=0
    )
    for subblock in tl.static_range(4):
        x = subblock * 32 + i
        mask = is_feature & (block * 128 + x < size_in)
        place = (block // BLOCKS_PER_GROUP * (128 // GROUP_SIZE) + x // GROUP_SIZE) * size_out + y
        scale, zeros = _scale_and_zero(
            tl.load(scale_and_zero_GY + place, mask=mask, other=0), IS_E4M3
        )
        values = _widen_singly(words, zeros, subblock) * scale
        tl.store(out_YX + feature * size_in + block * 128 + x, values, mask=mask)
