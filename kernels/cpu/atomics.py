"""What compiled code needs to share work: words of memory that several threads or processes read
and write, clocks, events to wait for, and calls of a function by its address.

Addresses are int64; words are aligned int64.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_NANOSECONDS = 1_000_000_000


def _word_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The word at an address; later operations in program order are not moved before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word_at(builder, args[0]), ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a word at an address; earlier operations in program order are not moved after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word_at(builder, args[0])
        builder.store_atomic(args[1], word, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_and_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address; what it was before. No operation is moved across."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word_at(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store a word at an address if `expected` is there; whether it was. No operation is moved
    across.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word_at(builder, args[0])
        outcome = builder.cmpxchg(word, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(outcome, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def call_tasks(typing_context: Any, function: Any, argument: Any, start: Any, end: Any) -> Any:
    """Call the function at an address, `(argument, start, end)`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_WORD] * 3)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            builder.call(declare_function(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif platform.machine() in ("aarch64", "arm64"):
            barrier = declare_function(builder, "llvm.aarch64.isb", ir.VoidType(), [_INT])
            builder.call(barrier, [_INT(15)])
        return context.get_dummy_value()

    return types.void(), generate


def _clock(clock_id: int) -> Callable[..., Any]:
    @intrinsic
    def read(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))  # a timespec
            function = declare_function(builder, "clock_gettime", _INT, [_INT, pointer.type])
            builder.call(function, [_INT(clock_id), pointer])
            seconds, nanoseconds = (
                builder.load(cgutils.gep_inbounds(builder, pointer, 0, index)) for index in (0, 1)
            )
            return builder.add(builder.mul(seconds, _WORD(_NANOSECONDS)), nanoseconds)

        return types.int64(), generate

    return read  # type: ignore[no-any-return]


# Nanoseconds: of a clock that never goes back, and that the calling thread has run on a core.
now_ns = _clock(time.CLOCK_MONOTONIC)
thread_cpu_ns = _clock(time.CLOCK_THREAD_CPUTIME_ID)


@intrinsic
def wait_for_event(typing_context: Any, descriptor: Any) -> Any:
    """Wait until an event has been posted, and take it. A signal may end the wait before."""
    return types.void(types.int64), _word_call("read")


@intrinsic
def post_event(typing_context: Any, descriptor: Any) -> Any:
    """End the wait of whoever waits, or the next one. For an `eventfd` or a pipe."""
    return types.void(types.int64), _word_call("write")


def _word_call(name: str) -> Callable[..., Any]:
    """A call of the system's `read` or `write`, as `name` says, with one word, which is 1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = cgutils.alloca_once_value(builder, _WORD(1))
        function = declare_function(builder, name, _WORD, [_INT, word.type, _WORD])
        builder.call(function, [builder.trunc(args[0], _INT), word, _WORD(_WORD.width // 8)])
        return context.get_dummy_value()

    return generate


def declare_function(builder: Any, name: str, result_type: Any, parameter_types: list[Any]) -> Any:
    """A function of this name, to be called: of the system, of LLVM, or one of the symbols that
    were added to it.
    """
    function_type = ir.FunctionType(result_type, parameter_types)
    return cgutils.get_or_insert_function(builder.module, function_type, name)
