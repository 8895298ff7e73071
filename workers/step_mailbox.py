"""What the threads of a rank hand to each other, step by step.

The thread that launches steps puts the outcome of each; the threads that report them take it. Masks
come from yet another thread, and the one that launches takes them. Each may be asked for before it
is there. Any thread may call; whoever waits does so for a limited time.
"""

from __future__ import annotations

import threading

from scheduler.errors import StepTimeoutError
from scheduler.messages import StepMask, StepPlan
from workers.model_runner import PendingStep
from workers.report import STEP_GRACE_S

Outcome = PendingStep | Exception
_StepKey = tuple[int, int]  # epoch, step id


class StepMailbox:
    """Outcomes and masks of the steps of one rank. Each is put once and taken once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outcomes: dict[_StepKey, Outcome] = {}
        self._masks: dict[_StepKey, StepMask] = {}
        self._change_condition = threading.Condition()

    def put_outcome(self, plan: StepPlan, outcome: Outcome) -> None:
        """A step was launched, or failed."""
        with self._change_condition:
            self._outcomes[plan.epoch, plan.step_id] = outcome
            self._change_condition.notify_all()

    def take_outcome(self, step_id: int, epoch: int, limit_s: float) -> Outcome:
        """Wait for the outcome of a step, which may be launched later. Raises `StepTimeoutError`
        once neither a launch nor a mask has come for `limit_s` and `STEP_GRACE_S`.
        """
        key = (epoch, step_id)
        with self._change_condition:
            while key not in self._outcomes and self._change_condition.wait(limit_s + STEP_GRACE_S):
                pass  # a step was launched, or a mask came: the time limit starts again
            outcome = self._outcomes.pop(key, None)
        if outcome is None:
            raise StepTimeoutError(
                f"rank {self._rank}: step {step_id} of epoch {epoch} did not run in {limit_s} s"
            )
        return outcome

    def put_mask(self, step_mask: StepMask) -> None:
        """The mask of a step, which may be launched later."""
        with self._change_condition:
            self._masks[step_mask.epoch, step_mask.step_id] = step_mask
            self._change_condition.notify_all()

    def take_mask(self, plan: StepPlan, limit_s: float) -> StepMask:
        """Wait for the mask of a step. Raises `StepTimeoutError`."""
        key = (plan.epoch, plan.step_id)
        with self._change_condition:
            if not self._change_condition.wait_for(lambda: key in self._masks, limit_s):
                raise StepTimeoutError(
                    f"rank {self._rank}: the mask of step {plan.step_id} of epoch {plan.epoch} did"
                    f" not come within {limit_s} s"
                )
            return self._masks.pop(key)
