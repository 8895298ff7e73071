"""Products with codes in groups: two families of kernels of the section `numerics`, and the section
`grouped`.

Legend: T tokens, X features in, Y features out, G groups, W words.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch

from benchmarks.gpu_check_common import Call, Check, Row, median_us, num_sets, rounded, share
from benchmarks.gpu_check_verdicts import judge, poisoned
from configs.quantization import FP8, INT4
from kernels.gpu import grouped
from kernels.interface import GroupedCodes
from kernels.reference.fp8 import to_fp8
from kernels.reference.grouped import INT4_CODES_PER_WORD, ReferenceGrouped

# Of Qwen3-8B: features of each product of a layer, in and out.
_PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
_GROUP_SIZE = 128
# Of `numerics`: features in and out, group. The last is not divided into parts, as no head is.
_SHAPES = (
    *((4096, 1000, 128), (4096, 4096, 32), (1216, 520, 64), (12288, 256, 12288)),
    (256, 1000, 128),
)
_SMALL_SHAPES = ((192, 20, 64), (1024, 20, 128))
_BOTH_WAYS = range(64, 257)  # numbers of rows
_TIMED_ROWS = {FP8: (1, 64, 256), INT4: (1, 16, 64, 128, 256, 2048)}


def grouped_numerics(check: Check, form: str) -> None:
    """Few rows, some, and many; groups of several sizes, two that end within a block."""
    for num_rows in (2, 40, 130) if check.small else (1, 17, 100, 300):
        for size_in, size_out, group in _SMALL_SHAPES if check.small else _SHAPES:
            name = f"{form} {num_rows} x {size_in} to {size_out}, groups of {group}"
            sizes = num_rows, size_in, size_out, group
            check.add(name, partial(_same_product, check, form, *sizes))


def _same_product(
    check: Check, form: str, num_rows: int, size_in: int, size_out: int, group: int
) -> Row:
    weight, bias_Y = drawn(check, form, size_in, size_out, group), check.normal(size_out)
    kernels = check.backends["triton"].quantized[form]
    x_TX = check.normal(num_rows, size_in)
    packed = kernels.pack_weight(weight)
    with poisoned():
        out_TY = kernels.linear(x_TX, packed, bias_Y)
    # One of the result; for many rows weights are rounded too, each way.
    return judge(out_TY, ReferenceGrouped().linear(x_TX.float(), weight, bias_Y.float()), 2)


def drawn(check: Check, form: str, size_in: int, size_out: int, group: int) -> GroupedCodes:
    """Random codes and zero points; values of about the size of a trained matrix."""
    ints = partial(torch.randint, device=check.device)
    groups = size_in // group
    scale_YG = (1 + torch.rand(size_out, groups, device=check.device)) / (8 * size_in**0.5)
    if form == FP8:
        codes_YX = to_fp8(4 * check.normal(size_out, size_in))
        return GroupedCodes(words=codes_YX, zeros=None, scale=scale_YG, num_rows=size_out)
    shape = (size_out, size_in // INT4_CODES_PER_WORD)
    return GroupedCodes(
        words=ints(-(2**31), 2**31 - 1, shape, dtype=torch.int32),
        zeros=ints(4, 12, (size_out, groups), dtype=torch.uint8),
        scale=scale_YG.to(torch.float16),
        num_rows=size_out,
    )


def grouped_speed(check: Check) -> None:
    """Each product of a layer beside the time to read its codes, or to compute it, and beside
    torch's product in the dtype of the check, which reads four or two times the bytes. Of some rows
    it is timed both ways: `share` and `times_plain` are those of the way that `MAX_FUSED_ROWS`
    chooses.
    """
    products, group = (((128, 96),), 64) if check.small else (_PRODUCTS, _GROUP_SIZE)
    for form, numbers_of_rows in _TIMED_ROWS.items():
        for size_in, size_out in products:
            for num_rows in (2, 64) if check.small else numbers_of_rows:
                name = f"{form}: {num_rows} x {size_in} to {size_out}"
                sizes = num_rows, size_in, size_out, group
                check.add(name, partial(_product_row, check, form, *sizes))


def _product_row(
    check: Check, form: str, num_rows: int, size_in: int, size_out: int, group: int
) -> Row:
    weights, numbers = size_in * size_out, num_rows * (size_in + size_out)
    code_bytes = weights // 2 if form == INT4 else weights
    num_bytes = code_bytes + 4 * weights // group + check.dtype.itemsize * numbers
    plain_bytes = check.dtype.itemsize * (weights + numbers)
    floor = check.floor_us(num_bytes, 2 * num_rows * weights)
    sizes = num_rows, size_in, size_out
    ways = {"registers": num_rows} if num_rows < _BOTH_WAYS.stop else {}
    if num_rows >= _BOTH_WAYS.start:
        ways["widened"] = 0
    times = {}
    for way, max_fused_rows in ways.items():
        with mock.patch.object(grouped, "MAX_FUSED_ROWS", max_fused_rows):
            calls = [_packed(check, form, *sizes, group) for _ in range(num_sets(check, num_bytes))]
            times[way] = median_us(check, calls)
    us = times["registers" if num_rows <= grouped.MAX_FUSED_ROWS else "widened"]
    plain = [_plain(check, *sizes) for _ in range(num_sets(check, plain_bytes))]
    plain_us = median_us(check, plain)
    row: Row = {f"{way}_us": rounded(each) for way, each in times.items()}
    row |= {"floor_us": rounded(floor), "plain_us": rounded(plain_us)}
    row["times_plain"] = rounded(plain_us / us, 3)
    return row | share(check, num_bytes, floor, us)


def _packed(
    check: Check, form: str, num_rows: int, size_in: int, size_out: int, group: int
) -> Call:
    kernels = check.backends["triton"].quantized[form]
    weight = kernels.pack_weight(drawn(check, form, size_in, size_out, group))
    return partial(kernels.linear, check.normal(num_rows, size_in), weight, None)


def _plain(check: Check, num_rows: int, size_in: int, size_out: int) -> Call:
    weight_YX = size_in**-0.5 * check.normal(size_out, size_in)
    return partial(
        check.backends["triton"].linear, check.normal(num_rows, size_in), weight_YX, None
    )
