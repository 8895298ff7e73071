"""The step loop: a scheduler on one side, an executor that runs its plans on the other.

`Engine.step` keeps `num_steps_ahead` steps submitted beyond the one whose result it reads, so the
executor always has the next step while the host reads the last. The executor may be a group of Ray
actors, a model in this process or a simulation.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.errors import RequestError
from scheduler.messages import Request, StepPlan, StepResult
from scheduler.scheduler import Scheduler, StepOutput
from scheduler.sequence import Sequence, SequenceStatus


class Executor(Protocol):
    """Runs plans in the order they are launched."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step; does not wait for it."""

    def result(self, step_id: int) -> StepResult:
        """Wait for a launched step. Results are read in order."""


class Engine:
    """Requests in, tokens out, one `step` at a time. One thread."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, num_steps_ahead: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps_ahead = num_steps_ahead
        self._sequences: dict[str, Sequence] = {}

    def add(self, request: Request) -> Sequence:
        """Queue a request. If its tokens already end it, the sequence is returned finished. Raises
        `RequestError`.
        """
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        seq = self.scheduler.add(request)
        if seq.status is not SequenceStatus.FINISHED:
            self._sequences[request.request_id] = seq
        return seq

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        """End a request from outside; None if it is not known or has ended."""
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            self.scheduler.finish(seq, reason)
        return seq

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to submit or to read."""
        return self.scheduler.has_unfinished or bool(self.scheduler.submitted)

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    def step(self) -> StepOutput | None:
        """Submit what can be submitted, then wait for the oldest unread step; None when there was
        none.

        Errors of the executor pass through; they end the epoch.
        """
        submitted = self.scheduler.submitted
        while len(submitted) <= self.num_steps_ahead:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.executor.launch(plan)
        if not submitted:
            return None
        output = self.scheduler.apply(self.executor.result(submitted[0].step_id))
        for seq in output.finished:
            self._sequences.pop(seq.request_id, None)
        return output

    def start_epoch(self) -> list[Sequence]:
        """The executor has lost what it held. Sequences go on under the next epoch, once there is
        an executor for it; returns those that this ends (see `Scheduler.start_epoch`).
        """
        convicted = self.scheduler.start_epoch()
        for seq in convicted:
            self._sequences.pop(seq.request_id, None)
        return convicted

    def check(self) -> None:
        """Raise AssertionError unless the laws of the scheduler hold and no sequence is lost."""
        self.scheduler.check()
        known = {id(seq) for seq in self._sequences.values()}
        queued = {id(seq) for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        assert known == queued, f"{len(known)} sequences known, {len(queued)} queued"
