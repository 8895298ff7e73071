"""The messages that cross a boundary of the engine, one type each, immutable.

    frontend --Request--> driver --StepPlan, StepMask--> every rank
    frontend <--Deltas--- driver <----StepResult-------- every rank

Numbers travel as flat `array`s: 256 small objects cost more to pickle than a step costs to
schedule. A receiver of a plan or a result checks `epoch` and `step_id`: steps count from 0 in each
epoch, that of one set of rank processes. A batch slot is a row of a rank's `BatchState`; a sequence
keeps its slot while it runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.errors import EaglerayError, EngineError
from scheduler.params import ResolvedSampling


def int32_array(values: Iterable[int] = ()) -> array[int]:
    """A flat array of signed 32-bit integers."""
    return array("i", values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. Tokens after `num_prompt_tokens` were generated before and sent
    again.

    The first token is sent at once, then `num_tokens_per_news` at a time; with 0 all tokens at the
    end. Besides, the engine loop sends everything held back every 2 s (`MAX_HOLD_BACK_S` in
    `cluster.engine.loop`). `arrival_s` is when the driver got it, by its scheduler's clock; until
    then it says nothing. Only requests with the same `cache_salt` share blocks. `structural_tag` is
    the grammar that its output must match, for the driver's `Grammars`, in whatever form it was
    given: the JSON of a structural tag of xgrammar; empty if any output will do.
    """

    request_id: str
    token_ids: array[int]
    num_prompt_tokens: int
    sampling: ResolvedSampling
    cache_salt: str = ""
    num_tokens_per_news: int = 1
    arrival_s: float = 0.0
    structural_tag: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRows:
    """Rows that enter the batch in a step; every array but the two flat ones has one entry per row.

    The KV of the first `num_stored_tokens[i]` tokens is in the cache already. It is not written
    again, since blocks may be shared. The row starts at position `min(num_stored_tokens,
    num_tokens - 1)`: if even the last token is stored, it runs as a query only.
    """

    slots: array[int]
    num_tokens: array[int]
    num_prompt_tokens: array[int]
    num_stored_tokens: array[int]
    num_blocks: array[int]
    token_ids: array[int]  # flat, sum(num_tokens)
    block_ids: array[int]  # flat, sum(num_blocks)
    sampling: tuple[ResolvedSampling, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What changed since the last plan, and what runs now. The fields are applied in order; first
    the ranks forget the rows of `released_slots`.

    `appended_block_ids[i]` goes to the end of the block table of `appended_slots[i]`. The batch is
    `slots`, row by row with `num_new_tokens` each; a row samples one token at the end of its chunk
    where `sampling_flags` is 1. If a row that samples has a grammar, `mask_flags` is 1 for each
    such row and a `StepMask` follows; otherwise it is empty. If prompt tokens are to be given log
    probabilities, `scoring_flags` is 1 for each row that has them to compute, else empty.
    """

    step_id: int
    epoch: int
    released_slots: array[int]
    admitted_rows: AdmittedRows | None
    appended_slots: array[int]
    appended_block_ids: array[int]
    slots: array[int]
    num_new_tokens: array[int]
    sampling_flags: bytes
    mask_flags: bytes = b""
    scoring_flags: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMask:
    """Which tokens a step may sample, for `rows` among its sampling rows; all other rows may sample
    any token.

    `masks` has one entry per row: bits by token id, from
    the lowest bit of the first byte on, in whole 32-bit words.
    """

    step_id: int
    epoch: int
    rows: array[int]
    masks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities under the raw logits: of a sampled token, or one of a prompt, and
    of the best alternatives. `rank` is how many tokens are at least as probable, itself included; 0
    where it is not counted, as for sampled tokens.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Natural-log probabilities of prompt tokens, each given the tokens before it, under the raw
    logits: of the token at place `first_position` of the prompt and of those that follow it.

    `first_position` is at least 1, since nothing comes before the first token. `token_ranks`: see
    `TokenLogprobs.rank`; `top_token_ids` and `top_logprobs` hold `num_top_logprobs` tokens per
    place, best first.
    """

    first_position: int
    num_top_logprobs: int
    logprobs: array[float]  # float32
    token_ranks: array[int]
    top_token_ids: array[int]  # flat, num_top_logprobs for each token
    top_logprobs: array[float]  # flat, num_top_logprobs for each token, float32

    @classmethod
    def empty(cls, num_top_logprobs: int) -> PromptLogprobs:
        """Those of no token yet."""
        return cls(
            first_position=1,
            num_top_logprobs=num_top_logprobs,
            logprobs=array("f"),
            token_ranks=int32_array(),
            top_token_ids=int32_array(),
            top_logprobs=array("f"),
        )

    @property
    def end_position(self) -> int:
        """The place after the last token."""
        return self.first_position + len(self.logprobs)

    def from_position(self, position: int) -> PromptLogprobs:
        """Without the tokens before `position`."""
        num_skipped_tokens = min(max(0, position - self.first_position), len(self.logprobs))
        if num_skipped_tokens == 0:
            return self
        return PromptLogprobs(
            first_position=self.first_position + num_skipped_tokens,
            num_top_logprobs=self.num_top_logprobs,
            logprobs=self.logprobs[num_skipped_tokens:],
            token_ranks=self.token_ranks[num_skipped_tokens:],
            top_token_ids=self.top_token_ids[num_skipped_tokens * self.num_top_logprobs :],
            top_logprobs=self.top_logprobs[num_skipped_tokens * self.num_top_logprobs :],
        )

    def followed_by(self, later_logprobs: PromptLogprobs) -> PromptLogprobs:
        """Both; tokens that are here already are skipped. Raises `EngineError` for a gap."""
        if later_logprobs.first_position > self.end_position:
            raise EngineError(
                f"log probabilities of the prompt tokens {self.end_position} to"
                f" {later_logprobs.first_position - 1} are missing"
            )
        new_logprobs = later_logprobs.from_position(self.end_position)
        return PromptLogprobs(
            first_position=self.first_position,
            num_top_logprobs=self.num_top_logprobs,
            logprobs=self.logprobs + new_logprobs.logprobs,
            token_ranks=self.token_ranks + new_logprobs.token_ranks,
            top_token_ids=self.top_token_ids + new_logprobs.top_token_ids,
            top_logprobs=self.top_logprobs + new_logprobs.top_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens of the sampling rows in batch order; if any row asked for logprobs, `logprobs` has one
    entry per sampling row. `prompt_logprobs` has one entry per scored row: of the prompt tokens
    that follow those of its chunk. Only rank 0 has these two.

    `digest` is a CRC-32 of the token ids: every rank computes one, and all must agree. `seconds`
    holds the time of each part of the step on the host by name, `device_s` the time on a device
    that runs beside the host; `rank_seconds` the whole time of each rank, once the results of all
    are known.
    """

    step_id: int
    epoch: int
    rank: int = 0
    digest: int = 0
    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    device_s: float | None = None
    rank_seconds: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds for which the sequences that decode had to wait for this step."""
        return sum(self.seconds.values()) if self.device_s is None else self.device_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Current numbers of sequences and blocks; steps, preemptions and tokens since the start.

    num_prompt_tokens counts the tokens of sequences when first admitted, with what they bring of
    their output if they are sent again; num_cached_tokens those that were found in the prefix cache
    and are not computed, so never the last one; num_evictions the blocks that were taken from it to
    hold other tokens. queue_s adds up the time from arrival to first admission of num_admitted
    sequences, step_seconds the parts of `StepResult.seconds` on rank 0, rank_seconds the whole
    steps of each rank. is_ready: the ranks answer, and work, if there is any, makes progress. state
    (the value of a `RecoveryState`) and num_recoveries are those of the group of ranks; step_age_s
    is the time since the last result while there is work, also while ranks are replaced.
    recovery_waits_for names the missing resources while ranks cannot be placed, or says why the
    last start failed while another one follows. driver_id: of the driver that counts, which no
    later one has.

    num_recomputed_tokens counts what running sequences lost with ranks and compute again. Not
    counted are steps in flight, cached prefixes of waiting sequences, and what an earlier driver
    had computed: the counters of each driver begin at 0.

    Several engines are shown as one: fields whose names begin with `num_` are added up, and so are
    the times of steps and in the queue; the others are those of one engine that is ready.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evictions: int = 0
    num_recomputed_tokens: int = 0
    num_admitted: int = 0
    queue_s: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()
    is_ready: bool = True
    state: str = "serving"
    num_recoveries: int = 0
    step_age_s: float = 0.0
    recovery_waits_for: str = ""
    driver_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """Everything new for one frontend, which acknowledges `reply_number` with its next poll.

    One entry per request; `token_ids` is flat, with `num_tokens` per request; `first_indices`: the
    index in its output of the first of them. `finish_reasons`, `errors`, `logprobs` and
    `prompt_logprobs` hold only the requests that have any.
    """

    reply_number: int
    request_ids: tuple[str, ...]
    first_indices: array[int]
    num_tokens: array[int]
    num_cached_tokens: array[int]
    token_ids: array[int]
    finish_reasons: dict[str, str]
    errors: dict[str, EaglerayError]
    logprobs: dict[str, list[TokenLogprobs | None]]
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
