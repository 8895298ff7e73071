"""A progress bar over requests that shows prefill and decode tokens per second."""

from __future__ import annotations

import threading
import time

from cluster.client.outputs import Chunk, Sink


class ProgressBar:
    """Counts finished outputs on standard error. Sinks run on the polling thread, and
    on one that aborts."""

    def __init__(self) -> None:
        # Imported here: a tenth of a second, for a bar that most programs do not show.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._lock = threading.Lock()
        self._began_s = time.perf_counter()
        self._num_prefilled_tokens = self._num_decoded_tokens = 0
        speed_format = (
            "prefill {task.fields[prefill]:.0f} tokens/s, decode {task.fields[decode]:.0f} tokens/s"
        )
        self._progress = Progress(
            TextColumn("Requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn(speed_format),
            console=Console(stderr=True),
        )
        self._task_id = self._progress.add_task("requests", total=None, prefill=0.0, decode=0.0)

    def expect(self, num_outputs: int) -> None:
        """How many outputs there will be."""
        self._progress.update(self._task_id, total=num_outputs)

    def sink(self) -> Sink:
        """Takes the chunks of one request."""
        seen_indices: set[int] = set()

        def take(chunk: Chunk) -> None:
            self._count(chunk, is_first=chunk.index not in seen_indices)
            seen_indices.add(chunk.index)

        return take

    def _count(self, chunk: Chunk, *, is_first: bool) -> None:
        with self._lock:
            if is_first:
                self._num_prefilled_tokens += chunk.num_prompt_tokens - chunk.num_cached_tokens
            self._num_decoded_tokens += len(chunk.token_ids)
            seconds = time.perf_counter() - self._began_s
            self._progress.update(
                self._task_id,
                advance=int(chunk.finish_reason is not None),
                prefill=self._num_prefilled_tokens / seconds,
                decode=self._num_decoded_tokens / seconds,
            )

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
