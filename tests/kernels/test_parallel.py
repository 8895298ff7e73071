"""`parallel_for` runs every task once, on threads that share them, without Python's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest

from kernels.cpu import pool
from kernels.cpu.parallel import parallel_for


@numba.njit
def count_run(index: int, counts: tuple[int, Any]) -> None:
    counts[1][index] += counts[0]


@numba.njit(nogil=True)
def count_runs(num_loops: int, count: int, count_T: Any) -> None:
    for _ in range(num_loops):
        parallel_for(len(count_T), count_run, ((count, count_T),))


@numba.njit
def refuse(index: int, refused: int) -> None:
    if index == refused:
        raise ValueError("refused")


@numba.njit
def refuse_one(num_tasks: int, refused: int) -> None:
    parallel_for(num_tasks, refuse, (refused,))


@numba.njit(nogil=True)
def loop_until(ended: Any, num_loops: Any) -> None:
    while not ended[0]:
        parallel_for(2, refuse, (-1,))
        num_loops[0] += 1


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    pool.set_num_threads(request.param)
    yield request.param
    pool.set_num_threads(1)


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 3, 7, 64, 1001])
def test_every_task_of_every_loop_runs_once(num_tasks: int, num_threads: int) -> None:
    count_T = np.zeros(num_tasks, np.int64)
    count_runs(1000, 3, count_T)
    assert (count_T == 3000).all()


@pytest.mark.parametrize("refused", [0, 5, 9])
def test_an_error_in_a_task_is_raised_by_the_caller(refused: int, num_threads: int) -> None:
    with pytest.raises(RuntimeError, match="a task of a parallel loop raised an error"):
        refuse_one(10, refused)
    refuse_one(10, 10)


def test_loops_go_on_while_another_thread_holds_the_lock_of_the_interpreter() -> None:
    ended, num_loops = np.zeros(1, np.int64), np.zeros(1, np.int64)
    loop_until(np.ones(1, np.int64), num_loops)  # compiles it

    def loop() -> None:
        pool.set_num_threads(1)
        loop_until(ended, num_loops)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    limit_s = time.monotonic() + 30
    while not num_loops[0]:
        assert time.monotonic() < limit_s, "the thread did not begin to loop within 30 s"
        time.sleep(0.01)
    before = int(num_loops[0])
    sum(range(20_000_000))  # one call into C, which does not release the lock
    during = int(num_loops[0]) - before
    ended[0] = 1
    thread.join(30)
    assert not thread.is_alive()
    assert during > 3
