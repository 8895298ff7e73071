"""The sizes a scheduler works within, and the requests that fit them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from scheduler.errors import PromptTooLongError, RequestError
from scheduler.messages import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes in tokens, blocks and sequences; max_decode_slowdown as in `pace.py`."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    enable_prefix_caching: bool = True
    max_decode_slowdown: float = 0.0

    @property
    def max_total_tokens(self) -> int:
        """Length of the longest sequence that fits, prompt and output together."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """`check_lengths`, and raise `RequestError` for a token that is not in the vocabulary."""
    check_lengths(request, limits)
    check_vocabulary(request.token_ids, limits.vocab_size)


def check_lengths(request: Request, limits: SchedulerLimits) -> None:
    """Raise `RequestError` unless the prompt is there, and `PromptTooLongError` unless it leaves
    room for at least one new token.
    """
    token_ids, max_total_tokens = request.token_ids, limits.max_total_tokens
    if not 1 <= request.num_prompt_tokens <= len(token_ids):
        problem = "it is empty"
        if token_ids:
            problem = f"{request.num_prompt_tokens} of {len(token_ids)} tokens are the prompt"
        raise RequestError(f"the prompt needs at least one token; {problem}", "prompt")
    if request.num_prompt_tokens >= max_total_tokens:
        bound_name = remedy = "max_model_len"
        if max_total_tokens < limits.max_model_len:
            bound_name = f"the KV cache of {limits.num_blocks} blocks of {limits.block_size}"
            remedy = "num_kv_blocks or the memory of the cache"
        raise PromptTooLongError(
            f"the prompt has {request.num_prompt_tokens} tokens; at most {max_total_tokens - 1} are"
            f" possible, one less than {bound_name} allows for prompt and output. Shorten the"
            f" prompt or raise {remedy}",
            "prompt",
        )


def check_vocabulary(token_ids: Collection[int], vocab_size: int) -> None:
    """Raise `RequestError` for a token that is not in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        unknown_id = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"token id {unknown_id} is outside the vocabulary of {vocab_size} ids", "prompt"
        )
