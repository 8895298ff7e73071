"""A step from its plan to the content of its result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.errors import EngineError
from scheduler.messages import AdmittedRows, StepPlan, StepResult, TokenLogprobs, int32_array
from scheduler.pace import Pace
from scheduler.prompt_scores import Scores, needs_scoring, scoring_flags
from scheduler.queues import Queues
from scheduler.records import StepRecord
from scheduler.sequence import Sequence


@dataclass(slots=True)
class StepDraft:
    """A plan under construction. `budget` is how many more tokens it may hold."""

    budget: int
    slots: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    sampling_flags: bytearray = field(default_factory=bytearray)
    sampling_sequences: list[Sequence] = field(default_factory=list)
    scored_sequence_by_row: dict[int, Sequence] = field(default_factory=dict)
    appended_slots: list[int] = field(default_factory=list)
    appended_block_ids: list[int] = field(default_factory=list)
    # Also running ones whose rows the ranks get again. Each with its `num_stored_tokens`, see
    # `AdmittedRows`.
    admitted_sequences: list[tuple[Sequence, int]] = field(default_factory=list)
    num_cached_tokens: int = 0  # of sequences that were waiting
    num_preempted: int = 0
    num_recomputed_tokens: int = 0  # of sequences that were waiting, lost with ranks
    is_paced: bool | None = None  # whether decodes limit the budget; None until that is computed
    head_wait_reason: str = ""  # why the first sequence in line was not admitted

    def request_scoring(self, seq: Sequence) -> None:
        """Before a row is added: have its prompt tokens scored, if that is wanted."""
        if needs_scoring(seq):
            self.scored_sequence_by_row[len(self.slots)] = seq

    def paced_budget(self, pace: Pace, budget: int) -> int:
        """What is left of a budget for prompts beside the rows planned so far."""
        prompt_budget = pace.budget(len(self.slots))
        self.is_paced = prompt_budget < budget
        return min(budget, prompt_budget)

    def plan(self, step_id: int, epoch: int, released_slots: list[int]) -> StepPlan:
        """The message to the ranks."""
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            released_slots=int32_array(released_slots),
            admitted_rows=_admitted_rows(self.admitted_sequences)
            if self.admitted_sequences
            else None,
            appended_slots=int32_array(self.appended_slots),
            appended_block_ids=int32_array(self.appended_block_ids),
            slots=int32_array(self.slots),
            num_new_tokens=int32_array(self.num_new_tokens),
            sampling_flags=bytes(self.sampling_flags),
            mask_flags=self._mask_flags(),
            scoring_flags=scoring_flags(self.scored_sequence_by_row, len(self.slots)),
        )

    def _mask_flags(self) -> bytes:
        """See `StepPlan.mask_flags`."""
        if not any(seq.structural_tag for seq in self.sampling_sequences):
            return b""
        sampling_sequences = iter(self.sampling_sequences)
        return bytes(
            1 if samples_token and next(sampling_sequences).structural_tag else 0
            for samples_token in self.sampling_flags
        )

    def to_submitted_step(self, plan: StepPlan, queues: Queues, launched_s: float) -> SubmittedStep:
        """What is kept of it until its result is read."""
        record = StepRecord(
            step_id=plan.step_id,
            epoch=plan.epoch,
            launched_s=launched_s,
            num_rows=len(self.slots),
            num_tokens=sum(self.num_new_tokens),
            num_decoding=self.num_new_tokens.count(1),
            num_admitted=len(self.admitted_sequences),
            num_running=len(queues.running),
            num_waiting=len(queues.waiting),
            num_free_blocks=queues.block_manager.num_free_blocks,
            num_preempted=self.num_preempted,
            num_recomputed_tokens=self.num_recomputed_tokens,
            head_wait_reason=self.head_wait_reason,
        )
        return SubmittedStep(
            plan,
            self.sampling_sequences,
            list(self.scored_sequence_by_row.values()),
            record,
            has_mask=not plan.mask_flags,
        )


def _admitted_rows(admitted_sequences: list[tuple[Sequence, int]]) -> AdmittedRows:
    sequences = [seq for seq, _ in admitted_sequences]
    token_ids, block_ids = int32_array(), int32_array()
    for seq in sequences:
        token_ids.extend(seq.token_ids)
        block_ids.extend(seq.block_table)
    return AdmittedRows(
        slots=int32_array(seq.slot for seq in sequences),
        num_tokens=int32_array(len(seq.token_ids) for seq in sequences),
        num_prompt_tokens=int32_array(seq.num_prompt_tokens for seq in sequences),
        num_stored_tokens=int32_array(num_stored for _, num_stored in admitted_sequences),
        num_blocks=int32_array(len(seq.block_table) for seq in sequences),
        token_ids=token_ids,
        block_ids=block_ids,
        sampling=tuple(seq.sampling for seq in sequences),
    )


@dataclass(slots=True)
class SubmittedStep:
    """A step whose result is unread. scored_sequences: those whose prompts get log probabilities in
    it, in the order of their rows. has_mask: its `StepMask` was sent, or none is needed.
    """

    plan: StepPlan
    sampling_sequences: list[Sequence]
    scored_sequences: list[Sequence]
    record: StepRecord
    has_mask: bool

    @property
    def step_id(self) -> int:
        return self.plan.step_id

    @property
    def epoch(self) -> int:
        return self.plan.epoch


def step_of(result: StepResult, submitted_steps: deque[SubmittedStep]) -> SubmittedStep:
    """The oldest of the submitted steps. Raises `EngineError` unless this is its result."""
    oldest_step = submitted_steps[0] if submitted_steps else None
    if oldest_step is None or (result.step_id, result.epoch) != (
        oldest_step.step_id,
        oldest_step.epoch,
    ):
        expected_step = "no step"
        if oldest_step is not None:
            expected_step = f"step {oldest_step.step_id} of epoch {oldest_step.epoch}"
        raise EngineError(
            f"got the result of step {result.step_id} of epoch {result.epoch}, expected"
            f" {expected_step}"
        )
    num_tokens = len(result.token_ids)
    num_sampling_rows = len(oldest_step.sampling_sequences)
    if num_tokens != num_sampling_rows:
        raise EngineError(
            f"step {result.step_id} sampled {num_tokens} tokens for {num_sampling_rows} rows"
        )
    if result.logprobs is not None and len(result.logprobs) != num_tokens:
        raise EngineError(
            f"step {result.step_id} has {len(result.logprobs)} logprobs for {num_tokens} tokens"
        )
    return oldest_step


@dataclass(slots=True)
class StepOutput:
    """The content of a result: one token for each of `sequences`, and which sequences ended."""

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: Scores = field(default_factory=list)
    finished_sequences: list[Sequence] = field(default_factory=list)
