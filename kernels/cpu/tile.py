"""The inner loop of all products of our own: a small tile of a matrix product, held in registers.

LLVM vectorizes the plain loops, but keeps the sums in memory and decides again for every short row
whether vectors pay off, which costs nine tenths of the speed. Here the vectors are written in LLVM
IR, 16 sums wide; LLVM splits them to the width the processor has (AVX-512, AVX2, NEON), so the code
is the same everywhere.

A step multiplies 4 bytes of each row of a with what b has for them in each column, and adds the
product to that row's sums:

    a         b                    c         a step
    float32   float32 or bfloat16  float32   a * b, with b widened
    bfloat16  bfloat16             float32   a0 * b0 + a1 * b1, `vdpbf16ps` of AVX-512-BF16
    uint8     int8                 int32     four products, exactly, `vpdpbusd` of AVX-512-VNNI

The last two do in one instruction what the first does in five. What a step reads lies side by side,
so b is stored in pairs, [K / 2, N, 2], or in fours. uint16 stands for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.atomics import declare_function
from kernels.cpu.jit import exact_jit

LANES = 16  # sums of a vector
PAIR_SIZE = 2  # numbers of bfloat16 that a step multiplies at once
STEP_BYTES = 4  # of a row of a
VECTOR_BYTES = 4 * LANES  # of a vector of sums, or of 32-bit elements
_CONTRACT_FLAGS = ("contract",)
_INT64, _INT32, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_INT32_LANES, _FLOAT_LANES = (ir.VectorType(element, LANES) for element in (_INT32, _FLOAT))


def has_wide_registers() -> bool:
    """Whether a register holds 16 floats. On other processors it holds 8 or 4, and there are no
    more registers.
    """
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def has_dot_products() -> bool:
    """Whether this processor multiplies pairs of bfloat16 and fours of 8-bit numbers; all that have
    the first instruction have the second. Nothing that uses them compiles elsewhere.
    """
    features = llvm.get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512vnni", "avx512bf16"))


# This many vectors of sums fit into the registers, beside what is multiplied.
_MAX_SUM_VECTORS = 16 if has_wide_registers() else 4


class _Bfloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """LLVM types of 4 bytes of a, of 16 of them, and of 16 sums; the instruction that multiplies
    and adds, None where it is two.
    """

    four_bytes: Any
    operands: Any
    sums: Any
    instruction: str | None


ARITHMETIC = {  # by the elements of a
    types.float32: _Arithmetic(_FLOAT, _FLOAT_LANES, _FLOAT_LANES, None),
    types.uint16: _Arithmetic(
        _INT32,
        ir.VectorType(_Bfloat16(), PAIR_SIZE * LANES),
        _FLOAT_LANES,
        "llvm.x86.avx512bf16.dpbf16ps.512",
    ),
    types.uint8: _Arithmetic(_INT32, _INT32_LANES, _INT32_LANES, "llvm.x86.avx512.vpdpbusd.512"),
}


@intrinsic(prefer_literal=True)
def add_tile(
    typing_context: Any,
    min_height: Any,
    max_height: Any,
    num_vectors: Any,
    num_rows: Any,
    a: Any,
    b: Any,
    c: Any,
    num_steps: Any,
    prefetch_address: Any,
    widened_address: Any,
) -> Any:
    """c += a @ b for a tile of `num_rows` rows and `num_vectors` * 16 columns.

    a, b: (address, bytes between rows, an element, whose value does not matter), c: (address, bytes
    between rows). A row of b is what one step multiplies. The first three arguments are literal
    numbers, `num_rows` is a variable between the first two, or 0. As many bytes as b has
    are prefetched from `prefetch_address` on, which the caller is going to read next. Unless
    `widened_address` is the literal 0, b is written there in float32, without other columns.
    """
    heights = range(min_height.literal_value, max_height.literal_value + 1)
    a_element, b_element = a[2], b[2]
    widens_b = a_element == types.float32 and b_element == types.uint16
    stores_widened_b = not isinstance(widened_address, types.IntegerLiteral)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, row_count, a, b, c, *addresses = args
        (*a, _), (*b, _), c = (cgutils.unpack_tuple(builder, operand) for operand in (a, b, c))
        emitter = Emitter(builder, ARITHMETIC[a_element], widens_b, stores_widened_b)
        end_block = builder.append_basic_block("end")
        switch = builder.switch(row_count, end_block)
        for height in heights:
            basic_block = builder.append_basic_block(f"rows.{height}")
            switch.add_case(_INT64(height), basic_block)
            builder.position_at_end(basic_block)
            emitter.emit_tile(
                height, num_vectors.literal_value, _TileArguments(*a, *b, *c, *addresses)
            )
            builder.branch(end_block)
        builder.position_at_end(end_block)
        return context.get_dummy_value()

    literals = (min_height, max_height, num_vectors)
    integers = (types.int64, types.int64)
    operands = (types.Tuple((*integers, *element)) for element in ([a_element], [b_element], []))
    return types.void(*literals, types.int64, *operands, *integers, types.int64), generate


class _TileArguments(NamedTuple):
    """The values of `add_tile`'s arguments."""

    a: Any
    a_stride: Any
    b: Any
    b_stride: Any
    c: Any
    c_stride: Any
    num_steps: Any
    prefetch_address: Any
    widened_address: Any


@dataclass(frozen=True, slots=True)
class Emitter:
    """Emits LLVM's instructions for one arithmetic. Addresses and distances are int64 values."""

    builder: Any
    arithmetic: _Arithmetic
    widens_b: bool  # whether b has half as many bytes as the sums
    stores_widened_b: bool

    def emit_tile(self, height: int, num_vectors: int, tile_arguments: _TileArguments) -> None:
        """A loop over columns, as many at a time as have sums in registers."""
        width = min(num_vectors, max(1, _MAX_SUM_VECTORS // height))
        b_bytes_per_step = width * self._b_vector_bytes()
        with cgutils.for_range(self.builder, _INT64(num_vectors // width)) as parts:
            bytes_to_prefetch = self.builder.mul(_INT64(b_bytes_per_step), tile_arguments.num_steps)
            self._emit_columns(
                height,
                width,
                tile_arguments._replace(
                    b=self.offset_address(tile_arguments.b, parts.index, b_bytes_per_step),
                    c=self.offset_address(tile_arguments.c, parts.index, width * VECTOR_BYTES),
                    prefetch_address=self.offset_address(
                        tile_arguments.prefetch_address, parts.index, bytes_to_prefetch
                    ),
                ),
            )

    def _emit_columns(self, height: int, width: int, tile_arguments: _TileArguments) -> None:
        """A loop over steps, with `height` * `width` vectors of sums."""
        builder = self.builder
        c_pointers = [
            self.pointer(
                self.offset_address(
                    self.offset_address(tile_arguments.c, row, tile_arguments.c_stride),
                    vector,
                    VECTOR_BYTES,
                ),
                self.arithmetic.sums,
            )
            for row in range(height)
            for vector in range(width)
        ]
        # LLVM keeps these variables in registers.
        sums = [
            cgutils.alloca_once_value(builder, builder.load(c_pointer, align=4))
            for c_pointer in c_pointers
        ]
        with cgutils.for_range(builder, tile_arguments.num_steps) as steps:
            b_vectors = self._load_b(steps.index, width, tile_arguments)
            for row in range(height):
                a_row = self.offset_address(tile_arguments.a, row, tile_arguments.a_stride)
                a_lanes = self.broadcast(self.offset_address(a_row, steps.index, STEP_BYTES))
                for b_vector, sum_variable in zip(b_vectors, sums[row * width :], strict=False):
                    new_sum = self.multiply_add(a_lanes, b_vector, builder.load(sum_variable))
                    builder.store(new_sum, sum_variable)
        for c_pointer, sum_variable in zip(c_pointers, sums, strict=True):
            builder.store(builder.load(sum_variable), c_pointer, align=4)

    def _load_b(self, step_index: Any, width: int, tile_arguments: _TileArguments) -> list[Any]:
        """The vectors of a step; meanwhile as many bytes are prefetched."""
        builder, vector_bytes = self.builder, self._b_vector_bytes()
        row = self.offset_address(tile_arguments.b, step_index, tile_arguments.b_stride)
        vectors = [
            self._load_vector(self.offset_address(row, i, vector_bytes)) for i in range(width)
        ]
        for i, vector in enumerate(vectors):
            vector_index = builder.add(builder.mul(step_index, _INT64(width)), _INT64(i))
            self.prefetch(
                self.offset_address(tile_arguments.prefetch_address, vector_index, vector_bytes)
            )
            if self.stores_widened_b:
                place = self.offset_address(
                    tile_arguments.widened_address, vector_index, VECTOR_BYTES
                )
                builder.store(vector, self.pointer(place, _FLOAT_LANES), align=4)
        return vectors

    def _load_vector(self, address: Any) -> Any:
        builder = self.builder
        if not self.widens_b:
            lanes = builder.load(self.pointer(address, _INT32_LANES), align=4)
            return builder.bitcast(lanes, self.arithmetic.operands)
        halves = builder.load(self.pointer(address, ir.VectorType(ir.IntType(16), LANES)), align=2)
        bits = builder.shl(builder.zext(halves, _INT32_LANES), _INT32_LANES([16] * LANES))
        return builder.bitcast(bits, self.arithmetic.operands)

    def broadcast(self, address: Any) -> Any:
        """4 bytes, in every lane."""
        builder, element = self.builder, self.arithmetic.four_bytes
        undefined = ir.VectorType(element, LANES)(ir.Undefined)
        value = builder.load(self.pointer(address, element), align=4)
        one_lane = builder.insert_element(undefined, value, _INT32(0))
        lanes = builder.shuffle_vector(one_lane, undefined, _INT32_LANES([0] * LANES))
        return builder.bitcast(lanes, self.arithmetic.operands)

    def multiply_add(self, a_lanes: Any, b_vector: Any, sums: Any) -> Any:
        builder, arithmetic = self.builder, self.arithmetic
        if arithmetic.instruction is None:
            product = builder.fmul(a_lanes, b_vector, flags=_CONTRACT_FLAGS)
            return builder.fadd(sums, product, flags=_CONTRACT_FLAGS)
        parameters = [arithmetic.sums, arithmetic.operands, arithmetic.operands]
        instruction = declare_function(builder, arithmetic.instruction, arithmetic.sums, parameters)
        return builder.call(instruction, [sums, a_lanes, b_vector])

    def prefetch(self, address: Any) -> None:
        """Fetch a cache line into the second-level cache, so that waiting for memory does not block
        the first-level cache.
        """
        pointer = self.pointer(address, ir.IntType(8))
        parameters = [pointer.type, _INT32, _INT32, _INT32]
        prefetch = declare_function(self.builder, "llvm.prefetch.p0", ir.VoidType(), parameters)
        read, second_level, data = _INT32(0), _INT32(2), _INT32(1)
        self.builder.call(prefetch, [pointer, read, second_level, data])

    def _b_vector_bytes(self) -> int:
        return VECTOR_BYTES // 2 if self.widens_b else VECTOR_BYTES

    def offset_address(self, address: Any, count: Any, num_bytes: Any) -> Any:
        """The address `count` times `num_bytes` further on; both are values or Python's numbers."""
        count, num_bytes = (
            _INT64(factor) if isinstance(factor, int) else factor for factor in (count, num_bytes)
        )
        return self.builder.add(address, self.builder.mul(count, num_bytes))

    def pointer(self, address: Any, element: Any) -> Any:
        return self.builder.inttoptr(address, element.as_pointer())


def loop_over_rows(min_height: int, max_height: int, num_vectors: int) -> Callable[..., None]:
    """`add_tile` for any number of rows, in tiles of nearly the same height, because a low tile has
    too few sums to keep the multipliers busy. Heights lie between the two, as a caller must see to
    with its number of rows.
    """

    @exact_jit
    def add_rows(
        num_rows: int,
        a: tuple[int, int, Any],
        b: tuple[int, int, Any],
        c: tuple[int, int],
        num_steps: int,
        prefetch_address: int,
    ) -> None:
        a_address, a_stride, a_element = a
        c_address, c_stride = c
        num_tiles = (num_rows + max_height - 1) // max_height
        for tile in range(num_tiles):
            height = num_rows // num_tiles + (tile < num_rows % num_tiles)
            add_tile(
                min_height,
                max_height,
                num_vectors,
                height,
                (a_address, a_stride, a_element),
                b,
                (c_address, c_stride),
                num_steps,
                prefetch_address,
                0,
            )
            a_address += height * a_stride
            c_address += height * c_stride

    return add_rows  # type: ignore[no-any-return]


add_64_columns = loop_over_rows(1, 4, 4)
add_16_columns = loop_over_rows(1, 1, 1)
