"""One rank as a Ray actor: a thin shell around `workers.Worker`, which is loaded in the actor's
process only.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import ray

from configs.engine import ResolvedConfig
from workers.report import WorkerReport

if TYPE_CHECKING:
    from scheduler.messages import StepPlan

SWITCH_INTERVAL_S = (
    0.0002  # Ray's threads must hand the interpreter back to the computing thread within this time
)


class RankActor:
    """One rank in its own process.

    A dedicated thread computes, in order; Ray's threads hand it plans and wait for results. So the
    next step starts the moment the last one ends, whatever Ray still has to do to return that one's
    result. Concurrency groups: the default one for control, and `steps`, with one thread per step
    that may be under way.
    """

    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        # Importing torch and compiling create nothing that has to be collected, but many objects to
        # look at: the collector takes a sixth of the start. It is on again once the cache is there.
        gc.disable()
        # Imported here, because the driver imports this module and does not need torch.
        from workers.worker import Worker

        logging.basicConfig(level=config.engine.log_level.upper())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        # Ray does this itself, unless it was told not to for the sake of other work in the cluster
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._config = config
        self._worker = Worker(config, rank)
        self._computing = ThreadPoolExecutor(1, "rank")
        self._turn = threading.Condition()
        self._next_step = 0

    def open_rendezvous(self) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks."""
        return self._worker.open_rendezvous(ray.util.get_node_ip_address())

    def start(self, address: tuple[str, int], place: int, ranks_on_node: int) -> WorkerReport:
        """Meet the other ranks and load. The ranks of a node share its cores; this one is number
        `place` of them.
        """

        def start() -> WorkerReport:
            return self._worker.start(address, take_cores(place, ranks_on_node))

        return self._computing.submit(start).result()

    def allocate_cache(self, num_blocks: int) -> None:
        """See `Worker.allocate_cache`. The first rank then starts compiling the remaining kernels
        in the background.
        """
        self._computing.submit(self._worker.allocate_cache, num_blocks).result()
        gc.freeze()  # what exists now lives as long as the process, so no collection looks at it
        gc.enable()
        self._worker.compile_other_steps_beside()

    @ray.method(concurrency_group="steps")
    def phase(self) -> str:
        """Which phase of the start is running."""
        return self._worker.phase

    @ray.method(concurrency_group="steps")
    def step(self, data: bytes) -> bytes:
        """Run a step in its turn: the threads of a concurrency group may start out of order. Raises
        what the step raised.

        Takes a `StepPlan` and returns a `StepResult`, both pickled: Ray passes bytes on as they
        are, and its own pickling is slower.
        """
        plan: StepPlan = pickle.loads(data)
        with self._turn:
            limit_s = self._config.engine.step_timeout_s
            self._turn.wait_for(lambda: self._next_step == plan.step_id, limit_s)
            # Out of turn, it fails with an error that says so.
            self._computing.submit(self._worker.launch, plan)
            self._next_step = plan.step_id + 1
            self._turn.notify_all()
        return pickle.dumps(self._worker.result(plan.step_id, plan.epoch), protocol=5)


def take_cores(place: int, num_places: int) -> int:
    """Bind the calling thread, and threads it starts later, to its share of this process's cores;
    returns how many.

    Without this, two ranks may meet on one core while another is free. With more places than cores
    nothing is bound.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return max(1, (os.cpu_count() or 1) // num_places)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_places
    if share == 0:
        return 1
    os.sched_setaffinity(0, cores[place * share : (place + 1) * share])
    return share
