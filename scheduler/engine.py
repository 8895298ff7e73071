"""One step after another: a scheduler on one side, an executor that runs its plans on the other.

`Engine.step` keeps `num_steps_ahead` steps submitted beyond the one whose result it reads, so the
executor always has the next step while the host reads the last. The executor may be a group of Ray
actors, a model in this process or a simulation.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, Protocol

from scheduler.errors import EaglerayError, EngineError, id_in_use_error
from scheduler.messages import Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.steps import StepOutput, SubmittedStep


class Executor(Protocol):
    """Runs plans in the order they are launched."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step; does not wait for it."""

    def wait(self, step_id: int, limit_s: float) -> None:
        """Wait until a launched step has ended, for at most `limit_s`. Raises nothing."""

    def result(self, step_id: int) -> StepResult:
        """Wait for a launched step. Results are read in order."""

    def send_mask(self, step_mask: StepMask) -> None:
        """Give a step its mask, which depends on the result of the step before it. Called before
        `launch` if that result has been read by then, otherwise after it.
        """


class MaskLate(Enum):
    """The answer of `Grammars` when there is none yet."""

    MASK_LATE = "late"


MASK_LATE: Final = MaskLate.MASK_LATE
MaskAnswer = bytes | EaglerayError | Literal[MaskLate.MASK_LATE] | None
# How long a step may wait for the masks of grammars that have been quick so far, and `Engine.step`
# for those of held sequences when there is no step to wait for.
MASK_WAIT_S = 0.03


class Grammars(Protocol):
    """Which tokens may come next in the outputs of sequences with a grammar. The answer depends on
    their known tokens alone; any state is only a cache.
    """

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        """Per sequence: the mask of its next token, None if any token may follow, or the error that
        leaves it without a mask. Waits for at most `limit_s`; the answers that are `MASK_LATE` then
        are still worked on, and a later call gets them.
        """

    def is_quick(self, seq: Sequence) -> bool:
        """Whether steps may be planned that need a mask of this sequence before it is there."""

    def forget(self, request_id: str) -> None:
        """Forget a sequence that has ended. Does nothing for one that is not known."""


class NoGrammars:
    """For an engine whose requests have no grammars."""

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        raise EngineError(f"this engine has no grammars, but {sequences[0]} needs one")

    def is_quick(self, seq: Sequence) -> bool:
        return True

    def forget(self, request_id: str) -> None:
        pass


class Engine:
    """Requests in, tokens out, one `step` at a time. One thread.

    Sequences with a grammar run ahead as all others do as long as it is quick. Otherwise a sequence
    is held from each step that samples for it until its next mask is there. If a mask is late, the
    token is sampled without it and dropped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        num_steps_ahead: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.grammars = grammars or NoGrammars()
        self.num_steps_ahead = num_steps_ahead
        self._sequences: dict[str, Sequence] = {}
        self._held_sequences: dict[str, Sequence] = {}  # until their masks are there, slot or not
        self._failures: list[tuple[Sequence, EaglerayError]] = []

    def add(self, request: Request) -> Sequence:
        """Queue a request; if its tokens end it, it comes back finished. Raises `RequestError`."""
        if request.request_id in self._sequences:
            raise id_in_use_error(request.request_id)
        seq = self.scheduler.add(request)
        if seq.status is not SequenceStatus.FINISHED:
            self._sequences[request.request_id] = seq
        return seq

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        """End a request from outside; None if it is not known or has ended."""
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            self.scheduler.finish(seq, reason)
            self._forget([seq])
        return seq

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to submit or to read."""
        return self.scheduler.has_unfinished_sequences or bool(self.scheduler.submitted_steps)

    def ensure_step_submitted(self) -> None:
        """Submit a step if there is none, and its mask. Errors pass through as those of `step`."""
        self._resume_held_sequences()
        submitted_steps = self.scheduler.submitted_steps
        if submitted_steps:
            self._send_mask(submitted_steps[0])
        elif plan := self._schedule():
            self._send_mask(submitted_steps[0])
            self.executor.launch(plan)

    @property
    def slack_s(self) -> float:
        """Seconds, at the least, after the oldest unread step has begun, until there is nothing
        left to run unless another step is submitted by then. 0 if that is not known, or if no other
        may be submitted.
        """
        if len(self.scheduler.submitted_steps) > self.num_steps_ahead:
            return 0.0
        return self.scheduler.min_duration_s()

    def wait(self, limit_s: float) -> None:
        """Wait until the oldest unread step has ended, for at most `limit_s`."""
        self.executor.wait(self.scheduler.submitted_steps[0].step_id, limit_s)

    def step(self) -> StepOutput | None:
        """Submit what can be submitted, then wait for the oldest unread step; None when there was
        none, after a short wait if masks are missing.

        Errors of the executor pass through; they end the epoch.
        """
        self.ensure_step_submitted()
        submitted_steps = self.scheduler.submitted_steps
        while submitted_steps and len(submitted_steps) <= self.num_steps_ahead:
            plan = self._schedule()
            if plan is None:
                break
            self.executor.launch(plan)
        if not submitted_steps:
            if self._held_sequences:
                self.grammars.masks(list(self._held_sequences.values()), MASK_WAIT_S)
            return None
        output = self.scheduler.apply(self.executor.result(submitted_steps[0].step_id))
        for seq in output.finished_sequences:
            self._sequences.pop(seq.request_id, None)
        self._forget(output.finished_sequences)
        return output

    def take_failures(self) -> list[tuple[Sequence, EaglerayError]]:
        """The sequences that have failed since the last call, and why. They have ended, whether or
        not the step in which that was noticed succeeded.
        """
        failures, self._failures = self._failures, []
        return failures

    def _schedule(self) -> StepPlan | None:
        """Plan the next step. Asks for what masks it can; holds sequences of slow grammars."""
        plan = self.scheduler.schedule()
        if plan is None or not plan.mask_flags:
            return plan
        constrained_sequences = [
            seq
            for seq in self.scheduler.submitted_steps[-1].sampling_sequences
            if seq.structural_tag
        ]
        # Nothing before the masked token is in flight, so its mask can be asked for.
        if ready_sequences := [seq for seq in constrained_sequences if seq.num_pending_tokens == 1]:
            self.grammars.masks(ready_sequences, 0.0)
        for seq in constrained_sequences:
            if not self.grammars.is_quick(seq):
                self.scheduler.hold(seq)
                self._held_sequences[seq.request_id] = seq
        return plan

    def _resume_held_sequences(self) -> None:
        """Resume the held sequences whose next mask is there; end those that cannot have one."""
        ready_sequences = [
            seq for seq in self._held_sequences.values() if not seq.num_pending_tokens
        ]
        answers = self.grammars.masks(ready_sequences, 0.0) if ready_sequences else []
        for seq, answer in zip(ready_sequences, answers, strict=True):
            if isinstance(answer, EaglerayError):
                self._fail(seq, answer)
            elif answer is not MASK_LATE:
                del self._held_sequences[seq.request_id]
                self.scheduler.resume(seq)

    def _send_mask(self, step: SubmittedStep) -> None:
        """Send the mask of the oldest unread step, if it needs one and does not have it: every
        token before it is known now. Ends the sequences for which there can be no mask, and
        retracts those whose mask is late.
        """
        if step.has_mask:
            return
        step.has_mask = True
        sequence_by_sampling_row = {
            row: seq
            for row, seq in enumerate(step.sampling_sequences)
            if seq.structural_tag
            and seq.status is not SequenceStatus.FINISHED
            and step.step_id >= seq.first_kept_step_id
        }
        sequences = list(sequence_by_sampling_row.values())
        if quick_sequences := [seq for seq in sequences if self.grammars.is_quick(seq)]:
            self.grammars.masks(quick_sequences, MASK_WAIT_S)
        answers = self.grammars.masks(sequences, 0.0) if sequences else []
        rows, masks = int32_array(), list[bytes]()
        for (row, seq), answer in zip(sequence_by_sampling_row.items(), answers, strict=True):
            if isinstance(answer, EaglerayError):
                self._fail(seq, answer)
            elif answer is MASK_LATE:
                self.scheduler.retract(seq)
                self._held_sequences[seq.request_id] = seq
            elif answer is not None:
                rows.append(row)
                masks.append(answer)
        self.executor.send_mask(
            StepMask(step_id=step.step_id, epoch=step.epoch, rows=rows, masks=tuple(masks))
        )

    def _fail(self, seq: Sequence, error: EaglerayError) -> None:
        self._failures.append((seq, error))
        self.finish(seq.request_id, "error")

    def _forget(self, ended_sequences: list[Sequence]) -> None:
        for seq in ended_sequences:
            if seq.structural_tag:
                self._held_sequences.pop(seq.request_id, None)
                self.grammars.forget(seq.request_id)

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        """The executor has lost its steps and, unless `cache_survives`, all that it held. Sequences
        continue in the next epoch, once there is an executor for it. Returns the sequences that end
        here (see `Scheduler.start_epoch`).
        """
        failed_sequences = self.scheduler.start_epoch(cache_survives=cache_survives)
        self._held_sequences.clear()
        for seq in failed_sequences:
            self._sequences.pop(seq.request_id, None)
        self._forget(failed_sequences)
        return failed_sequences

    def check(self) -> None:
        """Raise AssertionError unless the laws of the scheduler hold and no sequence is lost."""
        self.scheduler.check()
        tracked_object_ids = {id(seq) for seq in self._sequences.values()}
        queued_object_ids = {id(seq) for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        assert tracked_object_ids == queued_object_ids, (
            f"{len(tracked_object_ids)} sequences known, {len(queued_object_ids)} queued"
        )
        held_request_ids = {seq.request_id for seq in self._sequences.values() if seq.is_held}
        assert held_request_ids <= self._held_sequences.keys() <= self._sequences.keys(), (
            f"held are {held_request_ids}, to be resumed {self._held_sequences.keys()}"
        )
