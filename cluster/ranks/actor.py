"""One rank as a Ray actor: a thin shell around `workers.Worker`, which is loaded in the actor's
process only.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import pickle
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import ray

from cluster.ranks.cores import Claim, CoreShare, bind, usable_cores
from cluster.ranks.processes import ProcessId, mark
from configs.engine import ResolvedConfig
from scheduler.errors import WorkerError
from workers.progress import Progress
from workers.report import WorkerReport

if TYPE_CHECKING:
    from cluster.resources.placement import Place
    from scheduler.messages import StepMask, StepPlan
    from workers.worker import Worker

LOOK_AT_CORES_S = 2.0
LOOPBACK = "127.0.0.1"
SWITCH_INTERVAL_S = 0.0002  # for Ray's threads, which must let the computing one go on


class RankActor:
    """One rank in its own process, or a spare that can become one.

    A dedicated thread computes, in order; Ray's threads hand it plans and wait for results. So a
    step starts the moment the one before it ends, even if Ray is still busy returning that one's
    result. Concurrency groups: the default one for control, `steps`, with one thread per step that
    may be under way, `masks`, and `watch`, which answers whatever the others do.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        rank: int,
        engine_id: str,
        spare_gpus: list[str] | None = None,
    ) -> None:
        """`spare_gpus`: for a spare, the GPUs that it should see, as for `start`."""
        # Importing torch and compiling create no garbage, but so many objects that looking at them
        # takes the collector a sixth of the start. It is on again once the cache is there.
        gc.disable()
        self._process = mark(engine_id)
        logging.basicConfig(level=config.engine.log_level.upper())
        self._config = config
        self._rank = rank
        self._is_spare = spare_gpus is not None
        self._gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        # Once a process has looked for GPUs, it does not see others later, and a spare may look
        # while it warms up.
        show_gpus(self._gpus if spare_gpus is None else spare_gpus)
        self._worker: Worker | None = None
        self._ready = threading.Event()  # everything is imported by then
        self._computing = ThreadPoolExecutor(1, "rank")
        self._turn = threading.Condition()
        self._next_step = self._next_mask = 0
        self._replies: dict[int, Future[bytes]] = {}  # of steps that may be asked for again, by id
        if self._is_spare:
            threading.Thread(target=self._warm, name="warm", daemon=True).start()
        else:
            self._import()

    def identify(self) -> tuple[ProcessId, list[str]]:
        """Identify this process, and the GPUs that Ray gave it."""
        return self._process, self._gpus

    def wait_until_warm(self) -> ProcessId:
        """Returns when a spare could take over at once."""
        self._imported()
        return self._process

    def open_rendezvous(self, on_one_node: bool) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks, where only this machine can reach it if all
        ranks are `on_one_node`.
        """
        host = LOOPBACK if on_one_node else ray.util.get_node_ip_address()
        return self._imported().open_rendezvous(host)

    def start(
        self,
        address: tuple[str, int],
        place: Place,
        epoch: int,
        gpus: list[str],
        num_kv_blocks: int | None = None,
    ) -> WorkerReport:
        """Meet the other ranks and load. The ranks of a node share its cores. `gpus`: those of the
        ranks on this node, in their order. Each rank sees all of these, so that the ranks can reach
        each other's memory, and no GPU of another engine. `num_kv_blocks`: see `Worker.start`.
        """
        worker = self._imported()
        # Not before: a spare's main thread would wake up that often for the interpreter's lock
        # while the thread that warms up has the lock and no core.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        show_gpus(gpus)
        claim = Claim(
            group=f"{address[0]}:{address[1]} on {place.node_id}",
            local_rank=place.local_rank,
            ranks_on_node=place.ranks_on_node,
            cores=usable_cores(),
        )
        share = CoreShare(claim)
        cores, num_threads = share.now()

        def start() -> WorkerReport:
            bind(cores)
            return worker.start(address, num_threads, epoch, place.local_rank, num_kv_blocks)

        report = self._computing.submit(start).result()
        threading.Thread(
            target=self._follow, args=(share, cores), name="cores", daemon=True
        ).start()
        return report

    def allocate_cache(self, num_blocks: int) -> None:
        """See `Worker.allocate_cache`. The first rank then starts compiling the remaining kernels
        in the background.
        """
        worker = self._imported()
        self._computing.submit(worker.allocate_cache, num_blocks).result()
        gc.freeze()  # what exists now lives as long as the process
        gc.enable()
        worker.compile_other_steps_beside()

    @ray.method(concurrency_group="watch")
    def wait_for_end(self) -> None:
        """Never returns: the call fails when this process ends."""
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def progress(self) -> Progress:
        """How far this rank has come."""
        if self._worker is None:
            return Progress(phase="imports")
        return dataclasses.replace(self._worker.progress)

    @ray.method(concurrency_group="steps")
    def step(self, *pieces: bytes) -> bytes:
        """Run a step in its turn: the threads of a concurrency group may start out of order. Raises
        what the step raised. If the call is made again, the step runs once.

        Takes a `StepPlan` and returns a `StepResult`, both pickled: Ray passes bytes on unchanged,
        and its own pickling is slower.
        """
        worker = self._imported()
        plan: StepPlan = pickle.loads(b"".join(pieces))
        with self._turn:
            reply = self._replies.get(plan.step_id)
            if reply is None and plan.step_id < self._next_step:
                raise WorkerError(f"the result of step {plan.step_id} has been read")  # by now
            if is_first := reply is None:
                reply = self._replies[plan.step_id] = Future()
                self._replies.pop(plan.step_id - self._config.num_steps_ahead - 2, None)
        if is_first:
            try:
                reply.set_result(self._run(worker, plan))
            except Exception as error:
                reply.set_exception(error)
        return reply.result()

    def _run(self, worker: Worker, plan: StepPlan) -> bytes:
        with self._turn:
            limit_s = self._config.engine.step_timeout_s
            self._turn.wait_for(lambda: self._next_step == plan.step_id, limit_s)
            # Out of turn, the step fails with an error that says so.
            self._computing.submit(worker.launch, plan)
            self._next_step = plan.step_id + 1
            self._turn.notify_all()
        return pickle.dumps(worker.result(plan.step_id, plan.epoch), protocol=5)

    @ray.method(concurrency_group="masks")
    def mask(self, *pieces: bytes) -> None:
        """Give a step its mask, a pickled `StepMask`. The masks come in order of the steps; one
        that comes again is known.
        """
        mask: StepMask = pickle.loads(b"".join(pieces))
        with self._turn:
            is_known = mask.step_id < self._next_mask
            self._next_mask = max(self._next_mask, mask.step_id + 1)
        if not is_known:
            self._imported().mask(mask)

    def _follow(self, share: CoreShare, cores: tuple[int, ...]) -> None:
        """Give cores to engines that start, and take those of engines that end."""
        worker = self._imported()

        def move(cores: tuple[int, ...], num_threads: int) -> None:
            bind(cores)
            worker.set_num_threads(num_threads)

        while True:
            time.sleep(LOOK_AT_CORES_S)
            now, num_threads = share.now()
            if now != cores:
                cores = now
                self._computing.submit(move, cores, num_threads).result()

    def _import(self) -> None:
        # Imported here, because the driver imports this module and does not need torch.
        from workers.worker import Worker

        self._worker = Worker(self._config, self._rank)
        if not self._is_spare:
            self._ready.set()

    def _warm(self) -> None:
        """Warm up on a thread that runs only when nothing else needs the core, so as not to slow
        down the engine that serves. The thread that computes later does not inherit that priority.
        """
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._import()
        assert self._worker is not None
        try:
            self._worker.warm(load=self._config.engine.spares == "loaded")
        finally:
            self._ready.set()

    def _imported(self) -> Worker:
        self._ready.wait()
        assert self._worker is not None
        return self._worker


def show_gpus(gpus: list[str]) -> None:
    """Let this process see these GPUs. Ray does this itself for GPUs that it gives, unless it was
    told not to because other work in the cluster needs that.
    """
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
