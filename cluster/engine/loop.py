"""The engine thread: takes commands, runs steps, and hands out their news. The only thread to touch
the scheduler.

Commands come in through an inbox from the driver's event loop; news goes out through a callback,
which must not block.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.news import News
from scheduler.engine import Engine
from scheduler.messages import EngineStats, Request
from scheduler.scheduler import StepOutput
from scheduler.sequence import Sequence

# Idle time before the laws are checked: with many blocks the check takes tens of milliseconds, and
# a request would have to wait.
CHECK_AFTER_S = 1.0

logger = logging.getLogger("eagleray.driver")

NewsByFrontend = dict[str, dict[str, News]]  # frontend id, then request id


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Queue requests of one frontend."""

    frontend_id: str
    requests: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End requests with a reason; those that have ended stay as they are."""

    request_ids: list[str]
    reason: str


Command = Submit | Finish


class EngineLoop:
    """Runs one engine on its own thread."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[NewsByFrontend], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`deliver` receives the news of each step, `on_failure` the error that ended the loop.
        Both are called on the loop's thread.
        """
        self.engine = engine
        self._deliver = deliver
        self._on_failure = on_failure
        self._owners: dict[str, str] = {}  # frontend id of each request
        self._final_only: set[str] = set()  # request ids
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Put a command into the inbox. Any thread."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Ask the thread to end after its step. Any thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, limit_s: float) -> None:
        """Wait for the thread."""
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def stats(self) -> EngineStats:
        """What the scheduler has done and holds at the moment. Any thread."""
        return self.engine.scheduler.snapshot()

    # -- engine thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                while self._inbox:
                    self._obey(self._inbox.popleft())
                output = self.engine.step()
                if output is not None and (news := self._news(output)):
                    self._deliver(news)
        except Exception as error:
            if not self._stopping:
                self._on_failure(error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is a command to carry out or a step to run; False when the loop is to
        stop.
        """

        def awake() -> bool:
            return self.engine.has_work or bool(self._inbox) or self._stopping

        with self._wake:
            is_idle = not self._wake.wait_for(awake, CHECK_AFTER_S)
        if is_idle:
            self.engine.check()
            with self._wake:
                self._wake.wait_for(awake)
        return not self._stopping

    def _obey(self, command: Command) -> None:
        if isinstance(command, Finish):
            for request_id in command.request_ids:
                self.engine.finish(request_id, command.reason)
                self._forget(request_id)
            return
        for request in command.requests:
            self._owners[request.request_id] = command.frontend_id
            if request.final_only:
                self._final_only.add(request.request_id)
            seq = self.engine.add(request)
            if seq.finish_reason is not None:  # it was sent again with tokens that end it already
                end = News(first_index=seq.num_output_tokens, finish_reason=seq.finish_reason)
                self._forget(request.request_id)
                self._deliver({command.frontend_id: {request.request_id: end}})

    def _news(self, output: StepOutput) -> NewsByFrontend:
        """The tokens and endings of a step."""
        news: NewsByFrontend = {}
        logprobs = output.logprobs or [None] * len(output.sequences)
        for seq, token, entry in zip(output.sequences, output.token_ids, logprobs, strict=True):
            if seq.request_id not in self._final_only:
                of_request = _news_of(seq, seq.num_output_tokens - 1, [token])
                of_request.logprobs = [entry] if entry is not None else None
                news.setdefault(self._owners[seq.request_id], {})[seq.request_id] = of_request
        for seq in output.finished:
            if seq.request_id in self._final_only:
                tokens = seq.token_ids[seq.num_prompt_tokens :]
                news.setdefault(self._owners[seq.request_id], {})[seq.request_id] = _news_of(
                    seq, 0, tokens
                )
            self._forget(seq.request_id)
        return news

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._final_only.discard(request_id)


def _news_of(seq: Sequence, first_index: int, token_ids: list[int]) -> News:
    return News(
        first_index=first_index,
        token_ids=token_ids,
        num_cached_tokens=seq.num_cached_tokens or 0,
        finish_reason=seq.finish_reason,
    )
