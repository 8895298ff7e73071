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
    half, byte = ir.IntType(32), ir.IntType(8)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [byte.as_pointer(), half, half, half]),
        "llvm.prefetch.p0",
    )
    read, second_level, data = (ir.Constant(half, value) for value in (0, 2, 1))

    def fetch(address: Any) -> None:
        builder.call(
            function, [builder.inttoptr(address, byte.as_pointer()), read, second_level, data]
        )

    return fetch


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
    ahead: Any,
    like: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns, both literal
    numbers.

    a: address of float32 [num_rows, depth], b: of [depth, columns] in the element type of `like`
    (uint16 stands for bfloat16), c: of float32 [num_rows, columns]. Strides are in elements,
    between rows. Meanwhile, as many bytes as b has are prefetched from the address `ahead` on,
    which the caller is going to read next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, *operands, _ = args
        _emit_tile(builder, num_rows.literal_value, num_vectors.literal_value, like, *operands)
        return context.get_dummy_value()

    return types.void(num_rows, num_vectors, *([types.int64] * 8), like), generate


@intrinsic(prefer_literal=True)
def add_panel_product(
    typing_context: Any,
    fewest_rows: Any,
    most_rows: Any,
    num_rows: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    c: Any,
    depth: Any,
    ahead: Any,
    like: Any,
    widened: Any,
) -> Any:
    """As `add_product`, for a tile of 16 columns whose `num_rows` is a variable between two literal
    numbers, or 0; b and c have no other columns.

    Unless `widened` is the literal 0, b is written to this address in float32.
    """
    keeps = not isinstance(widened, types.IntegerLiteral)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, rows, a, a_stride, b, c, depth, ahead, _, kept = args
        stride = ir.Constant(ir.IntType(64), LANES)
        heights = range(fewest_rows.literal_value, most_rows.literal_value + 1)
        blocks = [builder.append_basic_block(f"rows.{height}") for height in heights]
        end = builder.append_basic_block("end")
        choice = builder.switch(rows, end)
        for height, block in zip(heights, blocks, strict=True):
            choice.add_case(ir.Constant(ir.IntType(64), height), block)
            builder.position_at_end(block)
            operands = (a, a_stride, b, stride, c, stride, depth, ahead)
            _emit_tile(builder, height, 1, like, *operands, kept if keeps else None)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(fewest_rows, most_rows, *([types.int64] * 7), like, widened), generate


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
    ahead: Any,
    kept: Any = None,
) -> None:
    """Emit a loop over `depth`; see `add_product`. Elements of b in float32 are stored from the
    address `kept` on, if there is one.
    """
    is_bfloat16 = like == types.uint16
    item = 2 if is_bfloat16 else 4
    word, single = ir.IntType(64), ir.FloatType()
    wide = ir.VectorType(single, LANES)
    fetch = prefetch(builder)

    def constant(value: int) -> Any:
        return ir.Constant(word, value)

    def at(base: Any, index: Any, size: int, kind: Any) -> Any:
        address = builder.add(base, builder.mul(index, constant(size)))
        return builder.inttoptr(address, kind.as_pointer())

    def load_b(k: Any, vector: int) -> Any:
        index = builder.add(builder.mul(k, b_stride), constant(vector * LANES))
        if not is_bfloat16:
            return builder.load(at(b, index, 4, wide), align=4)
        half = builder.load(at(b, index, 2, ir.VectorType(ir.IntType(16), LANES)), align=2)
        full = ir.VectorType(ir.IntType(32), LANES)
        bits = builder.shl(builder.zext(half, full), ir.Constant(full, [16] * LANES))
        return builder.bitcast(bits, wide)

    def load_a(row: int, k: Any) -> Any:
        scalar = builder.load(
            at(a, builder.add(builder.mul(constant(row), a_stride), k), 4, single), align=4
        )
        first = builder.insert_element(
            ir.Constant(wide, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
        )
        lanes = ir.VectorType(ir.IntType(32), LANES)
        return builder.shuffle_vector(
            first, ir.Constant(wide, ir.Undefined), ir.Constant(lanes, [0] * LANES)
        )

    places = [
        at(c, builder.add(builder.mul(constant(row), c_stride), constant(vector * LANES)), 4, wide)
        for row in range(rows)
        for vector in range(vectors)
    ]
    before = builder.block
    starts = [builder.load(place, align=4) for place in places]
    loop, done = builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", depth, constant(0)), loop, done)
    builder.position_at_end(loop)
    k = builder.phi(word)
    k.add_incoming(constant(0), before)
    sums = []
    for start in starts:
        total = builder.phi(wide)
        total.add_incoming(start, before)
        sums.append(total)
    b_vectors = [load_b(k, vector) for vector in range(vectors)]
    for vector in range(vectors):
        place = builder.add(builder.mul(k, constant(vectors)), constant(vector))
        fetch(builder.add(ahead, builder.mul(place, constant(LANES * item))))
        if kept is not None:
            builder.store(b_vectors[vector], at(kept, place, 4 * LANES, wide), align=4)
    new_sums = []
    for row in range(rows):
        factor = load_a(row, k)
        for vector in range(vectors):
            product = builder.fmul(factor, b_vectors[vector], flags=_FUSED)
            new_sums.append(builder.fadd(sums[row * vectors + vector], product, flags=_FUSED))
    following = builder.add(k, constant(1))
    k.add_incoming(following, loop)
    for total, new in zip(sums, new_sums, strict=True):
        total.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    ends = [builder.phi(wide) for _ in places]
    for place, end, start, new in zip(places, ends, starts, new_sums, strict=True):
        end.add_incoming(start, before)
        end.add_incoming(new, loop)
        builder.store(end, place, align=4)
