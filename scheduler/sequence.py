"""One sequence of tokens on its way from prompt to end, and how far it has been computed.

    token_ids             prompt, then every generated token the driver knows
    num_total_tokens      len(token_ids) + num_pending_tokens: those in flight included
    num_computed_tokens   tokens whose KV is in the cache once all submitted steps have run

While it decodes, with two steps in flight:

        0 ........... len(token_ids) ........... num_computed_tokens ........ num_total_tokens
        |  known tokens     |  num_pending_tokens, sampled by submitted steps            |
        |  KV stored once these steps have run              |  to be run by the next one |

In the middle of its prompt, num_computed_tokens is below len(token_ids), and num_pending_tokens
is 0.

A sequence is only changed by the scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import InitVar, dataclass, field
from enum import Enum

from scheduler.messages import Request
from scheduler.params import ResolvedSampling


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


NO_SLOT = -1


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """State of one request. `max_total_tokens` is the length, prompt included, at which it ends."""

    request: InitVar[Request]
    arrival_index: int
    max_total_tokens: int
    request_id: str = field(init=False)
    arrival_s: float = field(init=False)
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    sampling: ResolvedSampling = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    cache_salt: str = field(init=False)
    structural_tag: bytes = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)  # of full blocks; outlive the blocks
    num_published_blocks: int = 0  # the first ones of `block_table`, cached ones included
    slot: int = NO_SLOT  # while it runs: the index of its row in the tables of every rank
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_total_tokens: int = field(init=False)
    num_cached_tokens: int | None = None  # of the prompt, at the first admission; None before
    next_scored_position: int = 1  # the first prompt token without a log probability, if wanted
    last_step_id: int = -1  # the last step it may have run in, once it has given up its slot
    # Losses it took part in since it last got a few tokens without one; since its last token; and,
    # apart from these, those of a suspect while it ran beside others.
    strikes: int = 0
    strikes_without_token: int = 0
    strikes_beside_others: int = 0
    num_tokens_at_strike: int = field(init=False)  # or where it began
    # See `Scheduler.hold` and `Scheduler.retract`.
    is_held: bool = False
    first_kept_step_id: int = 0  # what earlier steps of this epoch sample for it is void
    num_retracted_tokens: int = (
        0  # tokens that they compute, but that `num_computed_tokens` counts no more
    )
    admitted_step_id: int = -1  # -1: not in this epoch
    # It has a slot and blocks, but no row at the ranks: the next step that runs it brings one.
    lacks_row: bool = False
    num_lost_tokens: int = 0  # computed tokens that were lost with the ranks

    def __post_init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.arrival_s = request.arrival_s
        self.token_ids = request.token_ids[:]
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sampling = request.sampling
        self.stop_token_ids = request.sampling.stop_token_ids
        self.cache_salt = request.cache_salt
        self.structural_tag = request.structural_tag
        self.num_total_tokens = self.num_tokens_at_strike = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not known."""
        return (
            self.sampling.prompt_logprobs >= 0
            and self.next_scored_position < self.num_prompt_tokens
        )

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may begin with blocks of others, which leaves their tokens without logits."""
        return not self.needs_prompt_logprobs

    @property
    def waits_for_mask(self) -> bool:
        """Whether no step may run it, since its next token depends on a mask."""
        return self.is_held and not self.num_pending_tokens

    def end(self, reason: str) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, {len(self.token_ids)} tokens of"
            f" {self.max_total_tokens}, {self.num_computed_tokens} computed,"
            f" {self.num_pending_tokens} pending, blocks {self.block_table})"
        )
