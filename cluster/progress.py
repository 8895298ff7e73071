"""A progress bar over requests that shows prefill and decode tokens a second."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.frontend import Chunk


class ProgressBar:
    """Counts finished outputs on standard error, if enabled. `take` runs on the polling thread."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._num_prefilled = self._num_decoded = 0
        columns = (TextColumn("Requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        speed = TextColumn("prefill {task.fields[prefill]:.0f} tokens/s, decode {task.fields[decode]:.0f} tokens/s")
        self._progress = Progress(*columns, speed, console=Console(stderr=True), disable=not enabled)
        self._task = self._progress.add_task("requests", total=total, prefill=0.0, decode=0.0)

    def take(self, chunk: Chunk, *, first: bool) -> None:
        """Count a chunk; `first` is the first one of its output."""
        with self._lock:
            if first:
                self._num_prefilled += chunk.num_prompt_tokens - chunk.num_cached_tokens
            self._num_decoded += len(chunk.token_ids)
            seconds = time.perf_counter() - self._began
            self._progress.update(
                self._task,
                advance=int(chunk.finish_reason is not None),
                prefill=self._num_prefilled / seconds,
                decode=self._num_decoded / seconds,
            )

    def sink(self) -> _Sink:
        """Where the chunks of one request go."""
        return _Sink(self)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _Sink:
    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._seen: set[int] = set()

    def __call__(self, chunk: Chunk) -> None:
        self._bar.take(chunk, first=chunk.index not in self._seen)
        self._seen.add(chunk.index)
