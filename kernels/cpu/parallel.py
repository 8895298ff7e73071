"""Loops over tasks on the threads of `pool.py`.

`numba.prange` compiles a loop's body once for each layer that it wraps around it, takes the
interpreter's lock before each loop, even in a function that has released it, and its threads wait
for each other at the end, whether they have a core or not. `parallel_for` compiles the body as a
function and as a part of the loop, and takes no lock.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.atomics import declare_function
from kernels.cpu.pool import RUN_LOOP_SYMBOL

_BYTE = ir.IntType(8)


@intrinsic
def parallel_for(typing_context: Any, num_tasks: Any, task: Any, arguments: Any) -> Any:
    """Call `task(index, *arguments)` for each int64 index below `num_tasks`. `task` is a compiled
    function without a result, `arguments` a tuple. Each thread takes the
    tasks of its own part, which are consecutive, in order, and then those that are left of others.

    Raises `RuntimeError` in the calling kernel, after the last task, when a task raised.
    """
    signature = task.get_call_type(typing_context, (types.int64, *arguments.types), {})

    def generate(context: Any, builder: Any, _: Any, argument_values: Any) -> Any:
        task_count, _, argument_tuple = argument_values
        argument_tuple = _borrow_arrays(context, builder, arguments, argument_tuple)
        intp = context.get_value_type(types.intp)
        shared_struct = cgutils.alloca_once(
            builder, ir.LiteralStructType([_BYTE, argument_tuple.type])
        )
        for field_index, value in enumerate((_BYTE(0), argument_tuple)):
            builder.store(value, cgutils.gep_inbounds(builder, shared_struct, 0, field_index))
        run_function = _define_run_function(context, builder, task, signature, shared_struct.type)
        run_loop = declare_function(builder, RUN_LOOP_SYMBOL, ir.VoidType(), [intp] * 4)
        num_bytes = context.get_abi_sizeof(shared_struct.type.pointee)
        assert num_bytes % 8 == 0, "the pool writes down whole words"
        addresses = [builder.ptrtoint(pointer, intp) for pointer in (run_function, shared_struct)]
        builder.call(run_loop, [*addresses, task_count, intp(num_bytes)])
        has_raised = builder.load(cgutils.gep_inbounds(builder, shared_struct, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_true(builder, has_raised)):
            context.call_conv.return_user_exc(
                builder, RuntimeError, ("a task of a parallel loop raised an error",)
            )
        return context.get_dummy_value()

    return types.void(types.intp, task, arguments), generate


def _define_run_function(
    context: Any, caller_builder: Any, task: Any, signature: Any, shared_type: Any
) -> Any:
    """The function that a thread calls for tasks from `start` to `end`: `(shared_struct, start,
    end)`. `shared_struct`, an address, holds whether a task raised, and the arguments.
    """
    intp = context.get_value_type(types.intp)
    name = caller_builder.module.get_unique_name(f"{caller_builder.function.name}.tasks")
    run_function = ir.Function(
        caller_builder.module, ir.FunctionType(ir.VoidType(), [intp] * 3), name
    )
    run_function.linkage = "internal"
    builder = ir.IRBuilder(run_function.append_basic_block())
    shared_struct = builder.inttoptr(run_function.args[0], shared_type)
    start, end = run_function.args[1:]
    has_raised_pointer, argument_pointer = (
        cgutils.gep_inbounds(builder, shared_struct, 0, field_index) for field_index in range(2)
    )
    argument_tuple = builder.load(argument_pointer)
    compiled_task = task.dispatcher.get_compile_result(signature)
    context.add_linking_libs([compiled_task.library])
    task_function = context.declare_function(builder.module, compiled_task.fndesc)
    arguments = cgutils.unpack_tuple(builder, argument_tuple)
    with cgutils.for_range_slice(builder, start, end, intp(1)) as (index, _):
        status, _ = context.call_conv.call_function(
            builder, task_function, signature.return_type, signature.args, [index, *arguments]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_BYTE(1), has_raised_pointer)
    builder.ret_void()
    return run_function


def _borrow_arrays(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    """Arrays, also those in tuples, without their owners, so that threads do not take turns at
    counting references.
    """
    if isinstance(numba_type, types.BaseTuple):
        items = zip(numba_type.types, cgutils.unpack_tuple(builder, value), strict=True)
        borrowed_items = [_borrow_arrays(context, builder, *item) for item in items]
        return context.make_tuple(builder, numba_type, borrowed_items)
    if not isinstance(numba_type, types.Array):
        return value
    array = context.make_array(numba_type)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()
