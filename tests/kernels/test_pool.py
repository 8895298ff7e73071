"""The threads of loops: helpers come when it pays, and the caller waits for none that does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import pytest

from configs.paths import SOURCE_ROOT
from kernels.cpu import pool
from kernels.cpu.parallel import parallel_for

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread")

SHORT, LONG = 100, 1_000_000  # rounds of a task: about 0.1 us and 1 ms
TIMEOUT_S = 60.0  # for what takes milliseconds on a quiet machine


@numba.njit
def work(index: int, num_rounds: int, value_T: Any) -> None:
    value = value_T[index]
    for _ in range(num_rounds):
        value = value * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    value_T[index] = value


@numba.njit(nogil=True)
def run_loops(num_loops: int, num_rounds: int, value_T: Any) -> None:
    for _ in range(num_loops):
        parallel_for(len(value_T), work, (num_rounds, value_T))


def values(num_tasks: int) -> Any:
    return np.arange(num_tasks, dtype=np.uint64)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    run_loops(1, 1, values(2))  # compiles them
    pool.set_num_threads(2)
    yield
    pool.set_num_threads(1)


def wait_until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < limit_s, f"it has not come true within {TIMEOUT_S} s"


def helps_with_long_loops() -> bool:
    num_helped = pool.helper_counts()[1]
    run_loops(1, LONG, values(16))
    return pool.helper_counts()[1] > num_helped


@contextmanager
def busy_cores() -> Iterator[None]:
    """Another program that computes on every core."""
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run_program(program: str) -> str:
    """What it prints; it has the names of this module."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import *\n{program}"],
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout


def test_long_loops_wake_a_helper() -> None:
    wait_until(helps_with_long_loops)


def test_short_loops_wake_no_helper() -> None:
    time.sleep(0.01)  # until it sleeps
    num_woken = pool.helper_counts()[0]
    for _ in range(1000):
        run_loops(1, SHORT, values(16))
    # A loop that loses its core for a moment takes long.
    assert pool.helper_counts()[0] - num_woken < 50


def test_a_helper_sleeps_when_no_loop_comes() -> None:
    wait_until(helps_with_long_loops)
    before_s = time.process_time()
    time.sleep(1)
    assert time.process_time() - before_s < 0.1


def test_a_loop_ends_whether_its_helper_comes_or_not() -> None:
    expected = values(16)
    run_loops(10, LONG, expected)
    program = """
pool._thread.start_new_thread = lambda *_: None
pool.set_num_threads(2)
run_loops(10, LONG, value_T := values(16))
print(pool.helper_counts(), value_T.sum())
"""
    assert run_program(program) == f"(0, 0) {expected.sum()}\n"


def test_two_threads_use_little_more_processor_time_than_one_when_the_cores_are_busy() -> None:
    """Under OpenMP, threads that waited for each other used ten times as much."""
    seconds = {}
    with busy_cores():
        for num_threads in (1, 2):
            pool.set_num_threads(num_threads)
            before_s = time.process_time()
            for _ in range(300):
                run_loops(10, 50 * SHORT, values(16))
                time.sleep(0.0005)
            seconds[num_threads] = time.process_time() - before_s
    assert seconds[2] < 2 * seconds[1]


def test_loops_of_several_threads_at_once_do_not_disturb_each_other() -> None:
    expected = values(16)
    run_loops(300, 50 * SHORT, expected)
    results = [values(16) for _ in range(3)]
    threads = [
        threading.Thread(target=run_loops, args=(300, 50 * SHORT, value_T)) for value_T in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert all((value_T == expected).all() for value_T in results)


def test_a_forked_process_runs_loops_without_the_helpers_of_its_parent() -> None:
    program = """
pool.set_num_threads(2)
wait_until(helps_with_long_loops)
child = os.fork()
if not child:
    run_loops(10, LONG, values(16))
    os._exit(pool.get_num_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_program(program) == "1\n"
