"""Log probabilities of a whole prompt, as a caller reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from scheduler.messages import PromptLogprobs, TokenLogprobs


class PromptEntries(Sequence[TokenLogprobs | None]):
    """One entry per token of the prompt; the first is None, since nothing comes before it. Entries
    are made when they are read: a long prompt has hundreds of thousands of numbers.
    """

    def __init__(self, logprobs: PromptLogprobs) -> None:
        """`logprobs`: those of all tokens but the first, as far as they have arrived."""
        self._logprobs = logprobs

    def __len__(self) -> int:
        return self._logprobs.end_position

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._entry(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the prompt has {len(self)} tokens, there is none at {index}")
        return self._entry(index % len(self))

    def _entry(self, index: int) -> TokenLogprobs | None:
        logprobs = self._logprobs
        if index == 0:
            return None
        row = index - logprobs.first_position
        start = row * logprobs.num_top_logprobs
        end = start + logprobs.num_top_logprobs
        return TokenLogprobs(
            logprob=logprobs.logprobs[row],
            top_token_ids=tuple(logprobs.top_token_ids[start:end]),
            top_logprobs=tuple(logprobs.top_logprobs[start:end]),
            rank=logprobs.token_ranks[row],
        )
