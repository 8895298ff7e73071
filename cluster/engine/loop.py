"""The engine thread: carries out commands, runs steps, and delivers the news of each step. No other
thread changes the scheduler. Others read its counters and records without a lock, so these are
numbers, are replaced instead of changed, or are copied in one operation.

Commands come from the driver's event loop through an inbox; news leaves through a callback that
must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.error_kinds import kind_of, reason_of
from cluster.news import News
from scheduler.engine import Engine, Executor
from scheduler.errors import EaglerayError, RequestError, RequestFailedError
from scheduler.messages import EngineStats, Request, TokenLogprobs
from scheduler.prompt_scores import Scores
from scheduler.sequence import Sequence
from scheduler.steps import StepOutput
from scheduler.suspects import CLEARING_TOKENS, SUSPECT_STRIKES

# Idle time before the invariants are checked: with many blocks the check takes tens of
# milliseconds, during which a new request would wait.
IDLE_CHECK_DELAY_S = 1.0
# A step is planned this long before the ranks need it, or this share of the time until then,
# whichever is longer.
PLAN_LEAD_S, PLAN_LEAD_SHARE = 0.008, 0.2
# After this long, a step's news has all tokens that were held back from frontends.
MAX_HOLD_BACK_S = 2.0

logger = logging.getLogger("eagleray.driver")

Logprobs = list[TokenLogprobs | None]
NewsByFrontend = dict[int, dict[str, News]]  # registration number, then request id


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Queue requests of one frontend."""

    registration_number: int
    requests: list[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End requests with a reason. Does nothing to those that have ended."""

    request_ids: list[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksLost:
    """The ranks of the present epoch have died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReplaced:
    """A new group of ranks is ready. `cache_survives`: see `Engine.start_epoch`."""

    executor: Executor
    cache_survives: bool = False


Command = Submit | Finish | RanksLost | RanksReplaced


@dataclass(slots=True)
class _OpenRequest:
    """A request that runs or waits: whose it is, and which of its tokens the frontend has.

    num_tokens_per_news: see `Request`. unsent_logprobs: of the tokens after the first
    `num_sent_tokens`.
    """

    sequence: Sequence
    registration_number: int
    num_tokens_per_news: int
    num_sent_tokens: int
    unsent_logprobs: Logprobs = field(default_factory=list)

    def is_due(self, num_unsent_tokens: int) -> bool:
        """Whether so many tokens are enough to be sent before the last one is there."""
        return self.num_tokens_per_news > 0 and (
            self.num_sent_tokens == 0 or num_unsent_tokens >= self.num_tokens_per_news
        )

    def take_unsent(self) -> News:
        """News of all tokens that were held back. Hot: once per streamed token."""
        seq, num_sent_tokens = self.sequence, self.num_sent_tokens
        unsent_token_ids = seq.token_ids[seq.num_prompt_tokens + num_sent_tokens :].tolist()
        self.num_sent_tokens += len(unsent_token_ids)
        news = News(
            num_sent_tokens, unsent_token_ids, seq.num_cached_tokens or 0, seq.finish_reason
        )
        if self.unsent_logprobs:
            news.logprobs, self.unsent_logprobs = self.unsent_logprobs, []
        return news


class StepLoop:
    """Runs one engine on its own thread."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[NewsByFrontend], None],
        on_failure: Callable[[Exception], None],
        on_failed_step: Callable[[int, str], None] = lambda epoch, reason: None,
        on_result_applied: Callable[[int], None] = lambda epoch: None,
        on_conviction: Callable[[], None] = lambda: None,
    ) -> None:
        """`deliver` receives the news of each step, `on_failure` the error that ended the loop,
        `on_failed_step` the epoch whose step failed and why, `on_result_applied` the epoch of each
        result; `on_conviction` is called when requests have failed for killing the ranks. All run
        on the loop's thread.

        While there are no ranks, the loop still carries out commands; `RanksReplaced` resumes the
        steps.
        """
        self.engine = engine
        self._deliver = deliver
        self._on_failure, self._on_result_applied = on_failure, on_result_applied
        self._on_failed_step, self._on_conviction = on_failed_step, on_conviction
        self._has_ranks = True
        self.busy_since_s: float | None = None  # when the wait for a result began; None: no work
        self._open_requests: dict[str, _OpenRequest] = {}  # by request id
        self._all_sent_at_s = 0.0  # or when the first open request came
        self._inbox: deque[Command] = deque()
        self._wake_condition = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Put a command into the inbox. Any thread."""
        with self._wake_condition:
            self._inbox.append(command)
            self._wake_condition.notify()

    def stop(self) -> None:
        """Ask the thread to end after its step. Any thread."""
        with self._wake_condition:
            self._is_stopping = True
            self._wake_condition.notify()

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
                self.run_once()
        except Exception as error:
            if not self._is_stopping:
                self._on_failure(error)

    def run_once(self) -> None:
        """Carry out the commands in the inbox, then run a step if there are ranks."""
        while self._inbox:
            self._carry_out(self._inbox.popleft())
        if self._has_ranks:
            self._run_step()
        elif not self.engine.scheduler.has_unfinished_sequences:
            self.busy_since_s = None
        elif self.busy_since_s is None:
            self.busy_since_s = time.monotonic()
        self._report_failures()  # also if the step was lost

    def _run_step(self) -> None:
        if self.busy_since_s is None:
            self.busy_since_s = time.monotonic()
        try:
            self.engine.ensure_step_submitted()
            self._report_failures()
            self._wait_for_requests()
            step_output = self.engine.step()
        except Exception as error:
            if not kind_of(error).is_transient:
                raise
            if not self._is_stopping:
                self._on_failed_step(self.engine.scheduler.epoch, reason_of(error))
                self._pause_steps()
            return
        if step_output is None:
            self.busy_since_s = None
            return
        self.busy_since_s = time.monotonic() if self.engine.has_work else None
        self._on_result_applied(self.engine.scheduler.epoch)
        if news := self._news(step_output):
            self._deliver(news)

    def _wait_for_requests(self) -> None:
        """Wait until shortly before the ranks need the next plan, or until their step has ended. A
        request that arrives meanwhile joins that plan instead of the one after it.
        """
        assert self.busy_since_s is not None
        slack_s = self.engine.slack_s
        plan_at_s = self.busy_since_s + slack_s - max(PLAN_LEAD_S, PLAN_LEAD_SHARE * slack_s)
        if (wait_s := plan_at_s - time.monotonic()) > 0:
            self.engine.wait(wait_s)
            while self._inbox and isinstance(self._inbox[0], Submit | Finish):
                self._carry_out(self._inbox.popleft())

    def _pause_steps(self) -> None:
        """Run no steps until there are other ranks."""
        self._has_ranks = False

    def _replace_ranks(self, replacement: RanksReplaced) -> None:
        """Begin the next epoch: every sequence goes on, except those that keep killing ranks."""
        self._has_ranks, self.engine.executor = True, replacement.executor
        convicted = self.engine.start_epoch(cache_survives=replacement.cache_survives)
        if convicted:
            self._on_conviction()
        for seq in convicted:
            num_strikes = seq.strikes + seq.strikes_beside_others
            num_alone = seq.strikes - SUSPECT_STRIKES
            who = f"{num_alone} times it" if num_alone else "another that asks for the same"
            error = RequestFailedError(
                f"ranks failed {num_strikes} times while request {seq.request_id} ran, and it got"
                f" fewer than {CLEARING_TOKENS} tokens from one time to the next;"
                f" {who} ran alone; all other requests go on"
            )
            self._fail(seq, error)

    def _report_failures(self) -> None:
        """Report the sequences that failed by themselves. Must come before the next command, which
        may close their requests or reuse their ids.
        """
        for seq, error in self.engine.take_failures():
            self._fail(seq, error)

    def _fail(self, seq: Sequence, error: EaglerayError) -> None:
        """Tell the frontend of a request why it has failed."""
        open_request = self._open_requests.pop(seq.request_id)
        news = open_request.take_unsent()
        news.error = error
        self._deliver({open_request.registration_number: {seq.request_id: news}})

    def _wait_for_work(self) -> bool:
        """Sleep until there is a command or a step to run. False when the loop should stop."""

        def has_something_to_do() -> bool:
            has_steps = self._has_ranks and self.engine.has_work
            return has_steps or bool(self._inbox) or self._is_stopping

        with self._wake_condition:
            is_idle = not self._wake_condition.wait_for(has_something_to_do, IDLE_CHECK_DELAY_S)
        if is_idle:
            self.engine.check()
            with self._wake_condition:
                self._wake_condition.wait_for(has_something_to_do)
        return not self._is_stopping

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Finish):
            for request_id in command.request_ids:
                self.engine.finish(request_id, command.reason)
                self._open_requests.pop(request_id, None)
            return
        if isinstance(command, RanksLost):
            self._pause_steps()
            return
        if isinstance(command, RanksReplaced):
            self._replace_ranks(command)
            return
        for request in command.requests:
            try:
                self._add(request, command.registration_number)
            except RequestError as error:  # the driver has checked it, so only this one fails
                refusal = News(first_index=0, finish_reason="error", error=error)
                self._deliver({command.registration_number: {request.request_id: refusal}})

    def _add(self, request: Request, registration_number: int) -> None:
        seq = self.engine.add(request)
        if seq.finish_reason is not None:  # it was sent again with all its tokens
            end_news = News(first_index=seq.num_output_tokens, finish_reason=seq.finish_reason)
            self._deliver({registration_number: {request.request_id: end_news}})
            return
        if not self._open_requests:
            self._all_sent_at_s = time.monotonic()
        self._open_requests[request.request_id] = _OpenRequest(
            seq, registration_number, request.num_tokens_per_news, seq.num_output_tokens
        )

    def _news(self, step_output: StepOutput) -> NewsByFrontend:
        """The tokens, endings and scored prompts of a step."""
        news: NewsByFrontend = {}
        logprobs = step_output.logprobs or [None] * len(step_output.sequences)
        # If this process dies, the frontends need everything generated so far.
        sends_all = time.monotonic() - self._all_sent_at_s > MAX_HOLD_BACK_S
        if sends_all:
            self._all_sent_at_s = time.monotonic()
        for seq, token_logprobs in zip(step_output.sequences, logprobs, strict=True):
            open_request = self._open_requests[seq.request_id]
            if token_logprobs is not None:
                open_request.unsent_logprobs.append(token_logprobs)
            num_unsent_tokens = (
                len(seq.token_ids) - seq.num_prompt_tokens - open_request.num_sent_tokens
            )
            if seq.finish_reason or open_request.is_due(num_unsent_tokens):
                frontend_news = news.setdefault(open_request.registration_number, {})
                frontend_news[seq.request_id] = open_request.take_unsent()
        if sends_all:
            for request_id, open_request in self._open_requests.items():
                seq = open_request.sequence
                # One that has failed by itself is reported with its error.
                if seq.num_output_tokens > open_request.num_sent_tokens and not seq.finish_reason:
                    frontend_news = news.setdefault(open_request.registration_number, {})
                    frontend_news[request_id] = open_request.take_unsent()
        self._add_scored_prompts(step_output.prompt_logprobs, news)
        for seq in step_output.finished_sequences:
            self._open_requests.pop(seq.request_id, None)
        return news

    def _add_scored_prompts(self, scores: Scores, news: NewsByFrontend) -> None:
        """Add log probabilities of prompts. They may be large, so they are never held back."""
        for seq, prompt_logprobs in scores:
            open_request = self._open_requests[seq.request_id]
            frontend_news = news.setdefault(open_request.registration_number, {})
            if seq.request_id not in frontend_news:
                frontend_news[seq.request_id] = open_request.take_unsent()
            frontend_news[seq.request_id].prompt_logprobs = prompt_logprobs
