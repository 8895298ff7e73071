"""Back to the last step whose result was read, when ranks are lost and their KV cache is not.

Steps run in order, so a result that was read proves that the cache holds what its step and all
before it have stored. What the steps after it have stored, in part or in full, nobody knows, and
need not: they are run again, and store the same values in the same places. Two kinds of blocks
are in the way:

    given away since     A was preempted, or ended, and a lost step gave its block to B. A needs it
                         no more. B counts as computed only what was read, which is nothing of this
                         block, so it fills the block itself
    published since      A filled a block in a lost step, and C was admitted with it as a prefix.
                         The block manager withdraws it from the index, and A keeps it and fills it
                         again. C was admitted in a lost step, so it waits again

What is left is a count per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.sequence import Sequence
from scheduler.steps import SubmittedStep


def roll_back(running: Iterable[Sequence], submitted_steps: Iterable[SubmittedStep]) -> None:
    """Set `num_computed_tokens` of running sequences to what they had computed before
    `submitted_steps`, whose results are lost. A sequence keeps its slot while it runs, so its
    tokens in a plan are those of its slot.
    """
    steps = [
        (step.step_id, dict(zip(step.plan.slots, step.plan.num_new_tokens, strict=True)))
        for step in submitted_steps
    ]
    for seq in running:
        num_undone_tokens = sum(
            num_new_by_slot.get(seq.slot, 0)
            for step_id, num_new_by_slot in steps
            if step_id >= seq.admitted_step_id
        )
        num_computed_tokens_before = (
            seq.num_computed_tokens + seq.num_retracted_tokens - num_undone_tokens
        )
        # The last token that is known was sampled; the step after that computes it.
        seq.num_computed_tokens = min(num_computed_tokens_before, len(seq.token_ids) - 1)
