"""A progress bar over requests that shows prefill and decode tokens a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.frontend import Chunk


class ProgressBar:
    """Counts finished requests on standard error, if enabled. Sinks run on the polling thread."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._num_tokens = 0
        self._progress = Progress(
            TextColumn("Requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"), console=Console(stderr=True), disable=not enabled,
        )  # fmt: skip
        self._task = self._progress.add_task("requests", total=total, speed="")

    def sink(self) -> Callable[[Chunk], None]:
        """Where the chunks of one request go."""
        return self._take

    def _take(self, chunk: Chunk) -> None:
        with self._lock:
            self._num_tokens += len(chunk.token_ids)
            rate = self._num_tokens / (time.perf_counter() - self._began)
            advance = int(chunk.finish_reason is not None and chunk.index == 0)
            self._progress.update(self._task, advance=advance, speed=f"decode {rate:.0f} tokens/s")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
