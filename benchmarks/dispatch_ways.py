"""The ways in which the dispatch benchmark runs a batch: through the driver with Ray, and the same
ranks without.

Each is a context manager that gives a function from a batch size to the median milliseconds between
decode steps.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import ray

from benchmarks.in_process import InProcessExecutor
from benchmarks.rank_pool import WorkerPool
from cluster import LLM, SamplingParams
from cluster.client.model_files import find_model
from cluster.engine.driver import Driver
from cluster.scheduler_limits import limits_of
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from workers.configuration import resolve_config

PROMPT_LEN = 32
NUM_SKIPPED = 10  # intervals left out at both ends, such as prefill and the first steps of a batch
Measure = Callable[[int], float]


def mean_step_ms(moments: list[float]) -> float:
    """Milliseconds per decode step: the mean of many steps, because some come in pairs."""
    inner = moments[NUM_SKIPPED:-NUM_SKIPPED]
    return 1000 * (inner[-1] - inner[0]) / (len(inner) - 1)


def _step_ms(moments: list[float]) -> float:
    gaps = [b - a for a, b in itertools.pairwise(moments)][NUM_SKIPPED:-NUM_SKIPPED]
    return 1000 * statistics.median(gaps)


@contextmanager
def with_ray(
    driver: type[Driver],
    ahead: int,
    steps: int,
    options: dict[str, Any],
    summed_up: Callable[[list[float]], float] = _step_ms,
) -> Iterator[Measure]:
    """An engine with a `TimedDriver`, `ahead` steps submitted beyond the unread one. `summed_up`:
    milliseconds per step, from the moments at which steps were done.
    """
    with mock.patch("cluster.engine.start.Driver", driver):
        llm = LLM(num_steps_ahead=ahead, **options)

    def run(size: int) -> float:
        params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0)
        llm.generate([_prompt(row) for row in range(size)], params)
        return summed_up(ray.get(llm._engine_processes.driver.take_moments.remote()))

    with llm:
        yield run


@contextmanager
def without_ray(options: dict[str, Any], steps: int, *, one_core: bool) -> Iterator[Measure]:
    """The same ranks in plain processes, with as many threads as an actor's rank takes."""
    engine = EngineConfig(**options)
    path = find_model(engine.model)
    config = resolve_config(engine, ModelConfig.from_dir(path), path, "cpu")
    num_threads = (
        1 if one_core else max(1, len(os.sched_getaffinity(0)) // engine.tensor_parallel_size)
    )
    if engine.tensor_parallel_size == 1:
        with ProcessPoolExecutor(
            1, get_context("spawn"), _start_rank, (config, num_threads)
        ) as pool:
            yield lambda size: _step_ms(pool.submit(_run_in_process, size, steps).result())
        return
    ranks = _PlainRanks(config, num_threads)
    try:
        yield lambda size: _step_ms(ranks.run(size, steps))
    finally:
        ranks.pool.close()


def _prompt(row: int) -> list[int]:
    return [row % 100 + 1] * PROMPT_LEN


def _add_batch(engine: Engine | Scheduler, size: int, steps: int) -> None:
    for row in range(size):
        sampling = ResolvedSampling(seed=0, max_tokens=steps, temperature=0.0)
        tokens = int32_array(_prompt(row))
        engine.add(
            Request(
                request_id=str(row),
                token_ids=tokens,
                num_prompt_tokens=PROMPT_LEN,
                sampling=sampling,
            )
        )


def _scheduler(config: ResolvedConfig, num_blocks: int) -> Scheduler:
    return Scheduler(limits_of(config, num_blocks))


def start_in_process(config: ResolvedConfig, num_threads: int) -> Engine:
    """Scheduler and model in this process, step by step."""
    executor = InProcessExecutor(config, num_threads)
    return Engine(_scheduler(config, executor.num_kv_blocks), executor, num_steps_ahead=0)


_engine_here: Engine | None = None  # threads of the process that is the only rank


def _start_rank(config: ResolvedConfig, num_threads: int) -> None:
    global _engine_here
    _engine_here = start_in_process(config, num_threads)


def _run_in_process(size: int, steps: int) -> list[float]:
    """The moments at which each step was done."""
    assert _engine_here is not None
    _add_batch(_engine_here, size, steps)
    moments = []
    while _engine_here.has_work:
        _engine_here.step()
        moments.append(time.perf_counter())
    return moments


class _PlainRanks:
    """Processes of a pool, one per rank, which get every plan of a batch at once, so they never
    wait for the scheduler.
    """

    def __init__(self, config: ResolvedConfig, num_threads: int) -> None:
        self.size = config.engine.tensor_parallel_size
        self.pool = WorkerPool(self.size)
        cores = sorted(os.sched_getaffinity(0))
        for rank, process in enumerate(self.pool._processes):
            if len(cores) >= self.size:  # each on its own cores, like the ranks of a node
                os.sched_setaffinity(
                    process.pid or 0, cores[rank * num_threads : (rank + 1) * num_threads]
                )
            self.pool.call(rank, "create", config, rank)
        address = self.pool.call(0, "open_rendezvous")
        reports = self.pool.call_all(self.size, "start", address, num_threads)
        num_blocks = min(report.num_kv_blocks for report in reports)
        self.pool.call_all(self.size, "allocate_cache", num_blocks)
        self.scheduler = _scheduler(config, num_blocks)

    def run(self, size: int, steps: int) -> list[float]:
        """The moments at which each step was done on every rank."""
        _add_batch(self.scheduler, size, steps)
        plans = []
        while (plan := self.scheduler.schedule()) is not None:
            plans.append(plan)
            for rank in range(self.size):
                self.pool.send(rank, "launch", plan)
        moments = []
        for _ in plans:
            for rank in range(self.size):
                self.pool.receive(rank)
            moments.append(time.perf_counter())
        for plan in plans:
            self.scheduler.apply(
                self.pool.call_all(self.size, "result", plan.step_id, plan.epoch)[0]
            )
        return moments
