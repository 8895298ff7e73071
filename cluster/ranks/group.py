"""The ranks of one epoch as Ray actors, and the executor that sends them plans.

One call per step and rank brings the plan and takes the result (`calls.py`). The group waits for
the result of every rank, so the death of any of them is noticed, and their digests must agree. A
call that was lost on its way to a living rank, or whose answer was, is made again.
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

from cluster.error_kinds import Kind, kind_of
from cluster.ranks.actor import RankActor
from cluster.ranks.calls import StepCalls
from cluster.ranks.processes import ProcessId, end_all
from cluster.ray_errors import failures
from cluster.resources.placement import Place, Placement, actor_environment
from cluster.timeouts import Timeouts
from configs.engine import ResolvedConfig
from scheduler.errors import ClientError, ConfigError, EaglerayError, StepTimeoutError, WorkerError
from scheduler.messages import StepMask, StepPlan, StepResult
from workers.models.local import check_again
from workers.report import GRACE_S, WorkerReport

LOOK_S = 1.0
LOST_CALL_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """How the ranks started: size of the cache in blocks, seconds per phase, lines for the log, and
    what must be the same in every later epoch.
    """

    num_blocks: int
    seconds: dict[str, float]
    lines: tuple[str, ...]
    checkpoint: str = ""


@dataclass(slots=True)
class RankHandle:
    """One rank's actor, and its process once that is known."""

    actor: Any
    process: ProcessId | None = None


class RankMaker:
    """Creates the actors of one engine's ranks, each in its bundle."""

    def __init__(
        self,
        config: ResolvedConfig,
        placement: Placement,
        engine_id: str,
        rank_actor: type[RankActor] = RankActor,
    ) -> None:
        self.config = config
        self.size = config.engine.tensor_parallel_size
        self.placement = placement
        # The GPUs that Ray gave the first process in a bundle, which later ones there use too.
        self._gpus: dict[tuple[str, int], list[str]] = {}
        self._engine_id = engine_id
        self._rank_actor = rank_actor

    def note_gpus(self, place: Place, gpus: list[str]) -> None:
        """Note the GPUs that Ray gave to a process at `place` that is not a spare."""
        self._gpus[place.node_id, place.bundle] = gpus

    def gpus_of_node(self, node_id: str, places: Seq[Place]) -> list[str]:
        """The GPUs of the ranks on a node, in the order of the ranks. `places`: of all ranks."""
        return [
            gpu
            for place in places
            if place.node_id == node_id
            for gpu in self._gpus[node_id, place.bundle]
        ]

    def create(self, place: Place, spare_among: Seq[Place] = ()) -> RankHandle:
        """A new actor. With `spare_among`, the places of all ranks, it is a spare, which takes no
        resources from its bundle: those that it will need are its rank's.
        """
        remote: Any = ray.remote  # ray's type hints lack concurrency_groups
        groups = {"steps": self.config.num_steps_ahead + 1, "masks": 1, "watch": 2}
        takes_gpu = self.config.device == "cuda" and not spare_among
        actor = remote(concurrency_groups=groups)(self._rank_actor).options(
            num_cpus=0 if spare_among else 1,
            num_gpus=1 if takes_gpu else 0,
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env=actor_environment(),
            scheduling_strategy=self.placement.in_bundle(place.bundle),
        )
        gpus = self.gpus_of_node(place.node_id, spare_among) if spare_among else None
        return RankHandle(actor.remote(self.config, place.rank, self._engine_id, gpus))


class RankGroup:
    """All ranks of one epoch; an `Executor` for `scheduler.engine.Engine`."""

    def __init__(
        self,
        maker: RankMaker,
        epoch: int = 0,
        spares: Seq[RankHandle | None] = (),
        ranks: Seq[RankHandle] = (),
    ) -> None:
        """`spares`: for each rank a spare that takes its place, where there is one. `ranks`: all
        ranks, if they have been created already.
        """
        self.epoch = epoch
        self._maker = maker
        self._config = maker.config
        self._spares = [*spares, *[None] * (maker.size - len(spares))]
        self.ranks = [*ranks]
        self._pending: dict[int, StepCalls] = {}  # by step id
        self._is_closed = False

    def start(
        self, first: GroupReport | None = None, num_kv_blocks: int | None = None
    ) -> GroupReport:
        """Start all ranks together and give them their caches. `first` is the report of this
        driver's first epoch, and `num_kv_blocks` the number of blocks with which a driver that has
        died began: later epochs get as many.

        Raises the error of the rank at fault, naming it, or `WorkerError` saying what each rank was
        doing when the time was up.
        """
        if first is not None:
            limit_s = Timeouts.of(self._config.engine).give_up_s
            if self._maker.placement.restore(limit_s, lambda: not self._is_closed):
                end_ranks([spare for spare in self._spares if spare is not None])
                self._spares = [None] * self._maker.size
        places = self._maker.placement.places()
        began, limit_s = time.perf_counter(), self._config.engine.start_timeout_s
        if not self.ranks:
            self.ranks = [self._spare_at(place) or self._maker.create(place) for place in places]
        if self._is_closed:
            end_ranks(self.ranks)
        try:
            if first is not None:
                check_again(self._config)
            self._identify(places, limit_s)
            gpus = [self._maker.gpus_of_node(place.node_id, places) for place in places]
            on_one_node = len({place.node_id for place in places}) == 1
            address = self.ranks[0].actor.open_rendezvous.remote(on_one_node)
            if first is not None:
                num_kv_blocks = first.num_blocks
            starting = [
                rank.actor.start.remote(address, place, self.epoch, on_node, num_kv_blocks)
                for rank, place, on_node in zip(self.ranks, places, gpus, strict=True)
            ]
            reports: list[WorkerReport] = self._all(starting, "start", limit_s)
            self._check_checkpoint(first, reports, places)
            num_blocks = min(report.num_kv_blocks for report in reports)
            allocating = [rank.actor.allocate_cache.remote(num_blocks) for rank in self.ranks]
            left_s = max(0.0, limit_s - (time.perf_counter() - began))
            self._all(allocating, "allocate the KV cache", left_s)
        except StepTimeoutError:
            raise WorkerError(
                f"the ranks did not start within {limit_s:g} s: {self._phases()}"
            ) from None
        slowest = {name: max(r.seconds[name] for r in reports) for name in reports[0].seconds}
        return GroupReport(
            num_blocks=num_blocks,
            seconds=slowest,
            lines=(f"kernels: {reports[0].backend}", reports[0].ledger.line()),
            checkpoint=_checkpoint_of(reports),
        )

    def launch(self, plan: StepPlan) -> None:
        """Send a plan to every rank."""
        if not self._is_closed:
            self._calls_of(plan.step_id).send_plan(plan)

    def mask(self, mask: StepMask) -> None:
        """Send a mask to every rank. A rank that does not get it fails its step."""
        if not self._is_closed:
            self._calls_of(mask.step_id).send_mask(mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Wait until a step has ended on one of the ranks, for at most `limit_s`."""
        calls = self._pending.get(step_id)
        if calls is not None and calls.steps:
            ray.wait(calls.steps, num_returns=1, timeout=limit_s, fetch_local=False)

    def result(self, step_id: int) -> StepResult:
        """Wait for a step on every rank; the result of the step before has already been read.

        Raises `WorkerError` or `StepTimeoutError`, naming rank and step. The limit leaves a late
        rank enough time to report that it is late.
        """
        calls = self._pending.pop(step_id, None)
        if calls is None or not calls.steps:
            raise WorkerError(f"step {step_id} was not run: epoch {self.epoch} has ended")
        answers = self._answers(calls, f"step {step_id}")
        results: list[StepResult] = [pickle.loads(data) for data in answers]
        digests = [result.digest for result in results]
        if len(set(digests)) > 1:
            raise WorkerError(
                f"the ranks sampled different tokens in step {step_id}: digests by rank {digests}"
            )
        rank_seconds = tuple(result.step_s for result in results)
        return dataclasses.replace(results[0], rank_seconds=rank_seconds)

    def close(self) -> None:
        """End every rank for certain; steps that are under way fail. Any thread. Raises
        `EngineError` if a process does not die.
        """
        self._is_closed = True
        end_ranks(self.ranks)

    def _calls_of(self, step_id: int) -> StepCalls:
        """The calls of a step; its mask may be sent before or after its plan."""
        if step_id not in self._pending:
            self._pending[step_id] = StepCalls([rank.actor for rank in self.ranks])
        return self._pending[step_id]

    def _answers(self, calls: StepCalls, what: str) -> list[bytes]:
        """The answers to the calls of a step, by rank. Calls that were lost are made again while
        there is time.
        """
        limit_s = self._config.engine.step_timeout_s + 2 * GRACE_S
        until_s = time.monotonic() + limit_s
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                return self._all(calls.refs, what, limit_s, left_s)[: len(calls.steps)]
            except LostCallsError as error:
                if self._is_closed or not left_s:
                    raise
                time.sleep(LOST_CALL_PAUSE_S)
                for index in error.indices:
                    calls.make_again(index)

    def _spare_at(self, place: Place) -> RankHandle | None:
        """The spare of a rank, if it is on the node where the rank has to be now."""
        spare = self._spares[place.rank]
        if spare is None or (spare.process and spare.process.node_id == place.node_id):
            return spare
        end_ranks([spare])
        return None

    def _identify(self, places: list[Place], limit_s: float) -> None:
        """Learn the processes and their GPUs. Raises `WorkerError` as soon as a node is lost."""
        asked = [rank.actor.identify.remote() for rank in self.ranks]
        until, late = time.monotonic() + limit_s, list(asked)
        while late and time.monotonic() < until:
            _, late = ray.wait(late, num_returns=len(late), timeout=LOOK_S)
            if late and not self._maker.placement.is_whole():
                raise WorkerError("a node was lost while the ranks were created")
        identities = self._all(asked, "create the ranks", 0.0)
        for rank, place, (process, gpus) in zip(self.ranks, places, identities, strict=True):
            rank.process = process
            if rank not in self._spares:
                self._maker.note_gpus(place, gpus)

    def _check_checkpoint(
        self, first: GroupReport | None, reports: Seq[WorkerReport], places: Seq[Place]
    ) -> None:
        """Raise unless all ranks have the same files, those with which the engine began."""
        if len({report.checkpoint for report in reports}) > 1:
            raise ConfigError(
                f"the nodes {sorted({place.host for place in places})} have different files at"
                f" {self._config.model_dir}: give all of them the same checkpoint"
            )
        if first is not None and _checkpoint_of(reports) != first.checkpoint:
            raise ClientError(
                "the files of the checkpoint have changed since the engine started, so requests"
                " cannot go on; start a new engine"
            )

    def _phases(self) -> str:
        """What each rank is doing at the moment."""
        refs = [rank.actor.progress.remote() for rank in self.ranks]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
        return ", ".join(
            (
                f"rank {rank} is at {ray.get(ref).describe()}"
                if ref in done
                else f"the process of rank {rank} does not answer"
            )
            for rank, ref in enumerate(refs)
        )

    def _all(
        self,
        refs: Seq[ray.ObjectRef[Any]],
        what: str,
        limit_s: float,
        left_s: float | None = None,
    ) -> list[Any]:
        """The values of refs, one per rank or several times that. Raises our errors in place of
        Ray's. `left_s`: what is left of the limit.
        """
        try:
            values: list[Any] = ray.get(list(refs), timeout=limit_s if left_s is None else left_s)
            return values
        except GetTimeoutError:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = {i % self._maker.size for i, ref in enumerate(refs) if ref not in done}
            if not late:  # the last one has just come
                return self._all(refs, what, limit_s)
            raise StepTimeoutError(
                f"{what} did not finish within {limit_s:g} s on rank {sorted(late)}"
            ) from None
        except RayError as error:
            raise _explained(error, refs, what) from error


class LostCallsError(WorkerError):
    """Calls to living ranks were lost, or their answers were; they may be made again. `indices`:
    those of their refs.
    """

    def __init__(self, message: str, indices: list[int]) -> None:
        super().__init__(message)
        self.indices = indices

    def __reduce__(self) -> tuple[type[LostCallsError], tuple[str, list[int]]]:
        return type(self), (str(self), self.indices)


def end_ranks(ranks: Seq[RankHandle]) -> None:
    """End actors, and return when their processes are dead."""
    for rank in ranks:
        ray.kill(rank.actor)  # so that Ray knows, even of actors whose process has not started yet
    end_all([rank.process for rank in ranks if rank.process is not None])


def _checkpoint_of(reports: Seq[WorkerReport]) -> str:
    """Changes when the files of the checkpoint do, or the weights that any rank has loaded."""
    return ",".join([reports[0].checkpoint, *(report.loaded for report in reports)])


def _explained(error: Exception, refs: Seq[ray.ObjectRef[Any]], what: str) -> EaglerayError:
    """The cause, with the message of each rank that failed. Errors that the user can fix come
    first.
    """
    lost = failures(refs, patience_s=0.0)
    if lost and all(kind_of(cause) is Kind.LOST_CALL for cause in lost.values()):
        return LostCallsError(f"{what} failed: {next(iter(lost.values()))}", list(lost))
    by_rank = failures(refs, patience_s=1.0)
    for cause in by_rank.values():
        if isinstance(cause, ClientError):
            return cause
    listed = "; ".join(f"rank {rank}: {type(m).__name__}: {m}" for rank, m in by_rank.items())
    return WorkerError(f"{what} failed: {listed or error}")
