"""Widens codes to numbers that can be multiplied: the inner loops of `grouped.py`.

Weights lie in panels of 64 output features. A row of a panel is 64 words of 32 bits, each with the
codes of some inputs of one feature. Words of type int32 have eight codes of 4 bits: bits 4 s to
4 s + 3 hold input 2 s, the same bits of the upper half input 2 s + 1, so that shifting a word
brings two consecutive inputs into its two halves. They become code - 8, a whole number that
bfloat16 holds exactly: with AVX-512 by looking up the lowest bits in a table, which needs no other
instruction.

Words of type uint32 have four e4m3 numbers of 8 bits, of inputs 0 and 2 in the lower half, of 1 and
3 in the upper one. They become a 256th of themselves, because a code moved to the place of a
float16's bits is that number, subnormal or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.atomics import declare_function
from kernels.cpu.tile import (
    ARITHMETIC,
    LANES,
    STEP_BYTES,
    VECTOR_BYTES,
    Emitter,
    has_wide_registers,
)
from kernels.reference.grouped import INT4_SHIFTS, MAX_INT4_CODE, MIDDLE_INT4_CODE

PANEL_FEATURES = 64
E4M3_SHIFTS = (0, 16, 8, 24)  # where the codes of four inputs lie in a word
E4M3_UNIT = 256  # what the numbers that e4m3 codes become must be multiplied with
# Rows of x that are multiplied while codes are in registers; of more, codes are widened once.
MAX_FUSED_ROWS = 4 if has_wide_registers() else 1
_VECTORS_PER_PANEL = PANEL_FEATURES // LANES
_ROW_BYTES = PANEL_FEATURES * STEP_BYTES  # of words, and of what one step multiplies
_READ_AHEAD_BYTES = 16 * _ROW_BYTES
_INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
_INT32_LANES, _INT16_LANES = ir.VectorType(_INT32, LANES), ir.VectorType(_INT16, 2 * LANES)
_FLOAT_LANES = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def widen_codes(typing_context: Any, words: Any, num_word_rows: Any, out: Any, element: Any) -> Any:
    """Write rows of words of a panel as float32 [codes per word * rows, 64], or, if `element` is a
    uint16, as bfloat16 in pairs, [codes per word / 2 * rows, 64, 2].

    words: (address, a word, whose value does not matter). out: an address.
    """
    word = words[1]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, row_count, out, _ = args
        words, _ = cgutils.unpack_tuple(builder, words)
        emitter = Emitter(builder, ARITHMETIC[element], False, False)
        step_wideners = _step_wideners(builder, word, element)
        with cgutils.for_range(builder, row_count) as rows:
            row = emitter.offset_address(words, rows.index, _ROW_BYTES)
            out_address = emitter.offset_address(out, rows.index, len(step_wideners) * _ROW_BYTES)
            for vector in range(_VECTORS_PER_PANEL):
                lanes = _load(emitter, row, vector)
                for i, widen_step in enumerate(step_wideners):
                    address = emitter.offset_address(
                        emitter.offset_address(out_address, i, _ROW_BYTES), vector, VECTOR_BYTES
                    )
                    widened = widen_step(lanes)
                    builder.store(widened, emitter.pointer(address, widened.type), align=4)
        return context.get_dummy_value()

    return types.void(types.Tuple((types.int64, word)), types.int64, types.int64, element), generate


@intrinsic
def multiply_codes(
    typing_context: Any, num_rows: Any, x: Any, words: Any, num_word_rows: Any, sums: Any
) -> Any:
    """sums = x @ numbers for up to `MAX_FUSED_ROWS` rows and the 64 features of a panel, in the
    order in which `tile.add_tile` adds.

    x: (address, bytes between rows, an element), words: as in `widen_codes`, sums: float32 [rows,
    64], an address.
    """
    element, word = x[2], words[1]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row_count, x, words, word_row_count, sums = args
        x_address, x_stride, _ = cgutils.unpack_tuple(builder, x)
        words, _ = cgutils.unpack_tuple(builder, words)
        emitter = Emitter(builder, ARITHMETIC[element], False, False)
        end_block = builder.append_basic_block("end")
        switch = builder.switch(row_count, end_block)
        for height in range(1, MAX_FUSED_ROWS + 1):
            basic_block = builder.append_basic_block(f"rows.{height}")
            switch.add_case(_INT64(height), basic_block)
            builder.position_at_end(basic_block)
            x_rows = [emitter.offset_address(x_address, row, x_stride) for row in range(height)]
            step_wideners = _step_wideners(builder, word, element)
            _emit_product(emitter, step_wideners, x_rows, words, word_row_count, sums)
            builder.branch(end_block)
        builder.position_at_end(end_block)
        return context.get_dummy_value()

    x_type = types.Tuple((types.int64, types.int64, element))
    words_type = types.Tuple((types.int64, word))
    return types.void(types.int64, x_type, words_type, types.int64, types.int64), generate


def _emit_product(
    emitter: Emitter,
    step_wideners: list[Any],
    x_rows: list[Any],
    words: Any,
    word_row_count: Any,
    sums: Any,
) -> None:
    builder = emitter.builder
    tile_keys = [
        (row, vector) for row in range(len(x_rows)) for vector in range(_VECTORS_PER_PANEL)
    ]
    totals = {
        tile_key: cgutils.alloca_once_value(builder, _FLOAT_LANES([0.0] * LANES))
        for tile_key in tile_keys
    }
    for total in totals.values():
        builder.store(_FLOAT_LANES([0.0] * LANES), total)
    with cgutils.for_range(builder, word_row_count) as rows:
        word_row = emitter.offset_address(words, rows.index, _ROW_BYTES)
        lanes = [_load(emitter, word_row, vector) for vector in range(_VECTORS_PER_PANEL)]
        x_addresses = [
            emitter.offset_address(row, rows.index, len(step_wideners) * STEP_BYTES)
            for row in x_rows
        ]
        for i, widen_step in enumerate(step_wideners):
            x_lanes = [
                emitter.broadcast(emitter.offset_address(row, i, STEP_BYTES)) for row in x_addresses
            ]
            for vector in range(_VECTORS_PER_PANEL):
                widened = builder.bitcast(widen_step(lanes[vector]), emitter.arithmetic.operands)
                for row, x_lane in enumerate(x_lanes):
                    total = totals[row, vector]
                    new_total = emitter.multiply_add(x_lane, widened, builder.load(total))
                    builder.store(new_total, total)
    for (row, vector), total in totals.items():
        sum_address = emitter.offset_address(
            emitter.offset_address(sums, row, _ROW_BYTES), vector, VECTOR_BYTES
        )
        builder.store(builder.load(total), emitter.pointer(sum_address, _FLOAT_LANES), align=4)


def _load(emitter: Emitter, word_row: Any, vector: int) -> Any:
    address = emitter.offset_address(word_row, vector, VECTOR_BYTES)
    emitter.prefetch(emitter.offset_address(address, 1, _READ_AHEAD_BYTES))
    return emitter.builder.load(emitter.pointer(address, _INT32_LANES), align=4)


def _step_wideners(builder: Any, word: Any, element: Any) -> list[Callable[[Any], Any]]:
    """What gives the operand of each step from a vector of words: of one input each, or of two."""
    if word == types.uint32:
        if element == types.uint16:
            return [partial(_e4m3_pairs, builder, shift) for shift in E4M3_SHIFTS[::2]]
        return [partial(_e4m3_floats, builder, shift) for shift in E4M3_SHIFTS]
    if element == types.uint16:
        return [partial(_look_up_pairs, builder, shift) for shift in INT4_SHIFTS[::2]]
    widen_lanes = _look_up_floats if has_wide_registers() else _compute_floats
    return [partial(widen_lanes, builder, shift) for shift in INT4_SHIFTS]


def _look_up_pairs(builder: Any, shift: int, words: Any) -> Any:
    # A bfloat16 is the upper half of a float32.
    table = _INT16_LANES(2 * (_code_values().view(np.uint32) >> 16).tolist())
    indices = builder.bitcast(_shift_right(builder, shift, words), _INT16_LANES)
    return _look_up(builder, "llvm.x86.avx512.permvar.hi.512", table, indices)


def _look_up_floats(builder: Any, shift: int, words: Any) -> Any:
    table, indices = _FLOAT_LANES(_code_values().tolist()), _shift_right(builder, shift, words)
    return _look_up(builder, "llvm.x86.avx512.permvar.sf.512", table, indices)


def _compute_floats(builder: Any, shift: int, words: Any) -> Any:
    codes = builder.and_(_shift_right(builder, shift, words), _INT32_LANES([MAX_INT4_CODE] * LANES))
    return builder.sitofp(
        builder.sub(codes, _INT32_LANES([MIDDLE_INT4_CODE] * LANES)), _FLOAT_LANES
    )


def _e4m3_pairs(builder: Any, shift: int, words: Any) -> Any:
    """Move exponent and mantissa to their places in bfloat16, whose bias is larger; subnormal
    numbers, which are not subnormal there, are looked up.
    """

    def apply_mask(halves: Any, mask: int) -> Any:
        return builder.and_(halves, _INT16_LANES([mask] * (2 * LANES)))

    def shift_codes(bits: int) -> Any:
        """The codes, so many bits to the left."""
        move = builder.shl if bits > 0 else builder.lshr
        return move(codes, _INT16_LANES([abs(bits)] * (2 * LANES))) if bits else codes

    codes = builder.bitcast(words, _INT16_LANES)
    bias = _INT16_LANES([(127 - 7 - 8) << 7] * (2 * LANES))
    normal = builder.or_(apply_mask(shift_codes(4 - shift), 0x7F << 4), bias)
    subnormal_values = np.arange(2 * LANES, dtype=np.float32) / np.float32(2**9 * E4M3_UNIT)
    table = _INT16_LANES((subnormal_values.view(np.uint32) >> 16).tolist())
    subnormal = _look_up(builder, "llvm.x86.avx512.permvar.hi.512", table, shift_codes(-shift))
    is_subnormal = builder.icmp_unsigned("==", apply_mask(codes, 0x78 << shift), _INT16_LANES(None))
    magnitudes = builder.select(is_subnormal, subnormal, normal)
    return builder.or_(magnitudes, apply_mask(shift_codes(8 - shift), 0x8000))


def _e4m3_floats(builder: Any, shift: int, words: Any) -> Any:
    def constant(number: int) -> Any:
        return _INT32_LANES([number] * LANES)

    codes = _shift_right(builder, shift, words)
    signs = builder.shl(builder.and_(codes, constant(0x80)), constant(8))
    numbers = builder.shl(builder.and_(codes, constant(0x7F)), constant(7))
    halves = builder.trunc(builder.or_(signs, numbers), ir.VectorType(_INT16, LANES))
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), _FLOAT_LANES)


def _shift_right(builder: Any, shift: int, words: Any) -> Any:
    return builder.lshr(words, _INT32_LANES([shift] * LANES)) if shift else words


def _code_values() -> Any:
    """What the codes stand for, float32."""
    return np.arange(MAX_INT4_CODE + 1, dtype=np.float32) - np.float32(MIDDLE_INT4_CODE)


def _look_up(builder: Any, instruction: str, table: Any, indices: Any) -> Any:
    function = declare_function(builder, instruction, table.type, [table.type, indices.type])
    return builder.call(function, [table, indices])
