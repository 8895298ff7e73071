"""The ranks of one engine as Ray actors, and the executor that sends them plans.

One call per step and rank brings the plan and takes the result. A plan is pickled once; a large one
(long prompts) is put into the object store once and passed as a ref. The group waits for the result
of every rank, so the death of any of them is seen, and their digests must agree.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.rank_actor import RankActor
from cluster.ray_errors import failures
from cluster.resources.placement import actor_environment
from configs.engine import ResolvedConfig
from scheduler.errors import EaglerayError, StepTimeoutError, WorkerError
from scheduler.messages import StepPlan, StepResult
from workers.report import GRACE_S, WorkerReport

INLINE_PLAN_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """How the ranks came up: size of the cache in blocks, seconds by phase, lines for the log."""

    num_blocks: int
    seconds: dict[str, float]
    lines: tuple[str, ...]


class WorkerGroup:
    """All ranks of one engine; an `Executor` for `scheduler.engine.Engine`."""

    def __init__(
        self,
        config: ResolvedConfig,
        placement: PlacementGroup,
        rank_actor: type[RankActor] = RankActor,
    ) -> None:
        self._config = config
        self._rank_actor = rank_actor
        self._placement = placement
        self._ranks: list[Any] = []
        self._pending: dict[int, list[ray.ObjectRef[Any]]] = {}

    def start(self) -> GroupReport:
        """Start all ranks together and give them their caches.

        Raises the first rank's error, naming the rank, or `WorkerError` saying what each rank was
        doing when the time was up.
        """
        began, limit_s = time.perf_counter(), self._config.engine.start_timeout_s
        size = self._config.engine.tensor_parallel_size
        self._ranks = [self._create(rank) for rank in range(size)]
        on_node = self._ranks_on_node()
        address = self._ranks[0].open_rendezvous.remote()
        starting = [
            actor.start.remote(address, *on_node[rank]) for rank, actor in enumerate(self._ranks)
        ]
        try:
            reports: list[WorkerReport] = self._all(starting, "start", limit_s)
            num_blocks = min(report.num_kv_blocks for report in reports)
            allocating = [actor.allocate_cache.remote(num_blocks) for actor in self._ranks]
            left_s = max(0.0, limit_s - (time.perf_counter() - began))
            self._all(allocating, "allocate the KV cache", left_s)
        except StepTimeoutError:
            raise WorkerError(
                f"the ranks did not start within {limit_s:g} s: {self._phases()}"
            ) from None
        slowest = {name: max(r.seconds[name] for r in reports) for name in reports[0].seconds}
        total = time.perf_counter() - began
        return GroupReport(
            num_blocks=num_blocks,
            seconds={"processes": max(0.0, total - sum(slowest.values())), **slowest},
            lines=(f"kernels: {reports[0].backend}", reports[0].ledger.line()),
        )

    def launch(self, plan: StepPlan) -> None:
        """Send a plan to every rank."""
        data: Any = pickle.dumps(plan, protocol=5)
        if len(data) > INLINE_PLAN_BYTES:
            data = ray.put(data)
        self._pending[plan.step_id] = [actor.step.remote(data) for actor in self._ranks]

    def result(self, step_id: int) -> StepResult:
        """Wait for a step on every rank; the result of the step before was read already.

        Raises `WorkerError` or `StepTimeoutError`, naming rank and step. The limit leaves a late
        rank enough time to report that itself.
        """
        limit_s = self._config.engine.step_timeout_s + 2 * GRACE_S
        refs = self._pending.pop(step_id)
        answers = self._all(refs, f"step {step_id}", limit_s)
        results: list[StepResult] = [pickle.loads(data) for data in answers]
        digests = [result.digest for result in results]
        if len(set(digests)) > 1:
            raise WorkerError(
                f"the ranks sampled different tokens in step {step_id}: digests by rank {digests}"
            )
        return results[0]

    def close(self) -> None:
        """Kill every rank."""
        for actor in self._ranks:
            ray.kill(actor)
        self._ranks = []
        self._pending.clear()

    def _create(self, rank: int) -> Any:
        remote: Any = ray.remote  # ray's type hints lack concurrency_groups
        steps = self._config.engine.num_steps_ahead + 1
        actor = remote(concurrency_groups={"steps": steps})(self._rank_actor).options(
            num_cpus=1,
            num_gpus=1 if self._config.device == "cuda" else 0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=rank
            ),
        )
        return actor.remote(self._config, rank)

    def _ranks_on_node(self) -> list[tuple[int, int]]:
        """For each rank, how many ranks before it share its node, and how many ranks the node
        has.
        """
        by_bundle = placement_group_table(self._placement)["bundles_to_node_id"]
        nodes = [by_bundle[rank] for rank in range(len(self._ranks))]
        return [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]

    def _phases(self) -> str:
        """Which phase of the start each rank is in."""
        refs = [actor.phase.remote() for actor in self._ranks]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
        return ", ".join(
            (
                f"rank {rank} is at {ray.get(ref)}"
                if ref in done
                else f"the process of rank {rank} does not answer"
            )
            for rank, ref in enumerate(refs)
        )

    def _all(self, refs: Seq[ray.ObjectRef[Any]], what: str, limit_s: float) -> list[Any]:
        """The values of one ref per rank. Raises our errors in place of Ray's."""
        try:
            values: list[Any] = ray.get(list(refs), timeout=limit_s)
            return values
        except GetTimeoutError:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in enumerate(refs) if ref not in done]
            if not late:  # the last one came just now
                return self._all(refs, what, limit_s)
            raise StepTimeoutError(
                f"{what} did not finish within {limit_s:g} s on rank {late}"
            ) from None
        except (RayTaskError, RayActorError) as error:
            raise _explained(error, refs, what) from error


def _explained(error: Exception, refs: Seq[ray.ObjectRef[Any]], what: str) -> EaglerayError:
    """The cause, with the message of each rank that failed."""
    by_rank = failures(refs, patience_s=1.0)
    first = next(iter(by_rank.values()), error)
    if isinstance(first, EaglerayError) and not isinstance(first, WorkerError):
        return first
    listed = "; ".join(f"rank {rank}: {type(m).__name__}: {m}" for rank, m in by_rank.items())
    return WorkerError(f"{what} failed: {listed or error}")
