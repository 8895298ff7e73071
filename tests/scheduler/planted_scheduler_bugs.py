"""Schedulers and engines with one bug each, which the docstring describes."""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

from scheduler.engine import Engine, Executor
from scheduler.messages import Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.steps import StepDraft, StepOutput, SubmittedStep
from scheduler.suspects import Suspects

# -- what is published and shared ------------------------------------------------------------------


class PromptPublishedTooEarly(Scheduler):
    """The whole prompt is published when it is admitted, before its later chunks are submitted."""

    def _begin(self, seq: Sequence, num_cached_tokens: int, step: StepDraft) -> None:
        super()._begin(seq, num_cached_tokens, step)
        self.block_manager.publish(seq, len(seq.token_ids), seq.admitted_step_id)


class OutputPublishedTooEarly(Scheduler):
    """A generated block is published when its last token is known, before the step that stores
    it.
    """

    def _take_tokens(self, step: SubmittedStep, tokens: array[int], output: StepOutput) -> None:
        super()._take_tokens(step, tokens, output)
        for seq in output.sequences:
            if seq.status is SequenceStatus.RUNNING:
                held = len(seq.block_table) * self.limits.block_size
                num_tokens = min(held, len(seq.token_ids))
                self.block_manager.publish(seq, num_tokens, self._last_step_id)


class SaltIgnored(Scheduler):
    """All cache salts are treated as the same."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        seq.cache_salt = ""
        return seq


class FullHitWritesSharedBlock(Scheduler):
    """The last block of a prompt that is cached to its end is written again."""

    def _begin(self, seq: Sequence, num_cached_tokens: int, step: StepDraft) -> None:
        super()._begin(seq, num_cached_tokens, step)
        _, num_cached = step.admitted_sequences[-1]
        if num_cached == len(seq.token_ids):
            step.admitted_sequences[-1] = (seq, num_cached - self.limits.block_size)


class FullHitHasNoQuery(Scheduler):
    """A prompt that is cached to its last token runs no token at all."""

    def _begin(self, seq: Sequence, num_cached_tokens: int, step: StepDraft) -> None:
        super()._begin(seq, num_cached_tokens, step)
        if step.admitted_sequences[-1][1] == len(seq.token_ids):
            step.num_new_tokens[-1] = 0


# -- who runs --------------------------------------------------------------------------------------


class PartialChunkSamples(Scheduler):
    """A chunk that does not reach the end of the prompt samples."""

    def _begin(self, seq: Sequence, num_cached_tokens: int, step: StepDraft) -> None:
        super()._begin(seq, num_cached_tokens, step)
        if not step.sampling_flags[-1]:
            step.sampling_flags[-1] = 1
            step.sampling_sequences.append(seq)
            seq.num_pending_tokens, seq.num_total_tokens = 1, seq.num_total_tokens + 1


class BudgetExceeded(Scheduler):
    """Waiting sequences get tokens beyond the budget."""

    def _schedule_waiting(self, step: StepDraft) -> None:
        step.budget += 3
        super()._schedule_waiting(step)


class TooManyRunning(Scheduler):
    """One sequence more than `max_num_seqs` runs."""

    def _schedule_waiting(self, step: StepDraft) -> None:
        if not self.queues.free_slots:
            self.queues.free_slots.append(self.limits.max_num_seqs)
        super()._schedule_waiting(step)


class DecodeStarvedByPrefill(Scheduler):
    """While a prompt runs in chunks, no other sequence runs."""

    def _schedule_running(self, step: StepDraft) -> None:
        last = self.running[-1] if self.running else None
        if last is None or last.num_total_tokens - last.num_computed_tokens <= 1:
            super()._schedule_running(step)
            return
        others, self.queues.running = self.running[:-1], [last]
        super()._schedule_running(step)
        self.queues.running = others + self.running


class OldestPreempted(Scheduler):
    """The earliest arrival is preempted instead of the latest."""

    def _grow_block_table(self, seq: Sequence, num_tokens: int, step: StepDraft) -> bool:
        if not self.block_manager.can_append(seq, num_tokens):
            self.running.append(self.running.pop(0))
        return super()._grow_block_table(seq, num_tokens, step)


class EverybodyYields(Scheduler):
    """A sequence that finds no block is preempted together with all later ones, and computes
    everything again.
    """

    def _grow_block_table(self, seq: Sequence, num_tokens: int, step: StepDraft) -> bool:
        if self.block_manager.can_append(seq, num_tokens):
            return super()._grow_block_table(seq, num_tokens, step)
        while seq in self.running:
            self.queues.requeue(self.running[-1], self._last_step_id)
        step.num_preempted += 1
        return False


class PreemptsWithoutNeed(Scheduler):
    """Every third step takes everyone's blocks: a long prompt never finishes."""

    def schedule(self) -> StepPlan | None:
        if self.stats.num_steps % 3 == 2:
            while self.running:
                self.queues.requeue(self.running[-1], self._last_step_id)
        return super().schedule()


class _WithPreempted(Scheduler):
    """Does something with each sequence that is preempted."""

    def _grow_block_table(self, seq: Sequence, num_tokens: int, step: StepDraft) -> bool:
        num_preempted = step.num_preempted
        has_grown = super()._grow_block_table(seq, num_tokens, step)
        for preempted in list(self.waiting)[: step.num_preempted - num_preempted]:
            self._break(preempted)
        return has_grown

    def _break(self, seq: Sequence) -> None:
        raise NotImplementedError


class PreemptedGoesLast(_WithPreempted):
    """A preempted sequence queues behind those that have never run."""

    def _break(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.waiting.append(seq)


class SlotReusedWhileHeld(Scheduler):
    """Workers are told about a released slot one step late."""

    _late: array[int] = int32_array()

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is None:
            return None
        late, self._late = self._late, plan.released_slots
        return dataclasses.replace(plan, released_slots=late)


# -- tokens and ends -------------------------------------------------------------------------------


class InFlightForgottenOnPreemption(_WithPreempted):
    """A preempted sequence does not wait for its token in flight, and gets it twice."""

    def _break(self, seq: Sequence) -> None:
        seq.num_pending_tokens, seq.num_total_tokens = 0, len(seq.token_ids)


class TokenOfEndedDelivered(Scheduler):
    """A token that arrives for a sequence that has ended is delivered."""

    def _take_tokens(self, step: SubmittedStep, tokens: array[int], output: StepOutput) -> None:
        ended = [
            (s, t)
            for s, t in zip(step.sampling_sequences, tokens, strict=True)
            if s.status is SequenceStatus.FINISHED
        ]
        super()._take_tokens(step, tokens, output)
        for seq, token in ended:
            output.sequences.append(seq)
            output.token_ids.append(token)


class FinishDropped(Scheduler):
    """A sequence that ends while preempted is not reported."""

    def _take_tokens(self, step: SubmittedStep, tokens: array[int], output: StepOutput) -> None:
        waiting = list(self.waiting)
        super()._take_tokens(step, tokens, output)
        output.finished_sequences = [seq for seq in output.finished_sequences if seq not in waiting]


class RunsBeyondLength(Scheduler):
    """A sequence ends one token after its limit."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        seq.max_total_tokens += 1
        return seq


class SentAgainCountsAsPrompt(Scheduler):
    """Tokens generated before do not count against `max_tokens`."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        most = len(seq.token_ids) + request.sampling.max_tokens
        seq.max_total_tokens = min(most, self.limits.max_total_tokens)
        return seq


class EpochKeepsTokensInFlight(Scheduler):
    """After a lost step, sequences wait for tokens that will never come."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        pending = {id(seq): seq.num_pending_tokens for seq in (*self.running, *self.waiting)}
        convicted = super().start_epoch(cache_survives=cache_survives)
        for seq in (*self.running, *self.waiting):
            seq.num_pending_tokens = pending[id(seq)]
            seq.num_total_tokens += seq.num_pending_tokens
        return convicted


class EpochReordersArrivals(Scheduler):
    """After a lost step, later arrivals go first."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        convicted = super().start_epoch(cache_survives=cache_survives)
        self.waiting.reverse()
        return convicted


class NoQuarantine(Suspects):
    """Suspects run with all others, which are convicted with them."""

    def start_epoch(self, unfinished_sequences: Iterable[Sequence]) -> None:
        pass


class NeverConvicts(Suspects):
    """A request that kills ranks may do so forever."""

    def strike(self, in_flight_sequences: list[Sequence]) -> list[Sequence]:
        super().strike(in_flight_sequences)
        return []


class ConvictsSuspects(Suspects):
    """Every request that ran during two crashes fails."""

    def strike(self, in_flight_sequences: list[Sequence]) -> list[Sequence]:
        super().strike(in_flight_sequences)
        return [seq for seq in in_flight_sequences if seq.strikes >= 2]


class AnyTokenClears(Suspects):
    """A request that kills ranks when it decodes may do so once for each of its tokens."""

    def strike(self, in_flight_sequences: list[Sequence]) -> list[Sequence]:
        for seq in in_flight_sequences:
            if len(seq.token_ids) > seq.num_tokens_at_strike:
                seq.strikes = 0
        return super().strike(in_flight_sequences)


class BlamesWaiting(Scheduler):
    """Sequences that did not run get strikes too."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        for seq in self.waiting:
            seq.last_step_id = self._last_step_id
        return super().start_epoch(cache_survives=cache_survives)


class SuspectsKeepTheirSlot(Suspects):
    """A suspect that was cleared keeps running beside the next one."""

    def pop_cleared(self) -> Sequence | None:
        seq = self.first
        if seq and (
            seq.status is SequenceStatus.FINISHED or len(seq.token_ids) > seq.num_tokens_at_strike
        ):
            del self.sequences[0]
        return None


class SuspectsOverlap(Scheduler):
    """A suspect begins while steps of the one before it are under way."""

    def schedule(self) -> StepPlan | None:
        submitted_steps, self.submitted_steps = self.submitted_steps, deque()
        plan = super().schedule()
        submitted_steps.extend(self.submitted_steps)
        self.submitted_steps = submitted_steps
        return plan


class ForgetsSuspects(Scheduler):
    """A suspect is cleared, but never runs again."""

    def apply(self, result: StepResult) -> StepOutput:
        suspect = self.suspects.first
        output = super().apply(result)
        if suspect and suspect is not self.suspects.first and suspect in self.waiting:
            self.waiting.remove(suspect)
        return output


# -- engine ----------------------------------------------------------------------------------------


class EndedOutsideStaysKnown(Engine):
    """A request that was ended from outside keeps its id."""

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        seq = self._sequences.get(request_id)
        if seq is not None:
            self.scheduler.finish(seq, reason)
        return seq


class EndsOnlyAtNextStep(Engine):
    """A sequence that is ended from outside keeps running."""

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            seq.finish_reason = reason
        return seq


# -- masks -----------------------------------------------------------------------------------------


class MaskIsStale(Engine):
    """A step gets its mask when it is planned, without the tokens of the steps before it."""

    def step(self) -> StepOutput | None:
        for step in self.scheduler.submitted_steps:
            self._send_mask(step)
        return super().step()


class MaskIsMissing(Scheduler):
    """Plans do not say that rows have a grammar."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is None or not plan.mask_flags:
            return plan
        self.submitted_steps[-1].has_mask = True
        return dataclasses.replace(plan, mask_flags=b"")


class MaskIsNotSent(Engine):
    """Steps with an odd id get no mask."""

    def _send_mask(self, step: SubmittedStep) -> None:
        if step.step_id % 2 == 0:
            super()._send_mask(step)


class LateMaskIsForgotten(Scheduler):
    """A token that was sampled without its mask is kept."""

    def retract(self, seq: Sequence) -> None:
        self.hold(seq)


class RetractedRowIsNotReset(Scheduler):
    """The ranks keep the token that was dropped here."""

    def retract(self, seq: Sequence) -> None:
        super().retract(seq)
        seq.lacks_row = False


class ScoresAreDoubled(_WithPreempted):
    """A preempted sequence reports the scores of its prompt again."""

    def _break(self, seq: Sequence) -> None:
        seq.next_scored_position = 1


class ScoresAreLostWithAnEpoch(Scheduler):
    """What was in flight when the ranks were lost is not scored again."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        for submitted in self.submitted_steps:
            for seq in submitted.scored_sequences:
                seq.next_scored_position = min(seq.num_computed_tokens + 1, seq.num_prompt_tokens)
        return super().start_epoch(cache_survives=cache_survives)


class OnlyWholePromptsAreScored(Scheduler):
    """A prompt that runs in chunks is scored in its first chunk alone."""

    def _schedule_running(self, step: StepDraft) -> None:
        super()._schedule_running(step)
        step.scored_sequence_by_row.clear()


class HeldSequenceIsForgotten(Engine):
    """A sequence whose mask was late never runs again."""

    def _resume_held_sequences(self) -> None:
        pass


class MaskOfAnotherRow(Engine):
    """Masks are numbered by constrained rows instead of sampling rows."""

    def __init__(self, scheduler: Scheduler, executor: Executor, **options: Any) -> None:
        super().__init__(scheduler, _Renumbering(executor), **options)


class _Renumbering:
    def __init__(self, executor: Executor) -> None:
        self.launch, self.result = executor.launch, executor.result
        self.wait, self._send_mask = executor.wait, executor.send_mask

    def send_mask(self, step_mask: StepMask) -> None:
        self._send_mask(
            dataclasses.replace(step_mask, rows=int32_array(range(len(step_mask.rows))))
        )
