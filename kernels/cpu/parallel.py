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

    def generate(context: Any, builder: Any, _: Any, argument_values: Any) -> Any:
        task_count, _, argument_tuple = argument_values
        argument_tuple = _borrowed(context, builder, arguments, argument_tuple)
        intp = context.get_value_type(types.intp)
        num_threads = builder.call(_declare(builder, "get_num_threads", intp, []), [])
        shared_struct = cgutils.alloca_once(
            builder, ir.LiteralStructType([_BYTE, intp, intp, argument_tuple.type])
        )
        for field_index, value in enumerate((_BYTE(0), task_count, num_threads, argument_tuple)):
            builder.store(value, cgutils.gep_inbounds(builder, shared_struct, 0, field_index))
        run_function = _run_of_tasks(context, builder, task, signature, shared_struct.type)

        # numba's threads are made for universal functions of numpy, which walk over arrays. Here
        # the only array is one of bytes at address 0, with one element per thread, so the address
        # of an element is the number of a thread.
        bytes_base = cgutils.alloca_once_value(builder, ir.Constant(_POINTER, None))
        size, step = (
            cgutils.alloca_once_value(builder, number) for number in (num_threads, intp(1))
        )
        pointers = [
            builder.bitcast(pointer, _POINTER)
            for pointer in (run_function, bytes_base, size, step, shared_struct)
        ]
        parallel_for_function = _declare(
            builder, "numba_parallel_for", ir.VoidType(), [_POINTER] * 5 + [intp] * 3
        )
        builder.call(parallel_for_function, [*pointers, intp(0), intp(1), num_threads])
        has_raised = builder.load(cgutils.gep_inbounds(builder, shared_struct, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_true(builder, has_raised)):
            context.call_conv.return_user_exc(
                builder, RuntimeError, ("a task of a parallel loop raised an error",)
            )
        return context.get_dummy_value()

    return types.void(types.intp, task, arguments), generate


def _run_of_tasks(context: Any, caller: Any, task: Any, signature: Any, shared_type: Any) -> Any:
    """The function that a thread calls, in the form of the inner loop of a universal function:
    `(thread, size, step, shared_struct)`. It runs the part of the tasks that belongs to `*size`
    threads from `*thread` on. `shared_struct` holds whether a task raised, the number of tasks,
    that of threads, and the arguments.
    """
    intp = context.get_value_type(types.intp)
    parameter_types = [_POINTER.as_pointer(), intp.as_pointer(), intp.as_pointer(), _POINTER]
    name = caller.module.get_unique_name(f"{caller.function.name}.tasks")
    run_function = ir.Function(caller.module, ir.FunctionType(ir.VoidType(), parameter_types), name)
    run_function.linkage = "internal"
    builder = ir.IRBuilder(run_function.append_basic_block())
    shared_struct = builder.bitcast(run_function.args[3], shared_type)
    raised_pointer, *field_pointers = (
        cgutils.gep_inbounds(builder, shared_struct, 0, field_pointer) for field_pointer in range(4)
    )
    task_count, num_threads, argument_tuple = (
        builder.load(field_pointer) for field_pointer in field_pointers
    )
    thread = builder.ptrtoint(builder.load(run_function.args[0]), intp)
    rounding = builder.sub(num_threads, intp(1))  # upward, so that the caller's part comes first
    start, end = (
        builder.sdiv(builder.add(builder.mul(task_count, thread_number), rounding), num_threads)
        for thread_number in (thread, builder.add(thread, builder.load(run_function.args[1])))
    )
    compiled_task = task.dispatcher.get_compile_result(signature)
    context.add_linking_libs([compiled_task.library])
    task_function = context.declare_function(builder.module, compiled_task.fndesc)
    arguments = cgutils.unpack_tuple(builder, argument_tuple)
    with cgutils.for_range_slice(builder, start, end, intp(1)) as (index, _):
        status, _ = context.call_conv.call_function(
            builder, task_function, signature.return_type, signature.args, [index, *arguments]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_BYTE(1), raised_pointer)
    builder.ret_void()
    return run_function


def _borrowed(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    """Arrays, also those in tuples, without their owners, so that threads do not take turns at
    counting references.
    """
    if isinstance(numba_type, types.BaseTuple):
        items = zip(numba_type.types, cgutils.unpack_tuple(builder, value), strict=True)
        borrowed_items = [_borrowed(context, builder, *item) for item in items]
        return context.make_tuple(builder, numba_type, borrowed_items)
    if not isinstance(numba_type, types.Array):
        return value
    array = context.make_array(numba_type)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


def _declare(builder: Any, name: str, result_type: Any, parameter_types: list[Any]) -> Any:
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result_type, parameter_types), name
    )


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
