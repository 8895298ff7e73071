"""Products with weights of codes in groups on a CPU: codes are widened in the first-level cache,
some inputs at a time, and multiplied there by the tile kernel that all products share.

A weight is panels of 64 output features (`codes.py`). Sums are taken per group of inputs, in
order, then multiplied by the group's scale and added up, so a row's results do not depend on the
other rows or on the number of threads. Where the processor has dot products of bfloat16 and the
input is bfloat16, numbers are multiplied in that; the sums are always float32.

Legend: T tokens, X features in, Y features out, G groups, W words of several inputs, N panels,
P output features of a panel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from kernels.cpu.codes import (
    E4M3_SHIFTS,
    E4M3_UNIT,
    MAX_FUSED_ROWS,
    PANEL_FEATURES,
    multiply_codes,
    widen_codes,
)
from kernels.cpu.jit import Array, as_array, exact_entry_jit, exact_jit, fast_jit, narrow, widen
from kernels.cpu.panel import CACHED_ROWS
from kernels.cpu.parallel import parallel_for
from kernels.cpu.recording import contiguous, empty, keep, refuse_recording
from kernels.cpu.tile import STEP_BYTES, add_64_columns, has_dot_products
from kernels.interface import GroupedCodes
from kernels.reference.grouped import INT4_CODES_PER_WORD, MIDDLE_INT4_CODE

_CHUNK_BYTES = 16384  # of widened weights: half a first-level cache
_ALIGNMENT_BYTES = 64
_HAS_DOT_PRODUCTS = has_dot_products()
_NO_BIAS = torch.empty(0)
_NO_ZEROS = torch.empty(0, 0, 0, dtype=torch.uint8)


class CpuGrouped:
    """`QuantizedKernels` in numba. form: "int4" or "fp8"."""

    def __init__(self, form: str) -> None:
        self._is_e4m3 = form == "fp8"

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """A product, for scales of each kind."""
        scale_dtypes = (torch.float32,) if self._is_e4m3 else (torch.float16, torch.bfloat16)
        return [partial(self._run_dummy_product, dtype, each) for each in scale_dtypes]

    def _run_dummy_product(self, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
        words, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.uint8)
        weight = GroupedCodes(
            words=words.view(torch.uint8) if self._is_e4m3 else words,
            zeros=None if self._is_e4m3 else zero,
            scale=torch.zeros(1, 1, dtype=scale_dtype),
            num_rows=1,
        )
        x = torch.zeros(1, len(E4M3_SHIFTS) if self._is_e4m3 else INT4_CODES_PER_WORD, dtype=dtype)
        self.linear(x, self.pack_weight(weight), None)

    def pack_weight(self, weight: GroupedCodes, /) -> GroupedCodes:
        """The weight in panels: int32 words [N, W, P], zero points and scales [N, G, P]."""
        words_NWP = _pack_panels(weight.words.view(torch.int32))
        scale_NGP = _pack_panels(weight.scale)
        if self._is_e4m3:
            scale_NGP *= E4M3_UNIT
            for bytes_WP4 in words_NWP.view(torch.uint8).unflatten(2, (PANEL_FEATURES, -1)):
                bytes_WP4[:, :, 1:3] = bytes_WP4[:, :, 1:3].flip(2)  # see `E4M3_SHIFTS`
        return GroupedCodes(
            words=words_NWP,
            zeros=None if weight.zeros is None else _pack_panels(weight.zeros),
            scale=scale_NGP,
            num_rows=weight.num_rows,
        )

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """See `QuantizedKernels`."""
        out_TY = empty((len(x_TX), weight.num_rows), x_TX.dtype)
        if not _HAS_DOT_PRODUCTS and x_TX.dtype is not torch.float32:
            refuse_recording()
            x_TX = x_TX.to(torch.float32)
        words_NWP, zeros_NGP, scale_NGP = weight.words, weight.zeros, weight.scale
        is_half = scale_NGP.dtype is torch.float16
        packed_arrays = (
            as_array(words_NWP.view(torch.uint32) if self._is_e4m3 else words_NWP),
            as_array(_NO_ZEROS if zeros_NGP is None else zeros_NGP),
            as_array(scale_NGP.view(torch.int16) if is_half else scale_NGP),
        )
        x, out = as_array(contiguous(x_TX)), as_array(out_TY)
        input_sums = keep(np.zeros((len(x), scale_NGP.shape[1]), np.float32))
        bias = keep(as_array(_NO_BIAS if bias_Y is None else bias_Y.to(torch.float32)))
        for first_row in range(0, len(x), CACHED_ROWS):
            rows = slice(first_row, first_row + CACHED_ROWS)
            _linear(x[rows], input_sums[rows], packed_arrays, bias, out[rows])
        return out_TY


def _pack_panels(tensor_YA: Tensor) -> Tensor:
    """[Y, A] as [N, A, P]; the last panel is filled with zeros."""
    num_rows, num_columns = tensor_YA.shape
    num_panels = -(-num_rows // PANEL_FEATURES)
    panels_NAP = torch.zeros(num_panels, num_columns, PANEL_FEATURES, dtype=tensor_YA.dtype)
    for panel in range(num_panels):
        part = tensor_YA[panel * PANEL_FEATURES : (panel + 1) * PANEL_FEATURES]
        panels_NAP[panel, :, : len(part)] = part.T
    return panels_NAP


@intrinsic
def _scale_of_bits(typing_context: object, bits: object) -> object:
    """float32 of the bits of a float16, an int16, or of a bfloat16, a uint16, or of itself."""

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, args: list[object]
    ) -> object:
        if bits == types.float32:
            return args[0]
        if bits == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        word = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(bits), generate


@exact_jit
def _multiply_panel(
    panel: int,
    x_TX: Array,
    input_sums_TG: Array,
    weight: tuple[Array, Array, Array],
    bias_Y: Array,
    out_TY: Array,
) -> None:
    """One panel of output features of a product."""
    words_NWP, zeros_NGP, scale_NGP = weight
    num_rows, size_in = x_TX.shape
    num_groups = scale_NGP.shape[1]
    group_size, codes_per_word = size_in // num_groups, size_in // words_NWP.shape[1]
    sums = np.zeros(num_rows * PANEL_FEATURES + _ALIGNMENT_BYTES, np.float32)
    first_sum_index = -sums.ctypes.data // 4 % (_ALIGNMENT_BYTES // 4)
    sums_address = sums.ctypes.data + 4 * first_sum_index
    totals = np.zeros_like(sums)  # of all groups; laid out as the sums of one, though not aligned
    scale_P = np.empty(PANEL_FEATURES, np.float32)
    # Zero points of the numbers, which are codes less `MIDDLE_INT4_CODE`.
    zeros_P = np.zeros(PANEL_FEATURES, np.float32)
    buffer = np.empty(_CHUNK_BYTES + _ALIGNMENT_BYTES, np.uint8)
    words_address = words_NWP.ctypes.data + panel * words_NWP.strides[0]
    for group in range(num_groups):
        x = x_TX.ctypes.data + group * group_size * x_TX.itemsize, x_TX.strides[0], x_TX[0, 0]
        words = words_address, words_NWP[0, 0, 0]
        num_word_rows = group_size // codes_per_word
        if num_rows <= MAX_FUSED_ROWS:
            multiply_codes(num_rows, x, words, num_word_rows, sums_address)
        else:
            for i in range(len(sums)):
                sums[i] = 0
            sizes = num_rows, num_word_rows, codes_per_word * x_TX.itemsize // STEP_BYTES
            _add_group_product(sizes, x, words, sums_address, buffer)
        words_address += num_word_rows * PANEL_FEATURES * words_NWP.itemsize
        scale_bits_P = scale_NGP[panel, group]
        for p in range(np.uint64(PANEL_FEATURES)):
            scale_P[p] = _scale_of_bits(scale_bits_P[p])
        if len(zeros_NGP):
            zero_codes_P = zeros_NGP[panel, group]
            for p in range(np.uint64(PANEL_FEATURES)):
                zeros_P[p] = np.float32(np.int32(zero_codes_P[p]) - np.int32(MIDDLE_INT4_CODE))
        _add_scaled_sums(
            num_rows, group, sums, totals, first_sum_index, input_sums_TG, zeros_P, scale_P
        )
    _write_output(panel * PANEL_FEATURES, totals, first_sum_index, bias_Y, out_TY)


@exact_jit
def _add_group_product(
    sizes: tuple[int, int, int],
    x: tuple[int, int, Any],
    words: tuple[int, Any],
    sums_address: int,
    buffer: Array,
) -> None:
    """Add x @ numbers of one group to the sums, in chunks that are widened once. sizes: rows of x,
    rows of words, steps (`STEP_BYTES` of a row of x) in a row of words. The buffer is an argument,
    not its address: numba frees an array after the last line that names it.
    """
    num_rows, num_word_rows, steps_per_word_row = sizes
    words_address, word = words
    x_address, x_stride, element = x
    buffer_address = buffer.ctypes.data + -buffer.ctypes.data % _ALIGNMENT_BYTES
    rows_per_chunk = _CHUNK_BYTES // (steps_per_word_row * PANEL_FEATURES * STEP_BYTES)
    widened = buffer_address, PANEL_FEATURES * STEP_BYTES, element
    for first in range(0, num_word_rows, rows_per_chunk):
        num_chunk_word_rows = min(rows_per_chunk, num_word_rows - first)
        chunk = words_address + first * PANEL_FEATURES * STEP_BYTES, word
        widen_codes(chunk, num_chunk_word_rows, buffer_address, element)
        part = x_address + first * steps_per_word_row * STEP_BYTES, x_stride, element
        sums = sums_address, PANEL_FEATURES * STEP_BYTES
        add_64_columns(
            num_rows, part, widened, sums, num_chunk_word_rows * steps_per_word_row, buffer_address
        )


@exact_jit
def _add_scaled_sums(
    num_rows: int,
    group: int,
    sums: Array,
    totals: Array,
    first_sum_index: int,
    input_sums_TG: Array,
    zeros_P: Array,
    scale_P: Array,
) -> None:
    """Add a group's products with (number - zero) * scale to the totals."""
    for t in range(num_rows):
        # Unsigned, because an index that may be negative keeps a loop from being vectorized.
        row_start_index = np.uint64(first_sum_index + t * PANEL_FEATURES)
        sum_of_inputs = input_sums_TG[t, group]
        for p in range(np.uint64(PANEL_FEATURES)):
            product = sums[row_start_index + p] - zeros_P[p] * sum_of_inputs
            totals[row_start_index + p] += product * scale_P[p]


@fast_jit
def _sum_groups(t: int, x_TX: Array, input_sums_TG: Array) -> None:
    """The sum of the inputs of each group of a row."""
    group_size = x_TX.shape[1] // input_sums_TG.shape[1]
    for group in range(input_sums_TG.shape[1]):
        total = np.float32(0)
        for x in range(group * group_size, (group + 1) * group_size):
            total += widen(x_TX[t, x])
        input_sums_TG[t, group] = total


@exact_jit
def _write_output(
    first_feature: int, totals: Array, first_sum_index: int, bias_Y: Array, out_TY: Array
) -> None:
    first = np.uint64(first_feature)
    num_features = min(np.uint64(PANEL_FEATURES), np.uint64(out_TY.shape[1]) - first)
    for t in range(len(out_TY)):
        row_start_index = np.uint64(first_sum_index + t * PANEL_FEATURES)
        for p in range(num_features):
            value = totals[row_start_index + p]
            if len(bias_Y):
                value += bias_Y[first + p]
            out_TY[t, first + p] = narrow(value, out_TY[0, 0])


@exact_entry_jit
def _linear(
    x_TX: Array,
    input_sums_TG: Array,
    weight: tuple[Array, Array, Array],
    bias_Y: Array,
    out_TY: Array,
) -> None:
    if len(weight[1]):
        parallel_for(len(x_TX), _sum_groups, (x_TX, input_sums_TG))
    parallel_for(len(weight[0]), _multiply_panel, (x_TX, input_sums_TG, weight, bias_Y, out_TY))
