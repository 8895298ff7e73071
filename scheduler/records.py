"""What each step ran, and why sequences waited: bounded, readable at any time; and counters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import add

MAX_RECORDS = 4096

# Why the first sequence in line was not admitted.
WAITS_FOR_SLOT = "max_num_seqs"
WAITS_FOR_BLOCKS = "kv blocks"
WAITS_FOR_TOKEN_BUDGET = "max_num_batched_tokens"
WAITS_FOR_CACHED_TOKENS = "cached tokens of others"
WAITS_FOR_PACE = "max_decode_slowdown"
WAITS_FOR_LAST_TOKEN = "its last token is in flight"
WAITS_FOR_SUSPECT = "a suspect runs alone"


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. Times are seconds of the scheduler's clock; `done_s` is 0 until the result is read
    and stays 0 for a step that was lost.

    num_rows, num_tokens: what the step runs. num_decoding: rows that run one token.
    num_running, num_waiting, num_free_blocks: when it had been planned.
    head_wait_reason: why the first sequence in line was not admitted, "" if none was left.
    num_preempted: in this step; num_recomputed_tokens: of rows admitted in it, lost with ranks.
    num_admitted: rows new to the ranks, also of sequences that were admitted before.
    seconds: by part of the step on rank 0.
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
    num_recomputed_tokens: int = 0
    head_wait_reason: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of the rows that run several tokens."""
        return self.num_tokens - self.num_decoding


class StepRecords:
    """The last steps, oldest first. Written by the engine's thread, read from any."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def since(self, at_s: float) -> list[StepRecord]:
        """The steps launched at `at_s` or later."""
        return [record for record in list(self._records) if record.launched_s >= at_s]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, as in `EngineStats`. queue_s: the sum over admitted sequences;
    step_seconds: by part of the step, on rank 0; rank_seconds: by rank.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_admitted: int = 0
    queue_s: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()

    def add_admission(self, num_tokens: int, num_cached_tokens: int, queue_s: float) -> None:
        """Count the first admission of a sequence."""
        self.num_admitted += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        self.queue_s += queue_s

    def add_seconds(self, step_seconds: dict[str, float], rank_seconds: tuple[float, ...]) -> None:
        """Count the times of a result, in new objects: another thread may be copying these."""
        sums_before = self.step_seconds
        self.step_seconds = sums_before | {
            part: sums_before.get(part, 0.0) + seconds for part, seconds in step_seconds.items()
        }
        seconds_before = self.rank_seconds or (0.0,) * len(rank_seconds)
        self.rank_seconds = tuple(map(add, seconds_before, rank_seconds))
