"""The engine thread: takes commands, runs steps, and hands out their news. The only thread to touch
the scheduler.

Commands come in through an inbox from the driver's event loop; news goes out through a callback,
which must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.client.news import News
from cluster.error_kinds import kind_of, reason_of
from scheduler.engine import Engine, Executor
from scheduler.errors import EaglerayError, RequestError, RequestFailedError
from scheduler.messages import EngineStats, Request, TokenLogprobs
from scheduler.prompt_scores import Scores
from scheduler.sequence import Sequence
from scheduler.steps import StepOutput
from scheduler.suspects import CLEARING_TOKENS, SUSPECT_STRIKES

# Idle time before the laws are checked: with many blocks the check takes tens of milliseconds, and
# a request would have to wait.
CHECK_AFTER_S = 1.0
# A step is planned this long before the ranks need it, or this share of the time they still take.
LEAD_S, LEAD_SHARE = 0.008, 0.2
# The longest time for which the tokens of a request are kept from its frontend.
CHECKPOINT_S = 2.0

logger = logging.getLogger("eagleray.driver")

Logprobs = list[TokenLogprobs | None]
NewsByFrontend = dict[str, dict[str, News]]  # frontend id, then request id


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Queue requests of one frontend."""

    frontend_id: str
    requests: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End requests with a reason. Does nothing to those that have ended."""

    request_ids: list[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The ranks of an epoch are gone."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """There is a new group of ranks."""

    executor: Executor


Command = Submit | Finish | Lost | Resume


@dataclass(slots=True)
class _Kept:
    """A request whose news is not sent with every step. interval: as in `Request.news_interval`;
    num_sent: tokens that were sent; logprobs: those of the tokens that were not.
    """

    interval: int
    num_sent: int
    logprobs: Logprobs = field(default_factory=list)

    def is_due(self, seq: Sequence) -> bool:
        if seq.finish_reason is not None:
            return True
        num_new = seq.num_output_tokens - self.num_sent
        return self.interval > 0 and (self.num_sent == 0 or num_new >= self.interval)


class EngineLoop:
    """Runs one engine on its own thread."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[NewsByFrontend], None],
        on_failure: Callable[[Exception], None],
        on_lost: Callable[[int, str], None] = lambda epoch, why: None,
        on_applied: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        """`deliver` receives the news of each step, `on_failure` the error that ended the loop,
        `on_lost` the epoch whose ranks failed and why, `on_applied` the epoch of each result. All
        are called on the loop's thread.

        When its ranks fail, the loop continues to take commands; steps run again after `Resume`.
        """
        self.engine = engine
        self._deliver = deliver
        self._on_failure, self._on_lost, self._on_applied = on_failure, on_lost, on_applied
        self._has_ranks = True
        self.busy_since_s: float | None = None  # since when steps are under way without any result
        self._owners: dict[str, str] = {}  # frontend id of each request
        self._kept: dict[str, _Kept] = {}  # by request id
        self._checkpoint_s = 0.0  # when everything kept was last sent
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
        """The scheduler's state and counters. Any thread."""
        return self.engine.scheduler.snapshot()

    # -- engine thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.turn()
        except Exception as error:
            if not self._stopping:
                self._on_failure(error)

    def turn(self) -> None:
        """Carry out what the inbox holds, then run a step if there are ranks."""
        while self._inbox:
            self._obey(self._inbox.popleft())
        if self._has_ranks:
            self._step()
        self._tell_failed()  # also if the step was lost

    def _step(self) -> None:
        if self.busy_since_s is None:
            self.busy_since_s = time.monotonic()
        try:
            self.engine.start()
            self._tell_failed()
            self._wait_for_requests()
            output = self.engine.step()
        except Exception as error:
            if not kind_of(error).may_pass:
                raise
            if not self._stopping:
                self._on_lost(self.engine.scheduler.epoch, reason_of(error))
                self._lose_ranks()
            return
        if output is None:
            self.busy_since_s = None
            return
        self.busy_since_s = time.monotonic() if self.engine.has_work else None
        self._on_applied(self.engine.scheduler.epoch)
        if news := self._news(output):
            self._deliver(news)

    def _wait_for_requests(self) -> None:
        """Wait until the ranks soon need the next plan, or have ended their step. A request that
        arrives meanwhile is part of that plan; otherwise it would wait for one step more.
        """
        assert self.busy_since_s is not None
        spare_s = self.engine.spare_s
        planned_s = self.busy_since_s + spare_s - max(LEAD_S, LEAD_SHARE * spare_s)
        if (left_s := planned_s - time.monotonic()) > 0:
            self.engine.wait(left_s)
            while self._inbox and isinstance(self._inbox[0], Submit | Finish):
                self._obey(self._inbox.popleft())

    def _lose_ranks(self) -> None:
        """Every sequence waits for the next epoch, except those that have killed ranks again and
        again.
        """
        self._has_ranks, self.busy_since_s = False, None
        for seq in self.engine.start_epoch():
            convicted = RequestFailedError(
                f"ranks failed {seq.strikes} times while request {seq.request_id} ran, and it got"
                f" fewer than {CLEARING_TOKENS} tokens from one time to the next;"
                f" {seq.strikes - SUSPECT_STRIKES} times it ran alone; all other requests go on"
            )
            self._fail(seq, convicted)

    def _tell_failed(self) -> None:
        """Tell of the sequences that have failed by themselves. Always done before the next command
        is obeyed: until then, their requests have owners, and their ids are not used again.
        """
        for seq, error in self.engine.take_failed():
            self._fail(seq, error)

    def _fail(self, seq: Sequence, error: EaglerayError) -> None:
        """Tell the frontend of a request why it has failed."""
        owner = self._owners[seq.request_id]
        news = _news_of(seq, seq.num_output_tokens, [])
        news.error = error
        self._forget(seq.request_id)
        self._deliver({owner: {seq.request_id: news}})

    def _wait_for_work(self) -> bool:
        """Sleep until there is a command to carry out or a step to run; False when the loop is to
        stop.
        """

        def awake() -> bool:
            has_steps = self._has_ranks and self.engine.has_work
            return has_steps or bool(self._inbox) or self._stopping

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
        if isinstance(command, Lost):
            if command.epoch == self.engine.scheduler.epoch and self._has_ranks:
                self._lose_ranks()
            return
        if isinstance(command, Resume):
            self.engine.executor = command.executor
            self._has_ranks = True
            return
        for request in command.requests:
            try:
                self._add(request, command.frontend_id)
            except RequestError as error:  # the driver has checked it, but it concerns no other
                refusal = News(first_index=0, finish_reason="error", error=error)
                self._deliver({command.frontend_id: {request.request_id: refusal}})

    def _add(self, request: Request, frontend_id: str) -> None:
        seq = self.engine.add(request)
        if seq.finish_reason is not None:  # it was sent again with all its tokens
            end = News(first_index=seq.num_output_tokens, finish_reason=seq.finish_reason)
            self._deliver({frontend_id: {request.request_id: end}})
            return
        self._owners[request.request_id] = frontend_id
        if request.news_interval != 1:
            if not self._kept:
                self._checkpoint_s = time.monotonic()
            self._kept[request.request_id] = _Kept(request.news_interval, seq.num_output_tokens)

    def _news(self, output: StepOutput) -> NewsByFrontend:
        """The tokens, endings and scored prompts of a step."""
        news: NewsByFrontend = {}
        logprobs = output.logprobs or [None] * len(output.sequences)
        # If this process dies, the frontends need everything generated so far.
        sends_all = bool(self._kept) and time.monotonic() - self._checkpoint_s > CHECKPOINT_S
        if sends_all:
            self._checkpoint_s = time.monotonic()
        for seq, token, entry in zip(output.sequences, output.token_ids, logprobs, strict=True):
            entries: Logprobs | None = [entry] if entry is not None else None
            kept = self._kept.get(seq.request_id)
            if kept is None:
                of_request = _news_of(seq, seq.num_output_tokens - 1, [token])
            else:
                if entry is not None:
                    kept.logprobs.append(entry)
                if not (sends_all or kept.is_due(seq)):
                    continue
                tokens = seq.token_ids[seq.num_prompt_tokens + kept.num_sent :]
                of_request = _news_of(seq, kept.num_sent, tokens)
                entries, kept.logprobs = kept.logprobs or None, []
                kept.num_sent = seq.num_output_tokens
            of_request.logprobs = entries
            news.setdefault(self._owners[seq.request_id], {})[seq.request_id] = of_request
        self._add_prompts(output.prompt_logprobs, news)
        for seq in output.finished:
            self._forget(seq.request_id)
        return news

    def _add_prompts(self, scores: Scores, news: NewsByFrontend) -> None:
        """Add log probabilities of prompts, which are sent at once, whatever the interval: they may
        be large.
        """
        for seq, part in scores:
            of_owner = news.setdefault(self._owners[seq.request_id], {})
            if seq.request_id not in of_owner:
                kept = self._kept.get(seq.request_id)
                num_sent = seq.num_output_tokens if kept is None else kept.num_sent
                of_owner[seq.request_id] = _news_of(seq, num_sent, [])
            of_owner[seq.request_id].prompt_logprobs = part

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._kept.pop(request_id, None)


def _news_of(seq: Sequence, first_index: int, token_ids: list[int]) -> News:
    return News(
        first_index=first_index,
        token_ids=token_ids,
        num_cached_tokens=seq.num_cached_tokens or 0,
        finish_reason=seq.finish_reason,
    )
