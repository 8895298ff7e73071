"""Log probabilities of prompt tokens on their way from step results to their sequences.

A chunk of a prompt gives those of the tokens that follow each of its own, so the last token of a
chunk gives that of the first one of the next chunk. A sequence that wants them computes its whole
prompt until all of them are known: it reads no cached prefix. What was lost, with a preemption or a
rank, is computed again; what is computed twice is kept once.
"""

from __future__ import annotations

from scheduler.errors import EngineError
from scheduler.messages import PromptLogprobs, StepResult
from scheduler.sequence import Sequence, SequenceStatus

Scores = list[tuple[Sequence, PromptLogprobs]]


def needs_scoring(seq: Sequence) -> bool:
    """Whether the next chunk gives log probabilities: they are wanted, and a prompt token follows
    its first token.
    """
    return seq.needs_prompt_logprobs and seq.num_computed_tokens + 1 < seq.num_prompt_tokens


def scoring_flags(scored_sequence_by_row: dict[int, Sequence], num_rows: int) -> bytes:
    """See `StepPlan.scoring_flags`; `scored_sequence_by_row` holds the sequences by row."""
    if not scored_sequence_by_row:
        return b""
    return bytes(row in scored_sequence_by_row for row in range(num_rows))


def take_scores(sequences: list[Sequence], result: StepResult) -> Scores:
    """What a result tells of the prompts of its scored rows that was not known. Raises
    `EngineError` if it does not fit them.
    """
    row_logprobs = result.prompt_logprobs
    if len(row_logprobs) != len(sequences):
        raise EngineError(
            f"step {result.step_id} has prompt logprobs of {len(row_logprobs)} rows, expected"
            f" {len(sequences)}"
        )
    new_scores: Scores = []
    for seq, logprobs in zip(sequences, row_logprobs, strict=True):
        if (
            seq.status is SequenceStatus.FINISHED
            or logprobs.end_position <= seq.next_scored_position
        ):
            continue
        if logprobs.first_position > seq.next_scored_position:
            raise EngineError(
                f"step {result.step_id} has prompt logprobs from token {logprobs.first_position}"
                f" on, but those from {seq.next_scored_position} on are missing: {seq}"
            )
        new_scores.append((seq, logprobs.from_position(seq.next_scored_position)))
        seq.next_scored_position = logprobs.end_position
    return new_scores
