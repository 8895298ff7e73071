"""Products of 8-bit codes on a CPU: oneDNN's for many rows, our own for few where we know oneDNN's
layout, with the same bits.

Both read one weight, packed by oneDNN. A processor multiplies unsigned by signed numbers, so the
codes of the input are stored with 128 added, which adds 128 times the sum of a weight's codes to
each product; that is subtracted again.

Legend: T tokens, X features in, Y features out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import (
    Array,
    as_array,
    bits_of_float,
    exact_entry_jit,
    exact_jit,
    float_of_bits,
    narrow,
    widen,
)
from kernels.cpu.packed import PANEL_FEATURES, max_few_rows, packed_address, row_bytes
from kernels.cpu.panel import multiply_int8_panel
from kernels.cpu.parallel import parallel_for
from kernels.cpu.pool import put_helpers_to_sleep
from kernels.cpu.recording import contiguous, empty, keep, refuse_recording
from kernels.cpu.tensor_bytes import panel_address, set_panel_address
from kernels.cpu.tile import has_dot_products
from kernels.interface import GroupedCodes
from kernels.reference.int8 import MAX_CODE, MIN_MAGNITUDE

_ZERO_CODE = 128  # the unsigned code of 0
_NO_BIAS = torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInt8Codes(GroupedCodes):
    """`words` in oneDNN's layout, `scale` as before packing. excess_Y: int32, what the unsigned
    codes add to each product.
    """

    excess_Y: Tensor

    @property
    def address(self) -> int | None:
        """Where the panels lie, if the layout is the known one."""
        return panel_address(self.words)


class CpuInt8:
    """`QuantizedKernels` with oneDNN and numba."""

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """A product of few rows, and one of many."""
        codes = torch.zeros(PANEL_FEATURES, PANEL_FEATURES, dtype=torch.int8)
        scale = torch.ones(PANEL_FEATURES, 1)
        weight = self.pack_weight(
            GroupedCodes(words=codes, zeros=None, scale=scale, num_rows=PANEL_FEATURES)
        )
        x = torch.zeros(
            max_few_rows(PANEL_FEATURES, PANEL_FEATURES) + 1, PANEL_FEATURES, dtype=dtype
        )
        return [partial(self.linear, x[:1], weight, None), partial(self.linear, x, weight, None)]

    def pack_weight(self, weight: GroupedCodes, /) -> PackedInt8Codes:
        """The weight in oneDNN's layout, which only `linear` can read."""
        codes_YX = weight.words
        assert weight.scale.shape[1] == 1, "one scale per row"
        packed_words = torch.ops.onednn.qlinear_prepack(codes_YX, None)
        if has_dot_products():
            set_panel_address(packed_words, packed_address(codes_YX, packed_words))
        # In numpy, because torch would first copy all codes to the wider type.
        sum_Y = torch.from_numpy(as_array(codes_YX).sum(axis=1, dtype=np.int32))
        return PackedInt8Codes(
            words=packed_words,
            zeros=None,
            scale=weight.scale,
            num_rows=weight.num_rows,
            excess_Y=sum_Y * _ZERO_CODE,
        )

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """See `QuantizedKernels`."""
        assert isinstance(weight, PackedInt8Codes)
        (num_rows, size_in), size_out = x_TX.shape, weight.num_rows
        codes_TX = empty((num_rows, size_in), torch.uint8)
        scale_T = empty((num_rows,), torch.float32)
        out_TY = empty((num_rows, size_out), x_TX.dtype)
        x, codes, out = as_array(contiguous(x_TX)), as_array(codes_TX), as_array(out_TY)
        scale_Y = as_array(weight.scale).reshape(-1)
        scales = as_array(weight.excess_Y), scale_Y, as_array(scale_T)
        bias = keep(as_array(_NO_BIAS if bias_Y is None else bias_Y.to(torch.float32)))
        if weight.address is not None and num_rows <= max_few_rows(size_in, size_out):
            _multiply_few_rows(
                x, codes, weight.address, PANEL_FEATURES * row_bytes(size_in), bias, scales, out
            )
            return out_TY
        _quantize(x, codes, scales[2])
        put_helpers_to_sleep()
        refuse_recording()
        sums_TY = torch.ops.onednn.qlinear_pointwise(
            *(codes_TX, 1.0, _ZERO_CODE),
            *(weight.words, torch.ones(size_out), torch.zeros(size_out, dtype=torch.int32)),
            *(None, 1.0, 0, torch.float32),
            *("none", [], ""),
        )
        _scale(as_array(sums_TY), bias, scales, out)
        return out_TY


@exact_jit
def _quantize_row(x_X: Array, codes_X: Array) -> np.float32:
    """Quantize a row and return its scale. Codes are those of `quantize_rows` plus 128."""
    largest_magnitude_bits = np.int32(0)
    for i in range(len(x_X)):  # as integers, because a maximum of floats does not vectorize
        magnitude_bits = np.int32(bits_of_float(widen(x_X[i])) & np.uint32(0x7FFFFFFF))
        largest_magnitude_bits = max(largest_magnitude_bits, magnitude_bits)
    largest_magnitude = float_of_bits(np.uint32(largest_magnitude_bits))
    factor = np.float32(0.0)
    if largest_magnitude > np.float32(MIN_MAGNITUDE):
        factor = np.float32(MAX_CODE) / largest_magnitude
    for i in range(len(x_X)):
        codes_X[i] = np.uint8(np.int32(np.rint(widen(x_X[i]) * factor)) + np.int32(_ZERO_CODE))
    return np.float32(largest_magnitude / np.float32(MAX_CODE))


@exact_jit
def _quantize_token(t: int, x_TX: Array, codes_TX: Array, scale_T: Array) -> None:
    scale_T[t] = _quantize_row(x_TX[t], codes_TX[t])


@exact_entry_jit
def _quantize(x_TX: Array, codes_TX: Array, scale_T: Array) -> None:
    parallel_for(len(x_TX), _quantize_token, (x_TX, codes_TX, scale_T))


@exact_jit
def _scale_token(
    t: int, sums_TY: Array, bias_Y: Array, scales: tuple[Array, ...], out_TY: Array
) -> None:
    _, scale_Y, scale_T = scales
    sums_Y, scale_t, out_Y = sums_TY[t], scale_T[t], out_TY[t]
    for y in range(len(out_Y)):
        value = sums_Y[y] * scale_Y[y] * scale_t
        if len(bias_Y):
            value += bias_Y[y]
        out_Y[y] = narrow(value, out_TY[0, 0])


@exact_entry_jit
def _scale(sums_TY: Array, bias_Y: Array, scales: tuple[Array, ...], out_TY: Array) -> None:
    parallel_for(len(out_TY), _scale_token, (sums_TY, bias_Y, scales, out_TY))


@exact_entry_jit
def _multiply_few_rows(
    x_TX: Array,
    codes_TX: Array,
    address: int,
    panel_bytes: int,
    bias_Y: Array,
    scales: tuple[Array, ...],
    out_TY: Array,
) -> None:
    parallel_for(len(x_TX), _quantize_token, (x_TX, codes_TX, scales[2]))
    arguments = (codes_TX, (address, panel_bytes, np.int8(0)), bias_Y, scales, out_TY)
    parallel_for(
        (out_TY.shape[1] + PANEL_FEATURES - 1) // PANEL_FEATURES, multiply_int8_panel, arguments
    )
