"""The ranks of one epoch as Ray actors, and the executor that sends them plans.

One call per step and rank carries the plan there and the result back (`calls.py`). The group waits
for the result of every rank, so the death of any of them is noticed, and their digests must agree.
If a call to a living rank, or its answer, was lost, the call is made again.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster.error_kinds import ErrorKind, kind_of
from cluster.ranks.actor import RankActor
from cluster.ranks.calls import StepCalls
from cluster.ranks.processes import END_GRACE_S, ProcessId, end_processes
from cluster.ray_errors import failures
from cluster.resources.placement import Place, Placement, actor_environment
from cluster.timeouts import CALL_TIMEOUT_S, Timeouts
from configs.engine import ResolvedConfig
from scheduler.errors import (
    DIFFERENT_TOKENS_PHRASE,
    ClientError,
    ConfigError,
    EaglerayError,
    StepTimeoutError,
    WorkerError,
)
from scheduler.messages import StepMask, StepPlan, StepResult
from workers.memory.inheritance import RankMemoryHandles
from workers.models.local import recheck_checkpoint
from workers.models.size import parameters_line
from workers.report import STEP_GRACE_S, WorkerReport

NODE_CHECK_PERIOD_S = 1.0
LOST_CALL_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """How the ranks started. num_blocks: of each rank's KV cache; seconds: the longest time of
    each phase, by name; checkpoint_id: identifies the files, which later epochs must have too.
    """

    num_blocks: int
    seconds: dict[str, float]
    log_lines: tuple[str, ...]
    checkpoint_id: str = ""


@dataclass(slots=True)
class RankHandle:
    """A rank's or spare's actor, its process once known, and its memory once it has a cache."""

    actor: Any
    process: ProcessId | None = None
    memory: RankMemoryHandles | None = None

    @property
    def cache_identity(self) -> int | None:
        """Identifies the memory of its KV cache; None without one that outlives the process."""
        cache = self.memory.cache if self.memory is not None else None
        return cache.identity if cache is not None else None


class RankMaker:
    """Creates the actors of one engine's ranks, each in its bundle."""

    def __init__(
        self,
        config: ResolvedConfig,
        placement: Placement,
        engine_id: str,
        rank_actor_class: type[RankActor] = RankActor,
    ) -> None:
        self.config = config
        self.num_ranks = config.engine.tensor_parallel_size
        self.placement = placement
        # By node id and bundle: the GPUs that Ray gave the first process there, for later ones too.
        self._gpus_of_bundle: dict[tuple[str, int], list[str]] = {}
        self._engine_id = engine_id
        self._rank_actor_class = rank_actor_class

    def note_gpus(self, place: Place, gpus: list[str]) -> None:
        """Note the GPUs that Ray gave to a process at `place` that is not a spare."""
        self._gpus_of_bundle[place.node_id, place.bundle] = gpus

    def gpus_of_node(self, node_id: str, places: Seq[Place]) -> list[str]:
        """The GPUs of the ranks on a node, in the order of the ranks. `places`: of all ranks."""
        bundles = [place.bundle for place in places if place.node_id == node_id]
        return [gpu for bundle in bundles for gpu in self._gpus_of_bundle[node_id, bundle]]

    def create(
        self,
        place: Place,
        places_if_spare: Seq[Place] = (),
        inherited_memory: RankMemoryHandles | None = None,
    ) -> RankHandle:
        """A new actor. With `places_if_spare`, the places of all ranks, it is a spare, which
        reserves nothing in its bundle: it will use the resources of its rank, and its memory
        (`inherited_memory`).
        """
        remote: Any = ray.remote  # ray's type hints lack concurrency_groups
        num_steps = self.config.num_steps_ahead + 1
        concurrency_groups = {"steps": num_steps, "masks": 1, "watch": 1, "end": 1}
        takes_gpu = self.config.device == "cuda" and not places_if_spare
        actor_class = remote(concurrency_groups=concurrency_groups)(self._rank_actor_class).options(
            num_cpus=0 if places_if_spare else 1,
            num_gpus=1 if takes_gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=self.placement.bundle_strategy(place.bundle),
        )
        gpus = self.gpus_of_node(place.node_id, places_if_spare) if places_if_spare else None
        return RankHandle(
            actor_class.remote(self.config, place.rank, self._engine_id, gpus, inherited_memory)
        )


class RankGroup:
    """All ranks of one epoch; an `Executor` for `scheduler.engine.Engine`."""

    def __init__(
        self,
        rank_maker: RankMaker,
        epoch: int = 0,
        spares: Seq[RankHandle | None] = (),
        ranks: Seq[RankHandle] = (),
    ) -> None:
        """`spares`: for each rank, the spare that takes its place, or None. `ranks`: all ranks, if
        they have been created already.
        """
        self.epoch = epoch  # of a group that stands by: only from `take_over` on
        self._rank_maker = rank_maker
        self._config = rank_maker.config
        self._spares = [*spares, *[None] * (rank_maker.num_ranks - len(spares))]
        self.ranks = [*ranks]
        self._calls_by_step: dict[int, StepCalls] = {}  # of steps whose result is unread
        self._is_closed = False

    def start(
        self, first_report: GroupReport | None = None, num_kv_blocks: int | None = None
    ) -> GroupReport:
        """Start all ranks together and allocate their caches. Later epochs get as many blocks as
        the first: `first_report` is of this driver's first epoch, in which it is None;
        `num_kv_blocks` is from a driver that has died, None if this is the first one.

        Raises the error of the rank at fault, naming it, or `WorkerError` saying what each rank was
        doing when the time was up.
        """
        if first_report is not None:
            limit_s = Timeouts.from_options(self._config.engine).give_up_after_s
            if self._rank_maker.placement.restore(limit_s, lambda: not self._is_closed):
                end_ranks([spare for spare in self._spares if spare is not None])
                self._spares = [None] * self._rank_maker.num_ranks
        places = self._rank_maker.placement.places()
        if not self.ranks:
            create = self._rank_maker.create
            self.ranks = [self._spare_at(place) or create(place) for place in places]
        if self._is_closed:
            end_ranks(self.ranks)
        if first_report is not None:
            num_kv_blocks = first_report.num_blocks
        return self._start_ranks(places, first_report, num_kv_blocks)

    def stand_by(self, first_report: GroupReport) -> None:
        """Start the ranks, which are warm spares, beside those of the present epoch, whose memory
        they hold: what is left to do is `take_over`. `first_report`, and errors: see `start`.
        """
        places = self._rank_maker.placement.places()
        self._start_ranks(places, first_report, first_report.num_blocks, is_standby=True)

    def take_over(self, epoch: int, keeps_cache: bool) -> None:
        """Begin an epoch, once the last has ended, with ranks that stand by; `keeps_cache`: with
        what their cache holds. Raises as `start`.
        """
        self.epoch = epoch
        if not self._rank_maker.placement.is_whole():
            raise WorkerError("a node was lost")
        for is_last_attempt in (False, True):
            refs = [handle.actor.take_over.remote(epoch, keeps_cache) for handle in self.ranks]
            try:
                self._get_all(refs, "take over", CALL_TIMEOUT_S)
                return
            except RankCallsLostError:
                if is_last_attempt:
                    raise

    def all_ranks_answer(self, limit_s: float) -> bool:
        """Whether all ranks answer in time."""
        refs = [handle.actor.identify.remote() for handle in self.ranks]
        ready_refs, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        return len(ready_refs) == len(refs) and not failures(refs, limit_s=0.0)

    def has_cache_of(self, other: RankGroup) -> bool:
        """Whether the KV caches of these ranks are those of another group's, and outlive it."""
        identities = [handle.cache_identity for handle in self.ranks]
        return None not in identities and identities == [
            handle.cache_identity for handle in other.ranks
        ]

    def _start_ranks(
        self,
        places: list[Place],
        first_report: GroupReport | None,
        num_kv_blocks: int | None,
        *,
        is_standby: bool = False,
    ) -> GroupReport:
        limit_s = self._config.engine.start_timeout_s
        deadline_s = time.monotonic() + limit_s
        try:
            if first_report is not None and not is_standby:  # those have their weights already
                recheck_checkpoint(self._config)
            self._identify(places, deadline_s, is_standby)
            gpus_by_rank = [self._rank_maker.gpus_of_node(p.node_id, places) for p in places]
            is_single_node = len({place.node_id for place in places}) == 1
            address_ref = self.ranks[0].actor.open_rendezvous.remote(is_single_node)
            start_refs = [
                handle.actor.start.remote(
                    address_ref, place, self.epoch, node_gpus, num_kv_blocks, is_standby=is_standby
                )
                for handle, place, node_gpus in zip(self.ranks, places, gpus_by_rank, strict=True)
            ]
            remaining_s = max(0.0, deadline_s - time.monotonic())
            reports: list[WorkerReport] = self._get_all(start_refs, "start", limit_s, remaining_s)
            self._check_checkpoint(first_report, reports, places)
            if self._config.model.experts is not None:
                _check_processors(reports, places)
            num_blocks = min(report.num_kv_blocks for report in reports)
            allocation_refs = [h.actor.allocate_cache.remote(num_blocks) for h in self.ranks]
            remaining_s = max(0.0, deadline_s - time.monotonic())
            memories = self._get_all(allocation_refs, "allocate the KV cache", limit_s, remaining_s)
        except StepTimeoutError:
            raise WorkerError(
                f"the ranks did not start within {limit_s:g} s (start_timeout_s):"
                f" {self._describe_phases()}"
            ) from None
        for handle, memory in zip(self.ranks, memories, strict=True):
            handle.memory = memory
        return GroupReport(
            num_blocks=num_blocks,
            seconds={phase: max(r.seconds[phase] for r in reports) for phase in reports[0].seconds},
            log_lines=(
                f"model: {parameters_line(self._config.model)}",
                f"kernels: {reports[0].backend}",
                reports[0].ledger.line(),
            ),
            checkpoint_id=_checkpoint_id(reports),
        )

    def launch(self, plan: StepPlan) -> None:
        """Send a plan to every rank."""
        if not self._is_closed:
            self._calls_of(plan.step_id).send_plan(plan)

    def send_mask(self, step_mask: StepMask) -> None:
        """Send a mask to every rank. A rank that does not get it fails the step."""
        if not self._is_closed:
            self._calls_of(step_mask.step_id).send_mask(step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Wait until a step has ended on one of the ranks, for at most `limit_s`."""
        calls = self._calls_by_step.get(step_id)
        if calls is not None and calls.step_refs:
            ray.wait(calls.step_refs, num_returns=1, timeout=limit_s, fetch_local=False)

    def result(self, step_id: int) -> StepResult:
        """Wait for a step on every rank; the result of the step before has already been read.

        Raises `WorkerError` or `StepTimeoutError`, naming rank and step. The limit leaves a late
        rank enough time to report that it is late.
        """
        calls = self._calls_by_step.pop(step_id, None)
        if calls is None or not calls.step_refs:
            raise WorkerError(f"step {step_id} was not run: epoch {self.epoch} has ended")
        answers = self._answers(calls, f"step {step_id}")
        results: list[StepResult] = [pickle.loads(answer) for answer in answers]
        digests = [result.digest for result in results]
        if len(set(digests)) > 1:
            raise WorkerError(
                f"the ranks {DIFFERENT_TOKENS_PHRASE} in step {step_id}: digests by rank {digests}"
            )
        rank_seconds = tuple(result.step_s for result in results)
        return dataclasses.replace(results[0], rank_seconds=rank_seconds)

    def close(self, *, at_once: bool = False) -> None:
        """End every rank, and return when all processes are dead; steps that are under way fail.
        Any thread. With `at_once`, Ray reports a fault of each process, but it is dead 0.2 s
        sooner. Raises `EngineError` if a process does not die.
        """
        self._is_closed = True
        end_ranks(self.ranks, 0.0 if at_once else END_GRACE_S)

    def _calls_of(self, step_id: int) -> StepCalls:
        """The calls of a step; its mask may be sent before or after its plan."""
        if step_id not in self._calls_by_step:
            self._calls_by_step[step_id] = StepCalls([handle.actor for handle in self.ranks])
        return self._calls_by_step[step_id]

    def _answers(self, calls: StepCalls, action: str) -> list[bytes]:
        """The answers to the calls of a step, by rank. Lost calls are made again in time."""
        limit_s = self._config.engine.step_timeout_s + 2 * STEP_GRACE_S
        deadline_s = time.monotonic() + limit_s
        while True:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            try:
                values = self._get_all(calls.refs, action, limit_s, remaining_s)
                return values[: len(calls.step_refs)]
            except RankCallsLostError as error:
                if self._is_closed or not remaining_s:
                    raise
                time.sleep(LOST_CALL_PAUSE_S)
                for index in error.indices:
                    calls.repeat_call(index)

    def _spare_at(self, place: Place) -> RankHandle | None:
        """The spare of the rank at a place, if it is known to be on that node; ends any other."""
        spare = self._spares[place.rank]
        if spare is None or (spare.process and spare.process.node_id == place.node_id):
            return spare
        end_ranks([spare])
        return None

    def _identify(self, places: list[Place], deadline_s: float, is_standby: bool) -> None:
        """Learn the processes and their GPUs. Raises `WorkerError` as soon as a node is lost."""
        refs = [handle.actor.identify.remote() for handle in self.ranks]
        pending = list(refs)
        while pending and time.monotonic() < deadline_s:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=NODE_CHECK_PERIOD_S)
            if pending and not self._rank_maker.placement.is_whole():
                raise WorkerError("a node was lost while the ranks were created")
        identities = self._get_all(refs, "create the ranks", 0.0)
        for handle, place, (process, gpus) in zip(self.ranks, places, identities, strict=True):
            handle.process = process
            if not is_standby and handle not in self._spares:
                self._rank_maker.note_gpus(place, gpus)

    def _check_checkpoint(
        self, first_report: GroupReport | None, reports: Seq[WorkerReport], places: Seq[Place]
    ) -> None:
        """Raise unless all ranks have the same files, and those of the first epoch."""
        if len({report.checkpoint_hash for report in reports}) > 1:
            raise ConfigError(
                f"the nodes {sorted({place.host for place in places})} have different files at"
                f" {self._config.model_dir}: give all of them the same checkpoint"
            )
        if first_report is not None and _checkpoint_id(reports) != first_report.checkpoint_id:
            raise ClientError(
                "the files of the checkpoint have changed since the engine started, so requests"
                " cannot go on; start a new engine"
            )

    def _describe_phases(self) -> str:
        """What each rank is doing at the moment."""
        refs = [handle.actor.progress.remote() for handle in self.ranks]
        ray.wait(refs, num_returns=len(refs), timeout=STEP_GRACE_S)
        phases = []
        for rank, ref in enumerate(refs):
            try:
                phases.append(f"rank {rank} is at {ray.get(ref, timeout=0).describe()}")
            except RayError:  # it has ended, or the time is up
                phases.append(f"the process of rank {rank} does not answer")
        return ", ".join(phases)

    def _get_all(
        self,
        refs: Seq[ray.ObjectRef[Any]],
        action: str,
        limit_s: float,
        remaining_s: float | None = None,
    ) -> list[Any]:
        """The values of refs, one or more per rank, ordered by rank. Raises our errors in place of
        Ray's, which name the `action`. `remaining_s`: what is left of the limit.
        """
        timeout_s = limit_s if remaining_s is None else remaining_s
        try:
            values: list[Any] = ray.get(list(refs), timeout=timeout_s)
            return values
        except GetTimeoutError:
            ready_refs, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            num_ranks = self._rank_maker.num_ranks
            late_ranks = {i % num_ranks for i, ref in enumerate(refs) if ref not in ready_refs}
            if not late_ranks:  # the last value has just come
                return self._get_all(refs, action, limit_s)
            raise StepTimeoutError(
                f"{action} did not finish within {limit_s:g} s on rank {sorted(late_ranks)}"
            ) from None
        except RayError as error:
            raise _error_of_ranks(error, refs, action, self._rank_maker.num_ranks) from error


class RankCallsLostError(WorkerError):
    """Lost calls to living ranks, or answers, which may be made again. `indices`: of the refs."""

    def __init__(self, message: str, indices: list[int]) -> None:
        super().__init__(message)
        self.indices = indices

    def __reduce__(self) -> tuple[type[RankCallsLostError], tuple[str, list[int]]]:
        return type(self), (str(self), self.indices)


def end_ranks(ranks: Seq[RankHandle], grace_s: float = END_GRACE_S) -> None:
    """End actors, and return when those processes that are known are dead (see `end_processes`)."""
    for handle in ranks:
        ray.kill(handle.actor)  # so that Ray knows, even of those without a process yet
    processes = [handle.process for handle in ranks if handle.process is not None]
    end_processes(processes, grace_s)


def _check_processors(reports: Seq[WorkerReport], places: Seq[Place]) -> None:
    """Raise `ConfigError` unless all ranks compute with the same kind of processor. In a model with
    experts each rank chooses them by itself, and another rounding may choose others.
    """
    for report, place in zip(reports[1:], places[1:], strict=True):
        if report.compute_platform != reports[0].compute_platform:
            raise ConfigError(
                f"the ranks of a model with experts need processors of one kind, but rank 0 on"
                f" {places[0].host} has {reports[0].compute_platform!r} and rank {place.rank} on"
                f" {place.host} {report.compute_platform!r}: use nodes with the same processors"
                " and the same torch, or fewer ranks that are all on one node"
            )


def _checkpoint_id(reports: Seq[WorkerReport]) -> str:
    """Identifies the files of the checkpoint and the weights that each rank has loaded."""
    hashes = [reports[0].checkpoint_hash, *(report.weights_hash for report in reports)]
    return ",".join(hashes)


def _error_of_ranks(
    error: Exception, refs: Seq[ray.ObjectRef[Any]], action: str, num_ranks: int
) -> EaglerayError:
    """An error of ours with the message of each rank that failed, in calls ordered by rank, one or
    more for each. An error that the user can fix comes first.
    """
    causes = failures(refs, limit_s=0.0)
    if causes and all(kind_of(cause) is ErrorKind.LOST_CALL for cause in causes.values()):
        return RankCallsLostError(f"{action} failed: {next(iter(causes.values()))}", list(causes))
    causes = failures(refs, limit_s=1.0)
    for cause in causes.values():
        if isinstance(cause, ClientError):
            return cause
    messages = [
        f"rank {index % num_ranks}: {type(cause).__name__}: {cause}"
        for index, cause in causes.items()
    ]
    return WorkerError(f"{action} failed: {'; '.join(messages) or error}")
