"""What one API process accepts: the size of requests, and the number of open outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.errors import OverloadedError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Limits of one API process.

    max_open: outputs that run or wait at a time; a request for more is refused at once.
    slow_reader_timeout_s: how long a client may leave a chunk unread. keep_alive_s: how long a
    stream may be silent before a comment is sent.
    """

    max_open: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_messages: int = 2048
    max_outputs: int = 128
    slow_reader_timeout_s: float = 30.0
    keep_alive_s: float = 15.0


class Admission:
    """Counts open outputs. Used from one event loop only."""

    def __init__(self, limits: ApiLimits) -> None:
        self.limits = limits
        self.num_open = 0
        self.is_draining = False

    @contextlib.contextmanager
    def admit(self, num_outputs: int) -> Iterator[None]:
        """Reserve room for the outputs of one request. Raises `OverloadedError` when there is none
        now, `RequestError` for a request that can never have room.
        """
        limits = self.limits
        if num_outputs > limits.max_outputs:
            raise RequestError(
                f"the request asks for {num_outputs} outputs (prompts times n); at most"
                f" {limits.max_outputs} are possible. Send several requests",
                "n",
            )
        self.check_room(num_outputs)
        self.num_open += num_outputs
        try:
            yield
        finally:
            self.num_open -= num_outputs

    def check_room(self, num_outputs: int = 1) -> None:
        """Raise `OverloadedError` unless there is room for this many outputs now."""
        if self.is_draining:
            raise OverloadedError("the server is shutting down; send the request to another one")
        if self.num_open + num_outputs > self.limits.max_open:
            raise OverloadedError(
                f"{self.num_open} outputs are running or waiting, of {self.limits.max_open}"
                " possible; try again later"
            )
