"""Widens 4-bit codes to numbers that can be multiplied: the inner loop of `int4.py`.

Weights lie in panels of 64 output features. A row of a panel is 64 words of 32 bits, each with the
codes of eight inputs of one feature: bits 4 s to 4 s + 3 hold input 2 s, the same bits of the upper
half input 2 s + 1, so that shifting a word brings two consecutive inputs into its two halves. What
is written is code - zero, a whole number between -15 and 15, which bfloat16 holds exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.tile import LANES, VECTOR_BYTES

PANEL = 64
INPUTS_PER_WORD = 8
CODE_BITS = 4
_VECTORS = PANEL // LANES
_SHIFTS = tuple(range(0, 16, CODE_BITS))
_MAX_ZERO = 15
_READ_AHEAD_BYTES = 4096
_BYTE, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WORDS, _HALVES = ir.VectorType(_INT32, LANES), ir.VectorType(_INT16, 2 * LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def widen_codes(
    typing_context: Any,
    words_address: Any,
    zeros_address: Any,
    num_word_rows: Any,
    out_address: Any,
    element: Any,
) -> Any:
    """Write code - zero of rows of words of a panel: as float32 [8 * rows, 64], or, if `element` is
    a uint16, as bfloat16 in pairs [4 * rows, 64, 2]. zeros_address: of 64 zero points, uint8.
    """
    emit = _emit_pairs if element == types.uint16 else _emit_floats

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, zeros, row_count, out, _ = args
        bytes_out = INPUTS_PER_WORD * _VECTORS * VECTOR_BYTES // (2 if emit is _emit_pairs else 1)
        zero_vectors = [_load_zeros(builder, zeros, vector) for vector in range(_VECTORS)]
        with cgutils.for_range(builder, row_count) as rows:
            row = builder.add(words, builder.mul(rows.index, _INT64(_VECTORS * VECTOR_BYTES)))
            place = builder.add(out, builder.mul(rows.index, _INT64(bytes_out)))
            for vector, zero_lanes in enumerate(zero_vectors):
                offset = _INT64(vector * VECTOR_BYTES)
                address = builder.add(row, offset)
                word_lanes = builder.load(_pointer(builder, address, _WORDS), align=4)
                _prefetch(builder, builder.add(address, _INT64(_READ_AHEAD_BYTES)))
                emit(builder, word_lanes, zero_lanes, builder.add(place, offset))
        return context.get_dummy_value()

    integers = [types.int64] * 4
    return types.void(*integers, element), generate


def _emit_floats(builder: Any, word_lanes: Any, zero_lanes: Any, place: Any) -> None:
    for half in range(2):
        for i, shift in enumerate(_SHIFTS):
            codes = builder.lshr(word_lanes, _all(_WORDS, shift + 16 * half))
            codes = builder.sub(builder.and_(codes, _all(_WORDS, _MAX_ZERO)), zero_lanes)
            _store(builder, builder.sitofp(codes, _FLOATS), place, 2 * i + half)


def _emit_pairs(builder: Any, word_lanes: Any, zero_lanes: Any, place: Any) -> None:
    """By a table of 31 numbers, because there is no conversion to bfloat16 in one instruction."""
    # A bfloat16 is the upper half of a float32; whole numbers up to 15 fit into it.
    table = _HALVES([_bfloat16_bits(min(i, 2 * _MAX_ZERO) - _MAX_ZERO) for i in range(32)])
    both_halves = builder.mul(zero_lanes, _all(_WORDS, 0x10001))
    first_place = builder.sub(_all(_HALVES, _MAX_ZERO), builder.bitcast(both_halves, _HALVES))
    look_up = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_HALVES, [_HALVES, _HALVES]),
        "llvm.x86.avx512.permvar.hi.512",
    )
    for i, shift in enumerate(_SHIFTS):
        codes = builder.lshr(word_lanes, _all(_WORDS, shift))
        codes = builder.and_(codes, _all(_WORDS, 0x10001 * _MAX_ZERO))
        places = builder.add(builder.bitcast(codes, _HALVES), first_place)
        _store(builder, builder.call(look_up, [table, places]), place, i)


def _bfloat16_bits(number: int) -> int:
    return int(np.float32(number).view(np.uint32) >> np.uint32(16))


def _load_zeros(builder: Any, zeros: Any, vector: int) -> Any:
    bytes_type = ir.VectorType(_BYTE, LANES)
    address = builder.add(zeros, _INT64(vector * LANES))
    return builder.zext(builder.load(_pointer(builder, address, bytes_type), align=1), _WORDS)


def _store(builder: Any, lanes: Any, place: Any, row: int) -> None:
    address = builder.add(place, _INT64(row * _VECTORS * VECTOR_BYTES))
    builder.store(lanes, _pointer(builder, address, lanes.type), align=4)


def _prefetch(builder: Any, address: Any) -> None:
    """Fetch a cache line into the second-level cache."""
    pointer = _pointer(builder, address, _BYTE)
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32]),
        "llvm.prefetch.p0",
    )
    builder.call(prefetch, [pointer, _INT32(0), _INT32(2), _INT32(1)])


def _all(vector_type: Any, number: int) -> Any:
    return vector_type([number] * vector_type.count)


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())
