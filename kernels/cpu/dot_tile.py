"""The inner loop of products on processors with dot products of pairs of bfloat16 (`vdpbf16ps` of
AVX-512-BF16) or of fours of 8-bit numbers (`vpdpbusd` of AVX-512-VNNI): a small tile of a matrix
product, held in registers.

The first instruction adds a0 * b0 + a1 * b1 to each of 16 floats, so the second operand is stored
in pairs: [K / 2, N, 2] instead of [K, N]. Products and sums are float32. It does in one instruction
what `matmul_tile.py` does in five, and reads half the bytes per product. The second does the same
with four numbers, in 32-bit integers, exactly: those of a are unsigned, those of b signed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.jit import exact_jit
from kernels.cpu.matmul_tile import LANES, prefetch

PAIR = 2  # bfloat16 per lane
FOUR = 4  # 8-bit numbers per lane
_LINE = 64  # bytes of a cache line


def has_dot_products() -> bool:
    """Whether this processor has both instructions; all that have the first one do. Nothing that
    uses them compiles elsewhere.
    """
    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512vnni", "avx512bf16"))


class _Bfloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


@intrinsic(prefer_literal=True)
def add_dots(
    typing_context: Any,
    lane: Any,
    num_rows: Any,
    num_vectors: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    num_dots: Any,
    ahead: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns; with `lane`, PAIR or
    FOUR, they are literal numbers.

    a: address of bfloat16 or uint8 [num_rows, num_dots * lane], b: of bfloat16 or int8 [num_dots,
    columns, lane], c: of float32 or int32 [num_rows, columns]. Strides are in bytes: between rows
    of a and c, between dot products of b. Meanwhile `num_dots * num_vectors` cache lines from the
    address `ahead` on are fetched, which the caller is going to read next.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value
    in_floats = lane.literal_value == PAIR

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, a, a_stride, b, b_stride, c, c_stride, num_dots, ahead = args
        word, half = ir.IntType(64), ir.IntType(32)
        bits = ir.VectorType(half, LANES)
        wide = ir.VectorType(ir.FloatType(), LANES) if in_floats else bits
        groups = ir.VectorType(_Bfloat16(), PAIR * LANES) if in_floats else bits
        dot = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(wide, [wide, groups, groups]),
            "llvm.x86.avx512bf16.dpbf16ps.512" if in_floats else "llvm.x86.avx512.vpdpbusd.512",
        )
        fetch = prefetch(builder)

        def constant(value: int) -> Any:
            return ir.Constant(word, value)

        def at(base: Any, offset: Any, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

        def broadcast(row: int, k: Any) -> Any:
            start = builder.add(a, builder.mul(constant(row), a_stride))
            group = builder.load(at(start, builder.mul(k, constant(4)), half), align=4)
            undefined = ir.Constant(bits, ir.Undefined)
            first = builder.insert_element(undefined, group, ir.Constant(half, 0))
            zeros = ir.Constant(bits, [0] * LANES)
            return builder.bitcast(builder.shuffle_vector(first, undefined, zeros), groups)

        places = []
        for row in range(rows):
            start = builder.add(c, builder.mul(constant(row), c_stride))
            places += [at(start, constant(_LINE * vector), wide) for vector in range(vectors)]
        before = builder.block
        starts = [builder.load(place, align=4) for place in places]
        loop, done = builder.append_basic_block("dots"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_dots, constant(0)), loop, done)
        builder.position_at_end(loop)
        k = builder.phi(word)
        k.add_incoming(constant(0), before)
        sums = []
        for start in starts:
            total = builder.phi(wide)
            total.add_incoming(start, before)
            sums.append(total)
        b_row = builder.add(b, builder.mul(k, b_stride))
        b_vectors = [
            builder.bitcast(
                builder.load(at(b_row, constant(_LINE * vector), bits), align=4), groups
            )
            for vector in range(vectors)
        ]
        fetched = builder.add(ahead, builder.mul(k, constant(_LINE * vectors)))
        for vector in range(vectors):
            fetch(builder.add(fetched, constant(_LINE * vector)))
        new_sums = []
        for row in range(rows):
            group = broadcast(row, k)
            for vector in range(vectors):
                total = sums[row * vectors + vector]
                new_sums.append(builder.call(dot, [total, group, b_vectors[vector]]))
        following = builder.add(k, constant(1))
        k.add_incoming(following, loop)
        for total, new in zip(sums, new_sums, strict=True):
            total.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_dots), loop, done)
        builder.position_at_end(done)
        ends = [builder.phi(wide) for _ in places]
        for place, end, start, new in zip(places, ends, starts, new_sums, strict=True):
            end.add_incoming(start, before)
            end.add_incoming(new, loop)
            builder.store(end, place, align=4)
        return context.get_dummy_value()

    return types.void(lane, num_rows, num_vectors, *([types.int64] * 8)), generate


def _for_any_rows(lane: int) -> Callable[..., None]:
    @exact_jit
    def add(
        a: int, lda: int, b: int, ldb: int, c: int, ldc: int, rows: int, num_dots: int, ahead: int
    ) -> None:
        row = 0
        while row + 4 <= rows:
            add_dots(lane, 4, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_dots, ahead)
            row += 4
        while row + 2 <= rows:
            add_dots(lane, 2, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_dots, ahead)
            row += 2
        if row < rows:
            add_dots(lane, 1, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_dots, ahead)

    return add  # type: ignore[no-any-return]


# `add_dots` for any number of rows and 64 columns.
add_rows = _for_any_rows(PAIR)
add_int8_rows = _for_any_rows(FOUR)
