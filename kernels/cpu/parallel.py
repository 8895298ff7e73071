"""Loops over tasks on torch's OpenMP threads.

`numba.prange` compiles a loop's body once for each layer that it wraps around it, and takes the
interpreter's lock before each loop, even in a function that has released it, so every kernel would
wait for the other Python threads of a rank. `parallel_for` calls numba's threads directly: the body
is compiled as a function and as a part of the loop, and no lock is taken.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()


@intrinsic
def parallel_for(typing_context: Any, num_tasks: Any, task: Any, arguments: Any) -> Any:
    """Call `task(index, *arguments)` for each int64 index below `num_tasks`. `task` is a compiled
    function without a result, `arguments` a tuple. Each thread takes one run of consecutive
    indices; the lengths of the runs differ by one at most.

    Raises `RuntimeError` in the calling kernel, after all threads have ended, when a task raised.
    """
    signature = task.get_call_type(typing_context, (types.int64, *arguments.types), {})

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        count, _, packed = values
        packed = context.make_tuple(
            builder,
            arguments,
            [
                _borrowed(context, builder, each, value)
                for each, value in zip(
                    arguments.types, cgutils.unpack_tuple(builder, packed), strict=True
                )
            ],
        )
        word = context.get_value_type(types.intp)
        num_threads = builder.call(_declare(builder, "get_num_threads", word, []), [])
        shared = cgutils.alloca_once(
            builder, ir.LiteralStructType([_BYTE, word, word, packed.type])
        )
        for place, value in enumerate((_BYTE(0), count, num_threads, packed)):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, place))
        run = _run_of_tasks(context, builder, task, signature, shared.type)

        # numba's threads are made for universal functions of numpy, which walk over arrays. Here
        # the only array is one of bytes at address 0, with one element per thread, so the address
        # of an element is the number of a thread.
        base = cgutils.alloca_once_value(builder, ir.Constant(_POINTER, None))
        size, step = (cgutils.alloca_once_value(builder, each) for each in (num_threads, word(1)))
        pointers = [builder.bitcast(each, _POINTER) for each in (run, base, size, step, shared)]
        on_threads = _declare(
            builder, "numba_parallel_for", ir.VoidType(), [_POINTER] * 5 + [word] * 3
        )
        builder.call(on_threads, [*pointers, word(0), word(1), num_threads])
        raised = builder.load(cgutils.gep_inbounds(builder, shared, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_true(builder, raised)):
            context.call_conv.return_user_exc(
                builder, RuntimeError, ("a task of a parallel loop raised an error",)
            )
        return context.get_dummy_value()

    return types.void(types.intp, task, arguments), generate


def _run_of_tasks(context: Any, caller: Any, task: Any, signature: Any, shared_type: Any) -> Any:
    """The function that a thread calls, in the form of the inner loop of a universal function:
    `(thread, size, step, shared)`. It runs the part of the tasks that belongs to `*size` threads
    from `*thread` on. `shared` holds whether a task raised, the number of tasks, that of threads,
    and the arguments.
    """
    word = context.get_value_type(types.intp)
    parameters = [_POINTER.as_pointer(), word.as_pointer(), word.as_pointer(), _POINTER]
    name = caller.module.get_unique_name(f"{caller.function.name}.tasks")
    run = ir.Function(caller.module, ir.FunctionType(ir.VoidType(), parameters), name)
    run.linkage = "internal"
    builder = ir.IRBuilder(run.append_basic_block())
    shared = builder.bitcast(run.args[3], shared_type)
    raised, *places = (cgutils.gep_inbounds(builder, shared, 0, place) for place in range(4))
    count, num_threads, packed = (builder.load(place) for place in places)
    thread = builder.ptrtoint(builder.load(run.args[0]), word)
    rounding = builder.sub(num_threads, word(1))  # upward, so that the caller's part comes first
    start, end = (
        builder.sdiv(builder.add(builder.mul(count, number), rounding), num_threads)
        for number in (thread, builder.add(thread, builder.load(run.args[1])))
    )
    compiled = task.dispatcher.get_compile_result(signature)
    context.add_linking_libs([compiled.library])
    function = context.declare_function(builder.module, compiled.fndesc)
    arguments = cgutils.unpack_tuple(builder, packed)
    with cgutils.for_range_slice(builder, start, end, word(1)) as (index, _):
        status, _ = context.call_conv.call_function(
            builder, function, signature.return_type, signature.args, [index, *arguments]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_BYTE(1), raised)
    builder.ret_void()
    return run


def _borrowed(context: Any, builder: Any, type_: Any, value: Any) -> Any:
    """An array without its owner, so that threads do not take turns at counting references."""
    if not isinstance(type_, types.Array):
        return value
    array = context.make_array(type_)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


def _declare(builder: Any, name: str, result: Any, parameters: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads for kernels that the calling thread runs from now on."""
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def _start_threads() -> None:
    """Make numba's functions for loops known to compiled code. Its OpenMP layer must find torch's
    OpenMP library before any other, so that both use the same pool of threads: of two pools, each
    would spin while the other works. Where torch brings no libgomp (macOS), numba uses its own.
    """
    num_torch_threads = torch.get_num_threads()
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        numba.config.THREADING_LAYER = "omp"
        break
    numba.get_num_threads()  # starts them, and gives torch's OpenMP all cores
    torch.set_num_threads(num_torch_threads)


_start_threads()
