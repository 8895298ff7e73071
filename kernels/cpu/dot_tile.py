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
_CACHE_LINE_BYTES = 64


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
    prefetch_address: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns; with `lane`, PAIR or
    FOUR, they are literal numbers.

    a: address of bfloat16 or uint8 [num_rows, num_dots * lane], b: of bfloat16 or int8 [num_dots,
    columns, lane], c: of float32 or int32 [num_rows, columns]. Strides are in bytes: between rows
    of a and c, between dot products of b. Meanwhile `num_dots * num_vectors` cache lines from the
    address `prefetch_address` on are fetched, which the caller is going to read next.
    """
    rows, vectors = num_rows.literal_value, num_vectors.literal_value
    is_bfloat16 = lane.literal_value == PAIR

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, a, a_stride, b, b_stride, c, c_stride, num_dots, prefetch_address = args
        int64, int32 = ir.IntType(64), ir.IntType(32)
        int32_lanes = ir.VectorType(int32, LANES)
        sum_lanes = ir.VectorType(ir.FloatType(), LANES) if is_bfloat16 else int32_lanes
        operand_lanes = ir.VectorType(_Bfloat16(), PAIR * LANES) if is_bfloat16 else int32_lanes
        dot = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(sum_lanes, [sum_lanes, operand_lanes, operand_lanes]),
            "llvm.x86.avx512bf16.dpbf16ps.512" if is_bfloat16 else "llvm.x86.avx512.vpdpbusd.512",
        )
        prefetch_line = prefetch(builder)

        def constant(value: int) -> Any:
            return ir.Constant(int64, value)

        def pointer_at(base: Any, offset: Any, element_type: Any) -> Any:
            return builder.inttoptr(builder.add(base, offset), element_type.as_pointer())

        def broadcast(row: int, k: Any) -> Any:
            a_row_address = builder.add(a, builder.mul(constant(row), a_stride))
            group = builder.load(
                pointer_at(a_row_address, builder.mul(k, constant(4)), int32), align=4
            )
            undefined = ir.Constant(int32_lanes, ir.Undefined)
            one_lane = builder.insert_element(undefined, group, ir.Constant(int32, 0))
            zeros = ir.Constant(int32_lanes, [0] * LANES)
            return builder.bitcast(
                builder.shuffle_vector(one_lane, undefined, zeros), operand_lanes
            )

        c_pointers = []
        for row in range(rows):
            c_row_address = builder.add(c, builder.mul(constant(row), c_stride))
            c_pointers += [
                pointer_at(c_row_address, constant(_CACHE_LINE_BYTES * vector), sum_lanes)
                for vector in range(vectors)
            ]
        entry_block = builder.block
        initial_sums = [builder.load(c_pointer, align=4) for c_pointer in c_pointers]
        loop_block = builder.append_basic_block("dots")
        done_block = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", num_dots, constant(0)), loop_block, done_block)
        builder.position_at_end(loop_block)
        k = builder.phi(int64)
        k.add_incoming(constant(0), entry_block)
        sums = []
        for initial_sum in initial_sums:
            sum_phi = builder.phi(sum_lanes)
            sum_phi.add_incoming(initial_sum, entry_block)
            sums.append(sum_phi)
        b_row_address = builder.add(b, builder.mul(k, b_stride))
        b_vectors = [
            builder.bitcast(
                builder.load(
                    pointer_at(b_row_address, constant(_CACHE_LINE_BYTES * vector), int32_lanes),
                    align=4,
                ),
                operand_lanes,
            )
            for vector in range(vectors)
        ]
        line_address = builder.add(
            prefetch_address, builder.mul(k, constant(_CACHE_LINE_BYTES * vectors))
        )
        for vector in range(vectors):
            prefetch_line(builder.add(line_address, constant(_CACHE_LINE_BYTES * vector)))
        new_sums = []
        for row in range(rows):
            group = broadcast(row, k)
            for vector in range(vectors):
                sum_phi = sums[row * vectors + vector]
                new_sums.append(builder.call(dot, [sum_phi, group, b_vectors[vector]]))
        next_k = builder.add(k, constant(1))
        k.add_incoming(next_k, loop_block)
        for sum_phi, new_sum in zip(sums, new_sums, strict=True):
            sum_phi.add_incoming(new_sum, loop_block)
        builder.cbranch(builder.icmp_signed("<", next_k, num_dots), loop_block, done_block)
        builder.position_at_end(done_block)
        final_sums = [builder.phi(sum_lanes) for _ in c_pointers]
        for c_pointer, final_sum, initial_sum, new_sum in zip(
            c_pointers, final_sums, initial_sums, new_sums, strict=True
        ):
            final_sum.add_incoming(initial_sum, entry_block)
            final_sum.add_incoming(new_sum, loop_block)
            builder.store(final_sum, c_pointer, align=4)
        return context.get_dummy_value()

    return types.void(lane, num_rows, num_vectors, *([types.int64] * 8)), generate


def _for_any_rows(lane: int) -> Callable[..., None]:
    @exact_jit
    def add(
        a: int,
        lda: int,
        b: int,
        ldb: int,
        c: int,
        ldc: int,
        rows: int,
        num_dots: int,
        prefetch_address: int,
    ) -> None:
        row = 0
        while row + 4 <= rows:
            add_dots(
                lane,
                4,
                4,
                a + row * lda,
                lda,
                b,
                ldb,
                c + row * ldc,
                ldc,
                num_dots,
                prefetch_address,
            )
            row += 4
        while row + 2 <= rows:
            add_dots(
                lane,
                2,
                4,
                a + row * lda,
                lda,
                b,
                ldb,
                c + row * ldc,
                ldc,
                num_dots,
                prefetch_address,
            )
            row += 2
        if row < rows:
            add_dots(
                lane,
                1,
                4,
                a + row * lda,
                lda,
                b,
                ldb,
                c + row * ldc,
                ldc,
                num_dots,
                prefetch_address,
            )

    return add  # type: ignore[no-any-return]


# `add_dots` for any number of rows and 64 columns.
add_rows = _for_any_rows(PAIR)
add_int8_rows = _for_any_rows(FOUR)
