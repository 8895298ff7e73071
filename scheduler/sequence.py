"""One sequence of tokens on its way from prompt to end, and how far it has been computed.

    token_ids      prompt, then every generated token the driver knows
    num_total      len(token_ids) + num_pending: those in flight included
    num_computed   tokens whose KV is in the cache once all submitted steps have run

        0 ............ num_computed ............ len(token_ids) ....... num_total
        |  KV stored  |  to be run in next steps, num_pending of them  |
                         sampled in steps whose result is unread

A sequence is only changed by the scheduler.
"""

from __future__ import annotations

from enum import Enum

from scheduler.messages import Request


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


NO_SLOT = -1


class Sequence:
    """State of one request in the scheduler. `max_total` is the length, prompt included, at which
    it ends.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "block_hashes",
        "block_table",
        "cache_salt",
        "finish_reason",
        "grammar",
        "is_held",
        "last_step_id",
        "max_total",
        "must_restart",
        "next_scored",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_total",
        "request_id",
        "sampling",
        "slot",
        "status",
        "stop_token_ids",
        "strikes",
        "strikes_without_token",
        "token_ids",
        "tokens_at_strike",
        "valid_from_step",
    )

    def __init__(self, request: Request, *, arrival: int, max_total: int) -> None:
        self.request_id = request.request_id
        self.arrival = arrival
        self.arrival_s = request.arrival_s
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling = request.sampling
        self.stop_token_ids = request.sampling.stop_token_ids
        self.cache_salt = request.cache_salt
        self.grammar = request.grammar
        self.max_total = max_total
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []
        self.num_published_blocks = 0
        self.slot = NO_SLOT
        self.num_computed = 0
        self.num_pending = 0
        self.num_total = len(self.token_ids)
        self.num_cached_tokens: int | None = None  # from the first admission
        self.next_scored = 1  # the first prompt token without a log probability, if they are wanted
        self.num_preemptions = 0
        self.last_step_id = -1  # the last step it may have run in, once it has given up its slot
        # Crashes it took part in since it last got a few tokens without one, or a single token.
        self.strikes = self.strikes_without_token = 0
        self.tokens_at_strike = self.num_total  # or where it began
        # See `Scheduler.hold` and `Scheduler.retract`.
        self.is_held = False
        self.must_restart = False
        self.valid_from_step = 0  # what earlier steps of this epoch sample for it is void

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def lacks_scores(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not known."""
        return self.sampling.prompt_logprobs >= 0 and self.next_scored < self.num_prompt_tokens

    @property
    def reads_prefixes(self) -> bool:
        """Whether it may begin with blocks that others filled, which leaves it without logits of
        their tokens.
        """
        return not self.lacks_scores

    @property
    def waits_for_mask(self) -> bool:
        """Whether no step may run it, since its next token depends on a mask."""
        return self.is_held and not self.num_pending

    def end(self, reason: str) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, {len(self.token_ids)} tokens of"
            f" {self.max_total}, {self.num_computed} computed, {self.num_pending} pending, blocks"
            f" {self.block_table})"
        )
