"""What each step ran, and why sequences waited: a bounded record that can be read at any time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_RECORDS = 4096

# Why the first sequence in line was not admitted.
WAITS_FOR_SLOT, WAITS_FOR_BLOCKS, WAITS_FOR_TOKEN_BUDGET = (
    "max_num_seqs",
    "kv blocks",
    "max_num_batched_tokens",
)
WAITS_FOR_PACE = "max_decode_slowdown"
WAITS_FOR_LAST_TOKEN, WAITS_FOR_SUSPECT = "its last token is in flight", "a suspect runs alone"


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. Times are seconds of the scheduler's clock; `done_s` is 0 until the result is read
    and stays 0 for a step that was lost.

    num_rows, num_tokens: what the step runs. num_decoding: rows that run one token. head_waits_for:
    why the first sequence in line was not admitted, "" if none was left. num_preempted: in this
    step; num_evicted: blocks of the prefix cache that were taken, since the start. seconds:
    `StepResult.seconds`.
    """

    step_id: int
    epoch: int
    launched_s: float
    done_s: float = 0.0
    num_rows: int
    num_tokens: int
    num_decoding: int
    num_admitted: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int
    num_evicted: int
    head_waits_for: str
    seconds: dict[str, float] = field(default_factory=dict)


class StepRecords:
    """The last steps, oldest first. Written by the engine's thread, read from any."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def since(self, at_s: float) -> list[StepRecord]:
        """The steps launched at `at_s` or later."""
        return [record for record in list(self._records) if record.launched_s >= at_s]
