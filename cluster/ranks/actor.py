"""One rank as a Ray actor around `workers.Worker`, which only the actor's process imports."""

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
from contextlib import suppress
from typing import TYPE_CHECKING

import ray

from cluster.error_kinds import reason_of
from cluster.log import log_to_stderr
from cluster.ranks.causes import enable_crash_report
from cluster.ranks.cores import CoreClaim, CoreShare, pin_to_cores, usable_cores
from cluster.ranks.processes import ProcessId, mark_this_process, set_scheduling_policy
from configs.engine import ResolvedConfig
from scheduler.errors import WorkerError
from workers.memory.inheritance import InheritedMemory, RankMemoryHandles
from workers.progress import Progress
from workers.report import WorkerReport

if TYPE_CHECKING:
    from cluster.resources.placement import Place
    from scheduler.messages import StepMask, StepPlan
    from workers.worker import Worker

CORE_CHECK_PERIOD_S = 2.0
LOOPBACK_ADDRESS = "127.0.0.1"
SWITCH_INTERVAL_S = 0.0002  # so that Ray's threads soon let the computing thread continue

logger = logging.getLogger(__name__)


class RankActor:
    """One rank in its own process, or a spare that can become one.

    A dedicated thread computes, in order; Ray's threads give it plans and wait for results. So a
    step starts the moment the one before it ends, even while Ray is still returning that one's
    result. Concurrency groups: the default one for control; `steps`, with one thread per step that
    may be under way; `masks`; `watch`, which answers whatever the others do; and `end`, whose
    thread is never free again.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        rank: int,
        engine_id: str,
        spare_gpus: list[str] | None = None,
        inherited_memory: RankMemoryHandles | None = None,
    ) -> None:
        """For a spare: `spare_gpus`, the GPUs that it should see, as for `start`;
        `inherited_memory`, the memory of its rank.
        """
        # Importing torch and compiling create no garbage, but so many objects that visiting them
        # takes the collector a sixth of the start. It is on again once the cache is allocated.
        gc.disable()
        self._process = mark_this_process(engine_id)
        enable_crash_report(self._process.mark_fd)
        self._inherited_memory: InheritedMemory | None = None
        if inherited_memory is not None:  # soon, since the rank may die at any moment
            self._inherited_memory = InheritedMemory.open(inherited_memory)
        log_to_stderr(config.engine.log_level)
        self._config = config
        self._rank = rank
        self._began_as_spare = spare_gpus is not None
        self._gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        # Once a process has listed its GPUs, it does not see others later, and a spare may list
        # them while it warms up.
        show_gpus(self._gpus if spare_gpus is None else spare_gpus)
        self._worker: Worker | None = None
        self._warm_error: Exception | None = None  # of a spare that cannot warm up
        self._claim: CoreClaim | None = None  # from `start` on
        self._is_standby = False
        self._ready_event = threading.Event()
        self._compute_executor = ThreadPoolExecutor(1, "compute")
        self._order_condition = threading.Condition()  # guards the fields below
        self._next_step_id = self._next_mask_step_id = 0
        # By step id: results of recent steps, in case a call was lost and is made again.
        self._replies: dict[int, Future[bytes]] = {}
        if self._began_as_spare:
            threading.Thread(target=self._warm, name="warm", daemon=True).start()
        else:
            self._import()

    def identify(self) -> tuple[ProcessId, list[str]]:
        """This process, and the GPUs that Ray gave it."""
        return self._process, self._gpus

    def wait_until_warm(self) -> ProcessId:
        """Returns when a spare could take over at once. Raises `WorkerError` if it never can."""
        self._ready_event.wait()
        if self._warm_error is not None:
            reason = reason_of(self._warm_error)
            raise WorkerError(f"a spare of rank {self._rank} cannot warm up: {reason}")
        return self._process

    def open_rendezvous(self, is_single_node: bool) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks; for this machine alone if `is_single_node`."""
        host = LOOPBACK_ADDRESS if is_single_node else ray.util.get_node_ip_address()
        return self._wait_for_worker().open_rendezvous(host)

    def start(
        self,
        rendezvous_address: tuple[str, int],
        place: Place,
        epoch: int,
        gpus: list[str],
        num_kv_blocks: int | None = None,
        *,
        is_standby: bool = False,
    ) -> WorkerReport:
        """Connect to the other ranks and load the weights. The ranks of a node share its cores.
        `gpus`: those of the ranks on this node, in order. Each rank sees all of these, so that the
        ranks can reach each other's memory, and no GPU of another engine. `num_kv_blocks`: see
        `Worker.start`. One that `is_standby` uses one thread and claims no cores until `take_over`;
        it raises `WorkerError` if it would have to load weights that another process holds.
        """
        worker = self._wait_for_worker()
        if is_standby and not worker.has_weights:
            raise WorkerError(
                f"rank {self._rank} stands by without the weights of the rank that serves, and"
                " would hold them a second time: its log says why they cannot be shared"
            )
        show_gpus(gpus)
        self._claim = CoreClaim(
            engine=f"{rendezvous_address[0]}:{rendezvous_address[1]} on {place.node_id}",
            local_rank=place.local_rank,
            ranks_on_node=place.ranks_on_node,
            cores=usable_cores(),
        )
        self._is_standby = is_standby
        num_threads = 1 if is_standby else self._share_cores()
        return self._compute_executor.submit(
            worker.start, rendezvous_address, num_threads, epoch, place.local_rank, num_kv_blocks
        ).result()

    def take_over(self, epoch: int, keeps_cache: bool) -> None:
        """For a rank that has stood by: the steps of `epoch` follow, as `Worker.take_over`."""
        worker = self._wait_for_worker()
        set_scheduling_policy("self", "SCHED_OTHER")
        # On the thread whose device the rank's GPU is.
        self._compute_executor.submit(worker.take_over, epoch, keeps_cache=keeps_cache).result()
        if self._is_standby:  # otherwise the call was made again
            self._is_standby = False
            self._compute_executor.submit(worker.set_num_threads, self._share_cores()).result()
            worker.start_background_compilation()

    def _share_cores(self) -> int:
        """Move the computing thread to this rank's share of the cores, now and whenever engines on
        this machine start or end. Returns on how many threads it may compute.
        """
        # Not earlier: a spare's main thread would wake up that often for the interpreter's lock
        # while the thread that warms up holds the lock and waits for a core.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        assert self._claim is not None
        share = CoreShare(self._claim)
        cores, num_threads = present = share.cores_and_num_threads()
        self._compute_executor.submit(pin_to_cores, cores).result()
        threading.Thread(
            target=self._follow_core_share, args=(share, present), name="cores", daemon=True
        ).start()
        return num_threads

    def allocate_cache(self, num_blocks: int) -> RankMemoryHandles:
        """See `Worker.allocate_cache`. The first rank then compiles the remaining kernels in the
        background. Returns where its memory is.
        """
        worker = self._wait_for_worker()
        self._compute_executor.submit(
            worker.allocate_cache, num_blocks, is_standby=self._is_standby
        ).result()
        gc.freeze()  # what exists now lives as long as the process
        gc.enable()
        if self._is_standby:
            # Ray's main thread wakes up 100 times a second, for signals.
            set_scheduling_policy("self", "SCHED_BATCH")
        else:
            worker.start_background_compilation()
        return worker.memory()

    @ray.method(concurrency_group="end")
    def wait_for_end(self) -> None:
        """Never returns: the call fails when this process ends. One that is made again waits for
        the thread of the first.
        """
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def progress(self) -> Progress:
        """What this rank is doing, and its counters."""
        if self._worker is None:
            return Progress(phase="imports")
        return dataclasses.replace(self._worker.progress)

    @ray.method(concurrency_group="steps")
    def step(self, *pieces: bytes) -> bytes:
        """Run a step in its turn: the threads of a concurrency group may start out of order. Raises
        what the step raised. A step runs once, even if the call is made again.

        Takes a `StepPlan`, pickled and cut into `pieces`, and returns a pickled `StepResult`: Ray
        passes bytes on unchanged, and its own pickling is slower.
        """
        worker = self._wait_for_worker()
        plan: StepPlan = pickle.loads(b"".join(pieces))
        with self._order_condition:
            reply = self._replies.get(plan.step_id)
            if reply is None and plan.step_id < self._next_step_id:
                raise WorkerError(f"the result of step {plan.step_id} has been read")
            if is_first_call := reply is None:
                reply = self._replies[plan.step_id] = Future()
                self._replies.pop(plan.step_id - self._config.num_steps_ahead - 2, None)
        if is_first_call:
            try:
                reply.set_result(self._run(worker, plan))
            except Exception as error:
                reply.set_exception(error)
        return reply.result()

    def _run(self, worker: Worker, plan: StepPlan) -> bytes:
        with self._order_condition:
            limit_s = self._config.engine.step_timeout_s
            self._order_condition.wait_for(lambda: self._next_step_id == plan.step_id, limit_s)
            # After a timeout, the worker fails the step with an error that says so.
            self._compute_executor.submit(worker.launch, plan)
            self._next_step_id = plan.step_id + 1
            self._order_condition.notify_all()
        return pickle.dumps(worker.result(plan.step_id, plan.epoch), protocol=5)

    @ray.method(concurrency_group="masks")
    def put_mask(self, *pieces: bytes) -> None:
        """Give a step its mask, a pickled `StepMask`. The masks come in order of their steps; one
        that comes again is ignored.
        """
        step_mask: StepMask = pickle.loads(b"".join(pieces))
        with self._order_condition:
            is_repeated = step_mask.step_id < self._next_mask_step_id
            self._next_mask_step_id = max(self._next_mask_step_id, step_mask.step_id + 1)
        if not is_repeated:
            self._wait_for_worker().put_mask(step_mask)

    def _follow_core_share(self, share: CoreShare, present: tuple[tuple[int, ...], int]) -> None:
        """Move to other cores, and to another number of threads, when engines on this machine start
        or end. `present`: cores and number of threads so far. Never returns.
        """
        worker = self._wait_for_worker()

        def move(cores: tuple[int, ...], num_threads: int) -> None:
            worker.set_num_threads(num_threads)
            pin_to_cores(cores)

        while True:
            time.sleep(CORE_CHECK_PERIOD_S)
            try:
                last, present = present, share.cores_and_num_threads()
                if present != last:
                    self._compute_executor.submit(move, *present).result()
            except OSError as error:  # such as cores that the container has lost since
                logger.warning("rank %d stays on the cores that it has: %s", self._rank, error)

    def _import(self) -> None:
        # Imported here, because the driver imports this module and does not need torch.
        from workers.worker import Worker

        self._worker = Worker(self._config, self._rank, self._inherited_memory)
        if not self._began_as_spare:
            self._ready_event.set()

    def _warm(self) -> None:
        """Warm up on a thread that runs only when nothing else needs the core, so that the engine
        that serves is not slowed. The computing thread does not inherit that priority.
        """
        try:
            if hasattr(os, "SCHED_IDLE"):
                with suppress(OSError):  # a sandbox may not allow it
                    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            self._import()
            assert self._worker is not None
            self._worker.warm_up_spare()
        except Exception as error:
            self._warm_error = error
            raise
        finally:
            self._ready_event.set()

    def _wait_for_worker(self) -> Worker:
        """The worker, once a spare's is warm. Raises `WorkerError` if it could not be imported."""
        self._ready_event.wait()
        if self._worker is None:
            raise WorkerError(f"a spare of rank {self._rank} has no worker: its log says why")
        return self._worker


def show_gpus(gpus: list[str]) -> None:
    """Let this process see these GPUs, where Ray does not: that depends on the cluster's setup."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
