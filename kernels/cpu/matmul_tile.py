"""The inner loop of attention, and of products with weights widened to float32, as vector
instructions: a small tile of a matrix product, held in registers.

LLVM vectorizes the plain loops, but keeps the sums in memory and decides again for every short row
whether vectors pay off, which costs nine tenths of the speed. Here the vectors are written in LLVM
IR, 16 floats wide; LLVM splits them to the width the processor has (AVX-512, AVX2, NEON), so the
code is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_FUSED = ("contract",)


def has_wide_registers() -> bool:
    """Whether a register holds 16 floats. On other processors it holds 8 or 4, and there are no
    more registers.
    """
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def prefetch(builder: Any) -> Callable[[Any], None]:
    """Emits an instruction that fetches the cache line at an address, an int64 value, into the
    second-level cache, so that waiting for memory does not block the first-level cache.
    """
    int32, int8 = ir.IntType(32), ir.IntType(8)
    prefetch_function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [int8.as_pointer(), int32, int32, int32]),
        "llvm.prefetch.p0",
    )
    read, second_level, data = (ir.Constant(int32, value) for value in (0, 2, 1))

    def prefetch_line(address: Any) -> None:
        builder.call(
            prefetch_function,
            [builder.inttoptr(address, int8.as_pointer()), read, second_level, data],
        )

    return prefetch_line


@intrinsic(prefer_literal=True)
def add_product(
    typing_context: Any,
    num_rows: Any,
    num_vectors: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    depth: Any,
    prefetch_address: Any,
    like: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns, both literal
    numbers.

    a: address of float32 [num_rows, depth], b: of [depth, columns] in the element type of `like`
    (uint16 stands for bfloat16), c: of float32 [num_rows, columns]. Strides are in elements,
    between rows. Meanwhile, as many bytes as b has are prefetched from `prefetch_address` on, which
    the caller is going to read next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, *operands, _ = args
        _emit_tile(builder, num_rows.literal_value, num_vectors.literal_value, like, *operands)
        return context.get_dummy_value()

    return types.void(num_rows, num_vectors, *([types.int64] * 8), like), generate


@intrinsic(prefer_literal=True)
def add_panel_product(
    typing_context: Any,
    min_rows: Any,
    max_rows: Any,
    num_rows: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    c: Any,
    depth: Any,
    prefetch_address: Any,
    like: Any,
    widened: Any,
) -> Any:
    """As `add_product`, for a tile of 16 columns whose `num_rows` is a variable between two literal
    numbers, or 0; b and c have no other columns.

    Unless `widened` is the literal 0, b is written to this address in float32.
    """
    stores_widened = not isinstance(widened, types.IntegerLiteral)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, row_count, a, a_stride, b, c, depth, prefetch_address, _, widened_address = args
        stride = ir.Constant(ir.IntType(64), LANES)
        heights = range(min_rows.literal_value, max_rows.literal_value + 1)
        basic_blocks = [builder.append_basic_block(f"rows.{height}") for height in heights]
        end_block = builder.append_basic_block("end")
        switch = builder.switch(row_count, end_block)
        for height, basic_block in zip(heights, basic_blocks, strict=True):
            switch.add_case(ir.Constant(ir.IntType(64), height), basic_block)
            builder.position_at_end(basic_block)
            operands = (a, a_stride, b, stride, c, stride, depth, prefetch_address)
            _emit_tile(
                builder, height, 1, like, *operands, widened_address if stores_widened else None
            )
            builder.branch(end_block)
        builder.position_at_end(end_block)
        return context.get_dummy_value()

    return types.void(min_rows, max_rows, *([types.int64] * 7), like, widened), generate


def _emit_tile(
    builder: Any,
    rows: int,
    vectors: int,
    like: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    depth: Any,
    prefetch_address: Any,
    widened_address: Any = None,
) -> None:
    """Emit a loop over `depth`; see `add_product`. Elements of b in float32 are stored from the
    address `widened_address` on, if there is one.
    """
    is_bfloat16 = like == types.uint16
    element_bytes = 2 if is_bfloat16 else 4
    int64, float32 = ir.IntType(64), ir.FloatType()
    float_lanes = ir.VectorType(float32, LANES)
    prefetch_line = prefetch(builder)

    def constant(value: int) -> Any:
        return ir.Constant(int64, value)

    def pointer_at(base: Any, index: Any, size: int, element_type: Any) -> Any:
        address = builder.add(base, builder.mul(index, constant(size)))
        return builder.inttoptr(address, element_type.as_pointer())

    def load_b(k: Any, vector: int) -> Any:
        index = builder.add(builder.mul(k, b_stride), constant(vector * LANES))
        if not is_bfloat16:
            return builder.load(pointer_at(b, index, 4, float_lanes), align=4)
        half_lanes = builder.load(
            pointer_at(b, index, 2, ir.VectorType(ir.IntType(16), LANES)), align=2
        )
        int32_lanes = ir.VectorType(ir.IntType(32), LANES)
        bits = builder.shl(
            builder.zext(half_lanes, int32_lanes), ir.Constant(int32_lanes, [16] * LANES)
        )
        return builder.bitcast(bits, float_lanes)

    def load_a(row: int, k: Any) -> Any:
        scalar = builder.load(
            pointer_at(a, builder.add(builder.mul(constant(row), a_stride), k), 4, float32), align=4
        )
        one_lane = builder.insert_element(
            ir.Constant(float_lanes, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
        )
        int32_lanes = ir.VectorType(ir.IntType(32), LANES)
        return builder.shuffle_vector(
            one_lane, ir.Constant(float_lanes, ir.Undefined), ir.Constant(int32_lanes, [0] * LANES)
        )

    c_pointers = [
        pointer_at(
            c,
            builder.add(builder.mul(constant(row), c_stride), constant(vector * LANES)),
            4,
            float_lanes,
        )
        for row in range(rows)
        for vector in range(vectors)
    ]
    entry_block = builder.block
    initial_sums = [builder.load(c_pointer, align=4) for c_pointer in c_pointers]
    loop_block, done_block = builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", depth, constant(0)), loop_block, done_block)
    builder.position_at_end(loop_block)
    k = builder.phi(int64)
    k.add_incoming(constant(0), entry_block)
    sums = []
    for initial_sum in initial_sums:
        sum_phi = builder.phi(float_lanes)
        sum_phi.add_incoming(initial_sum, entry_block)
        sums.append(sum_phi)
    b_vectors = [load_b(k, vector) for vector in range(vectors)]
    for vector in range(vectors):
        line_index = builder.add(builder.mul(k, constant(vectors)), constant(vector))
        prefetch_line(
            builder.add(prefetch_address, builder.mul(line_index, constant(LANES * element_bytes)))
        )
        if widened_address is not None:
            builder.store(
                b_vectors[vector],
                pointer_at(widened_address, line_index, 4 * LANES, float_lanes),
                align=4,
            )
    new_sums = []
    for row in range(rows):
        a_lanes = load_a(row, k)
        for vector in range(vectors):
            product = builder.fmul(a_lanes, b_vectors[vector], flags=_FUSED)
            new_sums.append(builder.fadd(sums[row * vectors + vector], product, flags=_FUSED))
    next_k = builder.add(k, constant(1))
    k.add_incoming(next_k, loop_block)
    for sum_phi, new_sum in zip(sums, new_sums, strict=True):
        sum_phi.add_incoming(new_sum, loop_block)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop_block, done_block)
    builder.position_at_end(done_block)
    final_sums = [builder.phi(float_lanes) for _ in c_pointers]
    for c_pointer, final_sum, initial_sum, new_sum in zip(
        c_pointers, final_sums, initial_sums, new_sums, strict=True
    ):
        final_sum.add_incoming(initial_sum, entry_block)
        final_sum.add_incoming(new_sum, loop_block)
        builder.store(final_sum, c_pointer, align=4)
