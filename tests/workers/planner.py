"""Plans written by hand, without the scheduler: rows are admitted, advanced, preempted and released
as a test decides.

Block ids are handed out in sequence and never reused, so a test shares blocks only on purpose. It
can work a step ahead: a plan needs the value of a token only when a row is admitted again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import count

from scheduler.messages import AdmittedRows, StepPlan, int32_array
from scheduler.params import ResolvedSampling

GREEDY = ResolvedSampling(seed=0, max_tokens=1000, temperature=0.0)


@dataclass
class Row:
    """One sequence; `tokens` grows as results are read, `length` as steps are planned."""

    tokens: list[int]
    num_prompt: int
    sampling: ResolvedSampling = GREEDY
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Planner:
    """Builds consecutive plans. Call `admit` and `release` as needed, then `step` with the rows and
    their numbers of tokens.
    """

    def __init__(self, block_size: int, epoch: int = 0) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.sampled: list[list[Row]] = []  # by step
        self._block_ids = count()
        self._released: list[int] = []
        self._admitted: list[tuple[Row, int]] = []
        self._appended: list[tuple[int, int]] = []

    def admit(
        self, row: Row, slot: int, shared: list[int] | None = None, num_stored: int = 0
    ) -> None:
        """Row enters `slot`; its table begins with the `shared` blocks, of which `num_stored`
        tokens are filled.
        """
        row.slot, row.blocks = slot, list(shared or [])
        row.length = len(row.tokens)
        row.computed = min(num_stored, row.length - 1)
        while len(row.blocks) * self.block_size < row.length:
            row.blocks.append(next(self._block_ids))
        self._admitted.append((row, num_stored))

    def release(self, row: Row) -> None:
        self._released.append(row.slot)
        row.slot, row.blocks, row.computed = -1, [], 0

    def step(self, rows: list[tuple[Row, int]]) -> StepPlan:
        """The next plan: each row computes up to this many tokens, and samples if that reaches the
        end of its tokens.
        """
        slots, new, samples, sampled = int32_array(), int32_array(), bytearray(), []
        for row, most in rows:
            num_new = min(most, row.length - row.computed)
            row.computed += num_new
            while len(row.blocks) * self.block_size < row.computed:
                row.blocks.append(next(self._block_ids))
                self._appended.append((row.slot, row.blocks[-1]))
            slots.append(row.slot)
            new.append(num_new)
            ends = row.computed == row.length
            samples.append(ends)
            if ends:
                row.length += 1
                sampled.append(row)
        plan = StepPlan(
            step_id=len(self.sampled),
            epoch=self.epoch,
            released_slots=int32_array(self._released),
            admitted_rows=self._admitted_rows() if self._admitted else None,
            appended_slots=int32_array(slot for slot, _ in self._appended),
            appended_block_ids=int32_array(block for _, block in self._appended),
            slots=slots,
            num_new_tokens=new,
            sampling_flags=bytes(samples),
        )
        self._released, self._admitted, self._appended = [], [], []
        self.sampled.append(sampled)
        return plan

    def take(self, step_id: int, token_ids: array[int]) -> None:
        """Append the tokens of a step to its rows."""
        for row, token in zip(self.sampled[step_id], token_ids, strict=True):
            row.tokens.append(token)

    def _admitted_rows(self) -> AdmittedRows:
        rows = [row for row, _ in self._admitted]
        return AdmittedRows(
            slots=int32_array(row.slot for row in rows),
            num_tokens=int32_array(len(row.tokens) for row in rows),
            num_prompt_tokens=int32_array(row.num_prompt for row in rows),
            num_stored_tokens=int32_array(num_stored for _, num_stored in self._admitted),
            num_blocks=int32_array(len(row.blocks) for row in rows),
            token_ids=int32_array(token for row in rows for token in row.tokens),
            block_ids=int32_array(block for row in rows for block in row.blocks),
            sampling=tuple(row.sampling for row in rows),
        )
