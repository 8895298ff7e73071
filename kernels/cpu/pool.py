"""The threads that share the tasks of a loop: the caller, which needs the result, and helpers.

The caller never waits for a helper to come. It takes tasks, those of its own part first, until none
is left, and then waits only for helpers that are in the middle of one. So whoever else uses the
cores, a loop takes at most one task longer than on one thread. A helper watches for the next loop
for a moment, since a step is a row of short loops, and then sleeps. A loop wakes it that has run
for a while and is not done, so short loops wake nobody. A helper that had to wait for its core
leaves it to others for a while, twice as long each time.

Helpers sleep in `read` of an `eventfd` of their own. Everything else is in words of memory, each on
a line of its own or written rarely. `_STATE_LINE` holds the number of the loop, whether it is
`_OPEN_FLAG`, whether the caller is `_AWAITING_FLAG` the last helper in its own, and how many
helpers are inside. A helper enters with one atomic operation that fails unless the loop is still
open. The caller closes it with another: from then on nobody enters, and once nobody is inside,
nobody uses the arguments, which lie on the caller's stack. A call that comes while another thread's
loop runs, does all its tasks itself. For `recording.py`, loops are also written down as they begin.
"""

from __future__ import annotations

import _thread
import os
from typing import Any

import numba
import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.atomics import (
    call_tasks,
    compare_and_swap,
    fetch_and_add,
    load_acquire,
    now_ns,
    pause,
    post_event,
    store_release,
    thread_cpu_ns,
    wait_for_event,
)
from kernels.cpu.jit import exact_entry_jit, exact_jit, inlined_jit

_WATCH_NS = 100_000  # a helper without a task watches for the next loop this long
_WAKE_AFTER_NS = 20_000  # a loop that has run this long wakes helpers
_CALLER_WATCH_NS = 50_000  # the caller watches the last helpers this long, and then sleeps
_PAUSES_PER_LOOK = 16  # about 0.5 us
_LOST_CORE_NS = 50_000  # between two looks that are this far apart, something else had the core
# How long a helper leaves its core to others at first, and at most.
_FIRST_BACKOFF_NS, _MAX_BACKOFF_NS = 2_000_000, 64_000_000
_WAITING_SHARE_DIVISOR = 4  # it does if, while awake, it had to wait for more than one part in this

_MAX_THREADS = os.cpu_count() or 1
_LINE_BYTES = 128  # two cache lines: processors fetch them in pairs
_WORD_BYTES = 8
# Lines of the pool. Those of its threads follow, first the caller's.
(
    _NUM_THREADS_LINE,
    _LOOP_LOCK_LINE,
    _STATE_LINE,
    _LOOP_LINE,
    _SLEEP_AFTER_LINE,
    _COUNTS_LINE,
    _RECORD_LINE,
    _FIRST_THREAD_LINE,
) = range(8)
# Of _LOOP_LINE.
_FUNCTION_OFFSET, _ARGUMENT_OFFSET, _NUM_TASKS_OFFSET, _NUM_PARTS_OFFSET = range(
    0, 4 * _WORD_BYTES, _WORD_BYTES
)
_NUM_WOKEN_OFFSET, _NUM_HELPED_OFFSET = range(0, 2 * _WORD_BYTES, _WORD_BYTES)  # of _COUNTS_LINE
# Of _RECORD_LINE, addresses: where the next loop is written down, 0 for nowhere; and the end of the
# memory for loops, 0 once it was too small.
_NEXT_LOOP_OFFSET, _RECORD_END_OFFSET = range(0, 2 * _WORD_BYTES, _WORD_BYTES)
_HEADER_BYTES = 3 * _WORD_BYTES  # of a loop that is written down: function, tasks, argument's bytes
_NEXT_TASK_LINE, _SLEEP_LINE, _LINES_PER_THREAD = range(3)
_IS_ASLEEP_OFFSET, _WOKEN_AT_OFFSET, _BACKOFF_END_OFFSET, _READ_FD_OFFSET, _WRITE_FD_OFFSET = range(
    0, 5 * _WORD_BYTES, _WORD_BYTES
)  # of _SLEEP_LINE
_OPEN_FLAG, _AWAITING_FLAG, _LOOP_NUMBER_UNIT = 1 << 16, 1 << 17, 1 << 18  # of the word _STATE_LINE
_INSIDE_MASK = _OPEN_FLAG - 1  # helpers inside
_RAISED_MASK = 0xFF  # of the first word of an argument: not 0 if a task has raised

_SYMBOL = "eagleray_pool"


def _aligned_words() -> np.ndarray[Any, np.dtype[np.int64]]:
    num_bytes = _LINE_BYTES * (_FIRST_THREAD_LINE + _LINES_PER_THREAD * _MAX_THREADS)
    memory = np.zeros(num_bytes + _LINE_BYTES, np.uint8)
    return memory[-memory.ctypes.data % _LINE_BYTES :][:num_bytes].view(np.int64)


_pool_words = _aligned_words()
_pool_words[_NUM_THREADS_LINE * _LINE_BYTES // _WORD_BYTES] = 1
# Compiled code comes from a cache, and the words are elsewhere in each process.
llvm.add_symbol(_SYMBOL, _pool_words.ctypes.data)


@intrinsic
def _pool_address(typing_context: Any) -> Any:
    """Of the words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        variables, word = builder.module.globals, ir.IntType(64)
        if _SYMBOL not in variables:
            ir.GlobalVariable(builder.module, word, _SYMBOL)
        return builder.ptrtoint(variables[_SYMBOL], word)

    return types.int64(), generate


@inlined_jit
def _line_address(line: int) -> int:
    return _pool_address() + _LINE_BYTES * line  # type: ignore[no-any-return]


@inlined_jit
def _thread_line_address(thread: int, line: int) -> int:
    return _line_address(_FIRST_THREAD_LINE + _LINES_PER_THREAD * thread + line)  # type: ignore[no-any-return]


@inlined_jit
def _first_task(part: int, num_tasks: int, num_parts: int) -> int:
    """Parts differ by one task at most; rounded upward, so that the caller's is the largest."""
    return (part * num_tasks + num_parts - 1) // num_parts


# -- tasks -----------------------------------------------------------------------------------------


@exact_jit
def _run_tasks(thread: int) -> int:
    """Run tasks of the open loop until none is left, those of the thread's own part first; how many
    it has run.
    """
    loop_address = _line_address(_LOOP_LINE)
    function = load_acquire(loop_address + _FUNCTION_OFFSET)
    argument = load_acquire(loop_address + _ARGUMENT_OFFSET)
    num_tasks = load_acquire(loop_address + _NUM_TASKS_OFFSET)
    num_parts = load_acquire(loop_address + _NUM_PARTS_OFFSET)
    num_tasks_run, began_ns, next_to_wake = 0, np.int64(0), thread + 1
    for distance in range(num_parts):
        part = (thread + distance) % num_parts
        end = _first_task(part + 1, num_tasks, num_parts)
        while True:
            task = fetch_and_add(_thread_line_address(part, _NEXT_TASK_LINE), 1)
            if task >= end:
                break
            if next_to_wake < num_parts:
                now = now_ns()
                began_ns = began_ns if num_tasks_run else now
                next_to_wake = _wake_next(next_to_wake, num_parts, began_ns, now)
            call_tasks(function, argument, task, task + 1)
            num_tasks_run += 1
    return num_tasks_run


@exact_jit
def _wake_next(helper: int, num_parts: int, began_ns: int, now: int) -> int:
    """If this thread has been busy with the loop for a while, since `began_ns`, wake the first
    helper from `helper` on that sleeps and whose backoff has ended. Returns the helper that may be
    woken next.
    """
    while helper < num_parts:
        line_address = _thread_line_address(helper, _SLEEP_LINE)
        if (
            load_acquire(line_address + _IS_ASLEEP_OFFSET)
            and load_acquire(line_address + _BACKOFF_END_OFFSET) <= now
        ):
            if now - began_ns < _WAKE_AFTER_NS:
                return helper
            if compare_and_swap(line_address + _IS_ASLEEP_OFFSET, 1, 0):
                store_release(line_address + _WOKEN_AT_OFFSET, now)
                post_event(load_acquire(line_address + _WRITE_FD_OFFSET))
                fetch_and_add(_line_address(_COUNTS_LINE) + _NUM_WOKEN_OFFSET, 1)
                return helper + 1
        helper += 1
    return helper


# -- the caller ------------------------------------------------------------------------------------


@exact_jit
def _await_helpers() -> None:
    """Return when no helper is inside the loop, which is closed."""
    state_address = _line_address(_STATE_LINE)
    event = load_acquire(_thread_line_address(0, _SLEEP_LINE) + _READ_FD_OFFSET)
    deadline_ns = now_ns() + _CALLER_WATCH_NS
    while load_acquire(state_address) & _INSIDE_MASK and now_ns() < deadline_ns:
        for _ in range(_PAUSES_PER_LOOK):
            pause()
    state_word = load_acquire(state_address)
    while state_word & _INSIDE_MASK and not compare_and_swap(
        state_address, state_word, state_word | _AWAITING_FLAG
    ):
        state_word = load_acquire(state_address)
    if state_word & _INSIDE_MASK:
        # An event may be left over from an earlier loop, and signals end a wait.
        while load_acquire(state_address) & _INSIDE_MASK:
            wait_for_event(event)
        fetch_and_add(state_address, -_AWAITING_FLAG)


@exact_jit
def _share_tasks(function: int, argument: int, num_tasks: int) -> None:
    num_parts = min(load_acquire(_line_address(_NUM_THREADS_LINE)), num_tasks)
    if num_parts <= 1 or not compare_and_swap(_line_address(_LOOP_LOCK_LINE), 0, 1):
        call_tasks(function, argument, 0, num_tasks)
        return
    loop_address, state_address = _line_address(_LOOP_LINE), _line_address(_STATE_LINE)
    store_release(loop_address + _FUNCTION_OFFSET, function)
    store_release(loop_address + _ARGUMENT_OFFSET, argument)
    store_release(loop_address + _NUM_TASKS_OFFSET, num_tasks)
    store_release(loop_address + _NUM_PARTS_OFFSET, num_parts)
    for part in range(num_parts):
        store_release(
            _thread_line_address(part, _NEXT_TASK_LINE), _first_task(part, num_tasks, num_parts)
        )
    fetch_and_add(state_address, _LOOP_NUMBER_UNIT + _OPEN_FLAG)
    _run_tasks(0)
    if fetch_and_add(state_address, -_OPEN_FLAG) & _INSIDE_MASK:
        _await_helpers()
    store_release(_line_address(_LOOP_LOCK_LINE), 0)


@exact_jit
def _record_loop(function: int, argument: int, num_tasks: int, argument_bytes: int) -> None:
    """Behind the loops that have been written down. If it does not fit, it is left out, and the end
    of the memory becomes 0.
    """
    record_address = _line_address(_RECORD_LINE)
    entry_address = load_acquire(record_address + _NEXT_LOOP_OFFSET)
    if entry_address + _HEADER_BYTES + argument_bytes > load_acquire(
        record_address + _RECORD_END_OFFSET
    ):
        store_release(record_address + _RECORD_END_OFFSET, 0)
        return
    store_release(entry_address, function)
    store_release(entry_address + _WORD_BYTES, num_tasks)
    store_release(entry_address + 2 * _WORD_BYTES, argument_bytes)
    for offset in range(0, argument_bytes, _WORD_BYTES):
        store_release(entry_address + _HEADER_BYTES + offset, load_acquire(argument + offset))
    store_release(
        record_address + _NEXT_LOOP_OFFSET, entry_address + _HEADER_BYTES + argument_bytes
    )


@numba.cfunc(types.void(*[types.int64] * 4), cache=True, error_model="numpy")
def _run_loop(function: int, argument: int, num_tasks: int, argument_bytes: int) -> None:
    """Call `function(argument, start, end)` until all tasks below `num_tasks` are done; the first
    two are addresses. The argument is whole words.
    """
    if load_acquire(_line_address(_RECORD_LINE) + _NEXT_LOOP_OFFSET):
        _record_loop(function, argument, num_tasks, argument_bytes)
    _share_tasks(function, argument, num_tasks)


@exact_entry_jit
def replay_loops(address: int, end: int) -> bool:
    """Run the loops that were written down between two addresses; whether a task raised."""
    while address < end:
        argument = address + _HEADER_BYTES
        store_release(argument, load_acquire(argument) & ~_RAISED_MASK)
        _share_tasks(load_acquire(address), argument, load_acquire(address + _WORD_BYTES))
        if load_acquire(argument) & _RAISED_MASK:
            return True
        address = argument + load_acquire(address + 2 * _WORD_BYTES)
    return False


# -- helpers ---------------------------------------------------------------------------------------


@exact_entry_jit
def _run_helper(helper: int) -> None:
    """What a helper does until its process ends."""
    began_ns, began_thread_ns, backoff_ns = now_ns(), thread_cpu_ns(), 0
    while True:
        _watch(helper)
        awake_ns = now_ns() - began_ns
        waited_ns = awake_ns - (thread_cpu_ns() - began_thread_ns)
        if _WAITING_SHARE_DIVISOR * waited_ns > awake_ns:
            backoff_ns = min(max(2 * backoff_ns, _FIRST_BACKOFF_NS), _MAX_BACKOFF_NS)
        else:
            backoff_ns = 0
        began_ns = _sleep(helper, now_ns() + backoff_ns)
        began_thread_ns = thread_cpu_ns()


@exact_jit
def _watch(helper: int) -> None:
    """Help with one loop after the other, until none has come for a while, the core is lost, or
    torch needs it (`put_helpers_to_sleep`).
    """
    state_address, last_loop_number = _line_address(_STATE_LINE), np.int64(0)
    last_look_ns = last_work_ns = now_ns()
    while True:
        state_word = load_acquire(state_address)
        number = state_word // _LOOP_NUMBER_UNIT
        if state_word & _OPEN_FLAG and number != last_loop_number:
            last_loop_number = number
            if _help_with_loop(helper, number):
                last_look_ns = last_work_ns = now_ns()
                continue
        for _ in range(_PAUSES_PER_LOOK):
            pause()
        now = now_ns()
        must_sleep = now - last_work_ns > _WATCH_NS or now - last_look_ns > _LOST_CORE_NS
        if must_sleep or load_acquire(_line_address(_SLEEP_AFTER_LINE)) == number:
            return
        last_look_ns = now


@exact_jit
def _help_with_loop(helper: int, number: int) -> bool:
    """Help with a loop if it is still open; whether the helper has run a task of it."""
    state_address, state_word = _line_address(_STATE_LINE), np.int64(0)
    while True:
        state_word = load_acquire(state_address)
        if not state_word & _OPEN_FLAG or state_word // _LOOP_NUMBER_UNIT != number:
            return False
        if compare_and_swap(state_address, state_word, state_word + 1):
            break
    num_tasks_run = 0
    if helper < load_acquire(_line_address(_LOOP_LINE) + _NUM_PARTS_OFFSET):
        num_tasks_run = _run_tasks(helper)
    if num_tasks_run:
        fetch_and_add(_line_address(_COUNTS_LINE) + _NUM_HELPED_OFFSET, 1)
    state_before = fetch_and_add(state_address, -1)
    if state_before & _AWAITING_FLAG and state_before & _INSIDE_MASK == 1:
        post_event(load_acquire(_thread_line_address(0, _SLEEP_LINE) + _WRITE_FD_OFFSET))
    return num_tasks_run > 0


@exact_jit
def _sleep(helper: int, backoff_end_ns: int) -> int:
    """Sleep until a loop wakes the helper, not before `backoff_end_ns`; when it did."""
    line_address = _thread_line_address(helper, _SLEEP_LINE)
    store_release(line_address + _BACKOFF_END_OFFSET, backoff_end_ns)
    store_release(line_address + _IS_ASLEEP_OFFSET, 1)
    while load_acquire(line_address + _IS_ASLEEP_OFFSET):
        wait_for_event(load_acquire(line_address + _READ_FD_OFFSET))
    return load_acquire(line_address + _WOKEN_AT_OFFSET)  # type: ignore[no-any-return]


# -- from Python -----------------------------------------------------------------------------------

RUN_LOOP_SYMBOL = "eagleray_run_loop"  # the name of `_run_loop` in compiled code
llvm.add_symbol(RUN_LOOP_SYMBOL, _run_loop.address)
# The caller's and those of the helpers that were started: see `_new_event`.
_events: list[tuple[int, int]] = []


def set_num_threads(num_threads: int) -> None:
    """Set on how many threads the loops of this process run from now on, at most one per core. The
    calling thread starts helpers, which inherit its name, cores and priority.
    """
    num_threads = max(1, min(num_threads, _MAX_THREADS))
    if num_threads > 1:
        _run_helper.compile((types.int64,))
    while len(_events) < num_threads > 1:
        helper = len(_events)
        _events.append(_new_event())
        first_word = _word_index(
            _FIRST_THREAD_LINE + _LINES_PER_THREAD * helper + _SLEEP_LINE, _READ_FD_OFFSET
        )
        _pool_words[first_word : first_word + 2] = _events[-1]
        if helper:
            # Not `threading`: from Python 3.14 on it would give the thread a name of its own.
            _thread.start_new_thread(_run_helper, (helper,))
    _pool_words[_word_index(_NUM_THREADS_LINE)] = num_threads


def _new_event() -> tuple[int, int]:
    """Descriptors to read and to write: of an `eventfd`, or of a pipe where there is none (macOS).
    Linux assumes that whoever writes into a pipe will wait next, and may put the reader behind it
    on its core.
    """
    if not hasattr(os, "eventfd"):
        return os.pipe()
    event = os.eventfd(0)
    return event, event


def get_num_threads() -> int:
    """On how many threads the loops of this process run."""
    return int(_pool_words[_word_index(_NUM_THREADS_LINE)])


def put_helpers_to_sleep() -> None:
    """Have helpers sleep until the next loop: torch is about to use its own threads."""
    _pool_words[_word_index(_SLEEP_AFTER_LINE)] = (
        _pool_words[_word_index(_STATE_LINE)] // _LOOP_NUMBER_UNIT
    )


def record_loops_into(memory: np.ndarray[Any, np.dtype[np.int64]] | None) -> int:
    """Write the loops of this process from now on into `memory`; None: nowhere. Returns the end of
    what was written to the memory before, an address. Raises `RuntimeError` if that was too small.
    """
    next_loop_index, record_end_index = (
        _word_index(_RECORD_LINE, field) for field in (_NEXT_LOOP_OFFSET, _RECORD_END_OFFSET)
    )
    written_end = int(_pool_words[next_loop_index])
    if written_end and not _pool_words[record_end_index]:
        _pool_words[next_loop_index] = 0
        raise RuntimeError("more loops than there is memory to write them down")
    _pool_words[record_end_index] = 0 if memory is None else memory.ctypes.data + memory.nbytes
    _pool_words[next_loop_index] = 0 if memory is None else memory.ctypes.data
    return written_end


def helper_counts() -> tuple[int, int]:
    """How often a helper was woken so far, and how often one had a task of a loop."""
    return int(_pool_words[_word_index(_COUNTS_LINE, _NUM_WOKEN_OFFSET)]), int(
        _pool_words[_word_index(_COUNTS_LINE, _NUM_HELPED_OFFSET)]
    )


def _word_index(line: int, offset_bytes: int = 0) -> int:
    return (line * _LINE_BYTES + offset_bytes) // _WORD_BYTES


def _forget_helpers() -> None:
    """A forked process has none of the threads."""
    _events.clear()
    _pool_words[:] = 0
    _pool_words[_word_index(_NUM_THREADS_LINE)] = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
