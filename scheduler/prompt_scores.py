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


def has_scores(seq: Sequence) -> bool:
    """Whether the chunk that a sequence computes next is followed by prompt tokens whose log
    probabilities are wanted.
    """
    return seq.lacks_scores and seq.num_computed + 1 < seq.num_prompt_tokens


def scored_rows(scored: dict[int, Sequence], num_rows: int) -> bytes:
    """See `StepPlan.scored`; `scored` holds the sequences by row."""
    return bytes(row in scored for row in range(num_rows)) if scored else b""


def take_scores(sequences: list[Sequence], result: StepResult) -> Scores:
    """What a result tells of the prompts of its scored rows that was not known. Raises
    `EngineError` if it does not fit them.
    """
    parts = result.prompt_logprobs
    if len(parts) != len(sequences):
        raise EngineError(
            f"step {result.step_id} has prompt logprobs of {len(parts)} rows, expected"
            f" {len(sequences)}"
        )
    new: Scores = []
    for seq, part in zip(sequences, parts, strict=True):
        if seq.status is SequenceStatus.FINISHED or part.end <= seq.next_scored:
            continue
        if part.first > seq.next_scored:
            raise EngineError(
                f"step {result.step_id} has prompt logprobs from token {part.first} on, but those"
                f" from {seq.next_scored} on are missing: {seq}"
            )
        new.append((seq, part.since(seq.next_scored)))
        seq.next_scored = part.end
    return new
