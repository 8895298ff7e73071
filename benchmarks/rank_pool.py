"""Four plain processes that serve as the ranks of one engine after another, forked from one that
has imported torch.

`PoolExecutor` is an executor over some of them: no Ray, gloo over loopback, digests compared after
each step.
"""

from __future__ import annotations

import multiprocessing
import traceback
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from configs.engine import ResolvedConfig
from scheduler.messages import StepMask, StepPlan, StepResult

NUM_PROCESSES = 4
CALL_TIMEOUT_S = 60.0


class WorkerPool:
    """Processes that each hold at most one `Worker` and answer calls to it in order."""

    def __init__(self, size: int = NUM_PROCESSES) -> None:
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[ForkServerProcess] = []
        self.grow(size)

    def grow(self, size: int) -> None:
        """Start as many more processes as make this many."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.rank_process"])
        for _ in range(size - len(self._processes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def send(self, rank: int, name: str, *args: Any) -> None:
        """Call without waiting; `receive` returns the answer."""
        self._connections[rank].send((name, args))

    def receive(self, rank: int) -> Any:
        """The answer to the oldest call that has not been answered yet. Raises what the call
        raised.
        """
        connection = self._connections[rank]
        if not connection.poll(CALL_TIMEOUT_S):
            raise TimeoutError(f"process {rank} did not answer within {CALL_TIMEOUT_S} s")
        value, error = connection.recv()
        if error is not None:
            raise error
        return value

    def call(self, rank: int, name: str, *args: Any) -> Any:
        self.send(rank, name, *args)
        return self.receive(rank)

    def call_all(self, ranks: int, name: str, *args: Any) -> list[Any]:
        """Call on the first `ranks` processes at once. Every one answers before anything is
        raised: the first error, with the others as notes.
        """
        for rank in range(ranks):
            self.send(rank, name, *args)
        answers = []
        for rank in range(ranks):
            try:
                answers.append(self.receive(rank))
            except Exception as error:
                answers.append(error)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for later_error in errors[1:]:
            errors[0].add_note("".join(traceback.format_exception(later_error)))
        if errors:
            raise errors[0]
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


class PoolExecutor:
    """An executor over `tensor_parallel_size` processes of a pool."""

    def __init__(self, pool: WorkerPool, config: ResolvedConfig, num_threads: int = 1) -> None:
        self.pool = pool
        self.size = config.engine.tensor_parallel_size
        for rank in range(self.size):
            pool.call(rank, "create", config, rank)
        address = pool.call(0, "open_rendezvous") if self.size > 1 else None
        self.reports = pool.call_all(self.size, "start", address, num_threads)
        self.num_kv_blocks = min(report.num_kv_blocks for report in self.reports)
        pool.call_all(self.size, "allocate_cache", self.num_kv_blocks)

    def launch(self, plan: StepPlan) -> None:
        for rank in range(self.size):
            self.pool.send(rank, "launch", plan)

    def send_mask(self, step_mask: StepMask) -> None:
        """Give a step its mask, before it is launched: the processes answer calls in order."""
        for rank in range(self.size):
            self.pool.send(rank, "put_mask", step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Does not wait: nothing is planned meanwhile."""

    def result(self, step_id: int, epoch: int = 0) -> StepResult:
        """Rank 0's result, once every rank has sampled the same tokens."""
        for rank in range(self.size):
            self.pool.send(rank, "result", step_id, epoch)
        results = [self._answer(rank) for rank in range(self.size)]
        assert [result.rank for result in results] == list(range(self.size))
        assert len({result.digest for result in results}) == 1, (
            f"step {step_id}: ranks disagree: {results}"
        )
        return results[0]

    def logits(self, plan: StepPlan) -> tuple[array[float], int]:
        """Logits of every token of a plan's one row, float32 flat, and the size of the
        vocabulary.
        """
        return self.pool.call_all(self.size, "logits", plan)[0]  # type: ignore[no-any-return]

    def check(self) -> None:
        self.pool.call_all(self.size, "check")

    def close(self) -> None:
        self.pool.call_all(self.size, "close")

    def _answer(self, rank: int) -> StepResult:
        while True:  # launches are answered too, with None
            answer = self.pool.receive(rank)
            if isinstance(answer, StepResult):
                return answer


@contextmanager
def executor_of(pool: WorkerPool, config: ResolvedConfig) -> Iterator[PoolExecutor]:
    """An executor for the block, which closes it in any case."""
    executor = PoolExecutor(pool, config)
    try:
        yield executor
    finally:
        executor.close()


def _serve(connection: Connection[Any, Any]) -> None:
    from benchmarks import rank_process

    host = rank_process.RankProcess()
    while True:
        try:
            name, args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[Any, Exception | None] = (host.call(name, args), None)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (None, error)
        connection.send(answer)
