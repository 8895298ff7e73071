"""The ranks of one engine as Ray actors, and the executor that sends them plans.

`RankActor` is a thin shell around `workers.Worker`: one call a step brings the plan and takes the result. A plan is
pickled once; a large one (long prompts) is put once in the object store and passed as a ref. Every rank's result is
waited for, so the death of any of them is seen, and their digests must agree.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import actor_environment
from configs.engine import ResolvedConfig
from scheduler.errors import EaglerayError, StepTimeoutError, WorkerError
from scheduler.messages import StepPlan, StepResult
from workers.worker import GRACE_S, Worker, WorkerReport

INLINE_PLAN_BYTES = 64 * 1024
SWITCH_INTERVAL_S = 0.0002  # the thread that computes gets the interpreter back from Ray's threads within this


class RankActor:
    """One rank in a process of its own.

    A thread of its own computes, in order; Ray's threads hand it plans and wait for results. So the next step starts
    the moment the last one ends, whatever Ray still has to do for that one's answer. Concurrency groups: control, and
    `steps`, with a thread for each step that may be under way.
    """

    def __init__(self, config: ResolvedConfig, rank: int) -> None:
        logging.basicConfig(level=config.engine.log_level.upper())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        if gpus:  # Ray does this itself, unless it was told not to for the sake of other work in the cluster
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._limit_s = config.engine.step_timeout_s
        self._worker = Worker(config, rank)
        self._computing = ThreadPoolExecutor(1, "rank")
        self._turn = threading.Condition()
        self._next_step = 0

    def open_rendezvous(self) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks."""
        return self._worker.open_rendezvous(ray.util.get_node_ip_address())

    def start(self, address: tuple[str, int], place: int, ranks_on_node: int) -> WorkerReport:
        """Meet the other ranks and load. The ranks of a node share its cores; this one is number `place` of them."""

        def start() -> WorkerReport:
            return self._worker.start(address, take_cores(place, ranks_on_node))

        return self._computing.submit(start).result()

    def allocate_cache(self, num_blocks: int) -> None:
        self._computing.submit(self._worker.allocate_cache, num_blocks).result()

    @ray.method(concurrency_group="steps")
    def phase(self) -> str:
        """What the start is at, while it is."""
        return self._worker.phase

    @ray.method(concurrency_group="steps")
    def step(self, data: bytes) -> bytes:
        """Run a step in its turn, which the threads of a concurrency group may not keep. Raises what it raised.

        A `StepPlan` and a `StepResult`, pickled: Ray passes bytes on as they are, and pickles slower.
        """
        plan: StepPlan = pickle.loads(data)
        with self._turn:
            self._turn.wait_for(lambda: self._next_step == plan.step_id, self._limit_s)
            self._computing.submit(self._worker.launch, plan)  # out of turn, it comes to an error that says so
            self._next_step = plan.step_id + 1
            self._turn.notify_all()
        return pickle.dumps(self._worker.result(plan.step_id, plan.epoch), protocol=5)


def take_cores(place: int, num_places: int) -> int:
    """Bind the calling thread, and those it starts later, to its share of this process's cores; how many they are.

    Without this, two ranks may meet on one core while another is free. With more places than cores nothing is bound.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return max(1, (os.cpu_count() or 1) // num_places)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_places
    if share == 0:
        return 1
    os.sched_setaffinity(0, cores[place * share : (place + 1) * share])
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """How the ranks came up: size of the cache in blocks, seconds by phase, the ledger of rank 0."""

    num_blocks: int
    seconds: dict[str, float]
    lines: tuple[str, ...]


class WorkerGroup:
    """All ranks of one engine; an `Executor` for `scheduler.engine.Engine`."""

    def __init__(self, config: ResolvedConfig, placement: PlacementGroup) -> None:
        self._config = config
        self._placement = placement
        self._ranks: list[Any] = []
        self._pending: dict[int, list[ray.ObjectRef[Any]]] = {}

    def start(self) -> GroupReport:
        """Start all ranks together and give them their caches. Raises the first rank's error, naming the rank, or
        `WorkerError` that says what each rank was at when time was up."""
        began, limit = time.perf_counter(), self._config.engine.start_timeout_s
        size = self._config.engine.tensor_parallel_size
        self._ranks = [self._create(rank) for rank in range(size)]
        on_node = self._ranks_on_node()
        address = self._ranks[0].open_rendezvous.remote()
        starting = [actor.start.remote(address, *on_node[rank]) for rank, actor in enumerate(self._ranks)]
        try:
            reports: list[WorkerReport] = self._all(starting, "start", limit)
            num_blocks = min(report.num_kv_blocks for report in reports)
            allocating = [actor.allocate_cache.remote(num_blocks) for actor in self._ranks]
            self._all(allocating, "allocate the KV cache", max(0.0, limit - (time.perf_counter() - began)))
        except StepTimeoutError:
            raise WorkerError(f"the ranks did not start within {limit:g} s: {self._phases()}") from None
        slowest = {name: max(r.seconds[name] for r in reports) for name in reports[0].seconds}
        total = time.perf_counter() - began
        seconds = {"processes": max(0.0, total - sum(slowest.values())), **slowest}
        return GroupReport(
            num_blocks=num_blocks, seconds=seconds, lines=(f"kernels: {reports[0].backend}", reports[0].ledger.line())
        )

    def launch(self, plan: StepPlan) -> None:
        data: Any = pickle.dumps(plan, protocol=5)
        if len(data) > INLINE_PLAN_BYTES:
            data = ray.put(data)
        self._pending[plan.step_id] = [actor.step.remote(data) for actor in self._ranks]

    def result(self, step_id: int) -> StepResult:
        """Wait for a step on every rank, the one before having been read.

        Raises `WorkerError` or `StepTimeoutError`, naming rank and step. A rank that knows it is late says so first.
        """
        limit = self._config.engine.step_timeout_s + 2 * GRACE_S
        refs = self._pending.pop(step_id)
        results: list[StepResult] = [pickle.loads(data) for data in self._all(refs, f"step {step_id}", limit)]
        digests = [result.digest for result in results]
        if len(set(digests)) > 1:
            raise WorkerError(f"the ranks sampled different tokens in step {step_id}: digests by rank {digests}")
        return results[0]

    def close(self) -> None:
        """Kill every rank."""
        for actor in self._ranks:
            ray.kill(actor)
        self._ranks = []
        self._pending.clear()

    def _create(self, rank: int) -> Any:
        num_gpus = 1 if self._config.device == "cuda" else 0
        remote: Any = ray.remote  # its types do not know concurrency_groups
        steps = self._config.engine.num_steps_ahead + 1
        actor = remote(concurrency_groups={"steps": steps})(RankActor).options(
            num_cpus=1,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank),
        )
        return actor.remote(self._config, rank)

    def _ranks_on_node(self) -> list[tuple[int, int]]:
        """For each rank, how many ranks before it share its node, and how many in all do."""
        by_bundle = placement_group_table(self._placement)["bundles_to_node_id"]
        nodes = [by_bundle[rank] for rank in range(len(self._ranks))]
        return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]

    def _phases(self) -> str:
        """What of its start each rank is at."""
        refs = [actor.phase.remote() for actor in self._ranks]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
        return ", ".join(
            f"rank {rank} is at {ray.get(ref)}" if ref in done else f"the process of rank {rank} does not answer"
            for rank, ref in enumerate(refs)
        )

    def _all(self, refs: Seq[ray.ObjectRef[Any]], what: str, limit_s: float) -> list[Any]:
        """The values of one ref a rank; turns Ray's errors into ours."""
        try:
            values: list[Any] = ray.get(list(refs), timeout=limit_s)
            return values
        except GetTimeoutError:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in done]
            if not late:  # the last came just now
                return self._all(refs, what, limit_s)
            raise StepTimeoutError(f"{what} did not finish within {limit_s:g} s on rank {late}") from None
        except (RayTaskError, RayActorError) as error:
            raise _explain(error, refs, what) from error


def _explain(error: Exception, refs: Seq[ray.ObjectRef[Any]], what: str) -> EaglerayError:
    """The cause, with the message of each rank that failed."""
    messages: dict[int, Exception] = {}
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=1.0)
    for rank, ref in enumerate(refs):
        if ref in done:
            try:
                ray.get(ref)
            except (RayTaskError, RayActorError) as failure:
                messages[rank] = getattr(failure, "cause", None) or failure
    first = next(iter(messages.values()), error)
    if isinstance(first, EaglerayError) and not isinstance(first, WorkerError):
        return first
    listed = "; ".join(f"rank {rank}: {type(m).__name__}: {m}" for rank, m in messages.items())
    return WorkerError(f"{what} failed: {listed or error}")
