"""The inner loop of bfloat16 products on processors with dot products of pairs (`vdpbf16ps` of
AVX-512-BF16): a small tile of a matrix product, held in registers.

The instruction adds a0 * b0 + a1 * b1 to each of 16 floats, so the second operand is stored in
pairs: [K / 2, N, 2] instead of [K, N]. Products and sums are float32. It does in one instruction
what `matmul_tile.py` does in five, and reads half the bytes per product.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.jit import exact_jit

PAIR = 2
LANES = 16
_LINE = 64  # bytes of a cache line


def has_dot_products() -> bool:
    """Whether this processor has the instruction. Elsewhere nothing that uses it compiles."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and bool(features.get("avx512f"))


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
    num_rows: Any,
    num_vectors: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    num_pairs: Any,
    ahead: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns, both literal
    numbers.

    a: address of bfloat16 [num_rows, num_pairs * 2], b: of bfloat16 [num_pairs, columns, 2], c: of
    float32 [num_rows, columns]. Strides are in bytes: between rows of a and c, between pairs of b.
    Meanwhile `num_pairs * num_vectors` cache lines from the address `ahead` on are fetched, which
    the caller is going to read next.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, a, a_stride, b, b_stride, c, c_stride, num_pairs, ahead = args
        word, half, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8)
        wide = ir.VectorType(ir.FloatType(), LANES)
        pairs = ir.VectorType(_Bfloat16(), PAIR * LANES)
        bits = ir.VectorType(half, LANES)
        dot = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(wide, [wide, pairs, pairs]),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )
        fetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte.as_pointer(), half, half, half]),
            "llvm.prefetch.p0",
        )
        # Into the second-level cache: what waits for memory there does not hold up the first.
        read, second_level, data = (ir.Constant(half, value) for value in (0, 2, 1))

        def constant(value: int) -> Any:
            return ir.Constant(word, value)

        def at(base: Any, offset: Any, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

        def broadcast_pair(row: int, k: Any) -> Any:
            start = builder.add(a, builder.mul(constant(row), a_stride))
            pair = builder.load(at(start, builder.mul(k, constant(4)), half), align=4)
            undefined = ir.Constant(bits, ir.Undefined)
            first = builder.insert_element(undefined, pair, ir.Constant(half, 0))
            zeros = ir.Constant(bits, [0] * LANES)
            return builder.bitcast(builder.shuffle_vector(first, undefined, zeros), pairs)

        places = []
        for row in range(rows):
            start = builder.add(c, builder.mul(constant(row), c_stride))
            places += [at(start, constant(_LINE * vector), wide) for vector in range(vectors)]
        before = builder.block
        starts = [builder.load(place, align=4) for place in places]
        loop, done = builder.append_basic_block("pairs"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_pairs, constant(0)), loop, done)
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
            builder.bitcast(builder.load(at(b_row, constant(_LINE * vector), bits), align=4), pairs)
            for vector in range(vectors)
        ]
        fetched = builder.add(ahead, builder.mul(k, constant(_LINE * vectors)))
        for vector in range(vectors):
            builder.call(
                fetch, [at(fetched, constant(_LINE * vector), byte), read, second_level, data]
            )
        new_sums = []
        for row in range(rows):
            pair = broadcast_pair(row, k)
            for vector in range(vectors):
                total = sums[row * vectors + vector]
                new_sums.append(builder.call(dot, [total, pair, b_vectors[vector]]))
        following = builder.add(k, constant(1))
        k.add_incoming(following, loop)
        for total, new in zip(sums, new_sums, strict=True):
            total.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, done)
        builder.position_at_end(done)
        ends = [builder.phi(wide) for _ in places]
        for place, end, start, new in zip(places, ends, starts, new_sums, strict=True):
            end.add_incoming(start, before)
            end.add_incoming(new, loop)
            builder.store(end, place, align=4)
        return context.get_dummy_value()

    return types.void(num_rows, num_vectors, *([types.int64] * 8)), generate


@exact_jit
def add_rows(
    a: int,
    lda: int,
    b: int,
    ldb: int,
    c: int,
    ldc: int,
    rows: int,
    num_pairs: int,
    ahead: int,
) -> None:
    """`add_dots` for any number of rows and 64 columns."""
    row = 0
    while row + 4 <= rows:
        add_dots(4, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_pairs, ahead)
        row += 4
    while row + 2 <= rows:
        add_dots(2, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_pairs, ahead)
        row += 2
    if row < rows:
        add_dots(1, 4, a + row * lda, lda, b, ldb, c + row * ldc, ldc, num_pairs, ahead)
