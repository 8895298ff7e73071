"""What one API process accepts at a time: open outputs, and bodies on their way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.api.errors import HttpError
from scheduler.bounds import HTTP_BOUNDS, MAX_OUTPUTS, MIB
from scheduler.errors import OverloadedError, RequestError

MIN_BODY_BYTES_PER_S = 8192  # of a body, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Limits of one API process.

    max_open_outputs: outputs that run or wait at a time, in all processes that share their counts;
    a request for more is refused at once. max_total_body_bytes: beyond it, only small bodies are
    taken. slow_reader_timeout_s: how long a client may take nothing of an answer. ping_interval_s:
    after how long a silence of a stream, or at most twice that, a comment is sent.
    small_body_delay_s, large_body_delay_s: by how much a body may be later than 8 KiB per second,
    up to max_small_body_bytes and beyond.
    """

    max_open_outputs: int = 1024
    max_body_bytes: int = HTTP_BOUNDS["body"].maximum
    max_total_body_bytes: int = HTTP_BOUNDS["bodies"].maximum
    max_small_body_bytes: int = HTTP_BOUNDS["small body"].maximum
    max_outputs_per_request: int = MAX_OUTPUTS
    slow_reader_timeout_s: float = 30.0
    ping_interval_s: float = 15.0
    small_body_delay_s: float = HTTP_BOUNDS["body time"].maximum
    large_body_delay_s: float = HTTP_BOUNDS["body pause"].maximum


class OpenOutputCounts:
    """How many outputs are open in each of the processes that share one limit.

    Each process writes its own number before it reads the others, so two that take the last place
    at the same time both see too many, and never one too few.
    """

    def __init__(self, counts: memoryview | None = None, index: int = 0) -> None:
        """`counts`: 64-bit numbers in memory that the processes share; this one's is at `index`.
        Without it, this is the only process.
        """
        self._counts = counts if counts is not None else memoryview(bytearray(8)).cast("q")
        self._index = index

    @property
    def num_in_process(self) -> int:
        """Those of this process."""
        return self._counts[self._index]

    @property
    def num_in_all_processes(self) -> int:
        """Those of all processes."""
        return sum(self._counts)

    def add(self, num_outputs: int) -> None:
        """Count outputs of this process; a negative number for those that have ended."""
        self._counts[self._index] += num_outputs


class Admission:
    """Counts open outputs, and the bytes of bodies from their receipt until their requests are
    built or refused. Used from one event loop only.

    open_output_counts: with those of other processes, where the limit is for all of them.
    """

    def __init__(self, limits: ApiLimits) -> None:
        self.limits = limits
        self.open_output_counts = OpenOutputCounts()
        self.num_body_bytes = 0
        self.is_draining = False

    @property
    def num_open_outputs(self) -> int:
        """The open outputs of this process."""
        return self.open_output_counts.num_in_process

    @contextlib.contextmanager
    def admit(self, num_outputs: int) -> Iterator[None]:
        """Reserve room for the outputs of one request. Raises `OverloadedError` when there is none
        now, `RequestError` for a request that can never have room.
        """
        if num_outputs > self.limits.max_outputs_per_request:
            raise RequestError(
                f"the request asks for {num_outputs} outputs (prompts times n); at most"
                f" {self.limits.max_outputs_per_request} are possible. Send several requests",
                "n",
            )
        self.open_output_counts.add(num_outputs)
        try:
            self._check_room(
                num_outputs, self.open_output_counts.num_in_all_processes - num_outputs
            )
            yield
        finally:
            self.open_output_counts.add(-num_outputs)

    def check_room(self, num_outputs: int = 1) -> None:
        """Raise `OverloadedError` unless there is room for this many outputs now."""
        self._check_room(num_outputs, self.open_output_counts.num_in_all_processes)

    def _check_room(self, num_outputs: int, num_other_outputs: int) -> None:
        """`num_other_outputs`: those of all processes that are open besides."""
        if self.is_draining:
            raise OverloadedError("the server is shutting down; send the request to another one")
        if num_other_outputs + num_outputs > self.limits.max_open_outputs:
            raise OverloadedError(
                f"{num_other_outputs} outputs are running or waiting, of"
                f" {self.limits.max_open_outputs} possible (--max-open-requests for each engine);"
                " try again later"
            )


class Upload:
    """One body while it comes.

    deadline_s: when it is too late for the next part, by `time.monotonic` and the event loop's
    clock. Each part moves it by the time that the part may take at `MIN_BODY_BYTES_PER_S`, but a
    fast start earns no long pause: all that waits for a body holds memory that others lack.
    num_bytes: counted so far, those of the decoded body once it is decoded; 0 after `close`.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission, self._limits = admission, admission.limits
        self._began_s = time.monotonic()
        self.deadline_s = self._began_s + self._limits.small_body_delay_s
        self.num_bytes = 0

    def timeout_message(self) -> str:
        """Why it is too late."""
        return (
            f"{self.num_bytes} bytes of the body came within {time.monotonic() - self._began_s:.0f}"
            f" s, and then too few; it may be {self._allowed_delay_s:g} s later than"
            f" {MIN_BODY_BYTES_PER_S} bytes per second"
        )

    def check_length(self, num_bytes: int) -> None:
        """Raise `HttpError` 413 if a body of so many bytes is too large."""
        limit = self._limits.max_body_bytes
        if num_bytes > limit:
            raise HttpError(413, f"the body is too large; at most {limit} bytes are possible")

    def add(self, num_bytes: int) -> None:
        """Count a part, or what decoding has added, which may be negative. Raises `HttpError` 413,
        and `OverloadedError` if all bodies together are too large and this one is not small.
        """
        self.num_bytes += num_bytes
        self._admission.num_body_bytes += num_bytes
        self.check_length(self.num_bytes)
        max_small_bytes = self._limits.max_small_body_bytes
        max_total_bytes = self._limits.max_total_body_bytes
        if self.num_bytes > max_small_bytes and self._admission.num_body_bytes > max_total_bytes:
            raise OverloadedError(
                f"{max_total_bytes // MIB} MiB of other requests are being received; try again"
                f" later, or with at most {max_small_bytes} bytes"
            )
        self.deadline_s = min(
            self.deadline_s + num_bytes / MIN_BODY_BYTES_PER_S,
            time.monotonic() + self._allowed_delay_s,
        )

    def close(self) -> None:
        """Count the body no longer."""
        self._admission.num_body_bytes -= self.num_bytes
        self.num_bytes = 0

    @property
    def _allowed_delay_s(self) -> float:
        is_small = self.num_bytes <= self._limits.max_small_body_bytes
        return self._limits.small_body_delay_s if is_small else self._limits.large_body_delay_s
