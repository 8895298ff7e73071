"""Sends requests when they are due, and records when their tokens reach the client.

Times are taken with `time.perf_counter` in the sink of each request, on the frontend's polling
thread: what a client sees, including the time in the driver. A token arrives with its chunk: a
chunk of k tokens gives one gap to the chunk before and k - 1 gaps of zero. The time to the first
token counts from when a request was due, so it shows when the client falls behind its schedule.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.client.outputs import Chunk, Generation
from cluster.commands.batch import BatchRequest
from cluster.llm import LLM


class Timeline:
    """The sink of one request: when tokens of each output came, and how many, by `clock`."""

    def __init__(self, due_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.due_s = due_s
        self._clock = clock
        # By output index: (time, number of tokens) of each chunk.
        self._arrivals: dict[int, list[tuple[float, int]]] = {}

    def __call__(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            self._arrivals.setdefault(chunk.index, []).append((self._clock(), len(chunk.token_ids)))

    @property
    def time_to_first_token_s(self) -> float | None:
        """Time from when the request was due to its first token; None if there is none."""
        first_times_s = [arrivals[0][0] for arrivals in self._arrivals.values()]
        return min(first_times_s) - self.due_s if first_times_s else None

    def inter_token_gaps_s(
        self, since_s: float = -math.inf, until_s: float = math.inf
    ) -> list[float]:
        """Gaps between tokens of each output that end after `since_s`, not after `until_s`."""
        gaps: list[float] = []
        for arrivals in self._arrivals.values():
            previous_s: float | None = None
            for time_s, num_tokens in arrivals:
                if since_s < time_s <= until_s:
                    first_gap: list[float] = [] if previous_s is None else [time_s - previous_s]
                    gaps += first_gap + [0.0] * (num_tokens - 1)
                previous_s = time_s
        return gaps


@dataclass(slots=True, kw_only=True)
class TimedRun:
    """Requests that have ended. `total_s`: from the start of the schedule to the last end."""

    generations: list[Generation] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def num_output_tokens(self) -> int:
        completions = [c for generation in self.generations for c in generation.completions]
        return sum(len(completion.token_ids) for completion in completions)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.total_s

    def ttft_percentiles(self) -> dict[str, float | None]:
        """Percentiles over the requests."""
        times_s = [timeline.time_to_first_token_s for timeline in self.timelines]
        return percentiles([time_s for time_s in times_s if time_s is not None])

    def inter_token_percentiles(self) -> dict[str, float | None]:
        """Percentiles over all gaps between tokens."""
        return percentiles(
            [gap for timeline in self.timelines for gap in timeline.inter_token_gaps_s()]
        )


def run_timed(llm: LLM, requests: Sequence[BatchRequest], due_times_s: Sequence[float]) -> TimedRun:
    """Send each request when it is due, and wait for them. `due_times_s`: from now, ascending.

    Raises the error of a request that failed; the others continue until the engine is shut down.
    """
    run = TimedRun()
    began_s = time.perf_counter()
    while (num_sent := len(run.timelines)) < len(requests):
        time.sleep(max(0.0, began_s + due_times_s[num_sent] - time.perf_counter()))
        elapsed_s = time.perf_counter() - began_s
        num_due = max(num_sent + 1, bisect.bisect_right(due_times_s, elapsed_s))
        run.timelines += [Timeline(began_s + due) for due in due_times_s[num_sent:num_due]]
        due_requests = requests[num_sent:num_due]
        prompts = [request.prompt for request in due_requests]
        params = [request.params for request in due_requests]
        run.generations += llm.client.submit(prompts, params, run.timelines[num_sent:])
    for generation in run.generations:
        generation.done_future.result()
    run.total_s = time.perf_counter() - began_s
    return run


def draw_due_times_s(num_requests: int, rate: float | None, seed: int) -> list[float]:
    """When requests are due: all at once, or as a Poisson process of `rate` per second from 0."""
    if rate is None:
        return [0.0] * num_requests
    rng = random.Random(f"arrivals {seed}")
    return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(num_requests - 1))]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile, with linear interpolation; nulls if there are no values."""
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": round(p50, 6), "p99": round(p99, 6)}
