"""Log probabilities of prompts in answers: in vLLM's form, and in that of OpenAI's `echo`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from cluster.api.offsets import Offsets
from cluster.client.outputs import Generation
from cluster.client.tokenizer import Tokenizer
from scheduler.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
LogprobEntries = Seq[TokenLogprobs | None]


def clamped_logprob(logprob: float) -> float:
    """A log probability that JSON has; the lowest one for NaN."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token; parts of characters are replaced."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def prompt_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: list[int],
    entries: LogprobEntries,
    num_top_logprobs: int,
) -> Iterator[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token the token itself, then the `num_top_logprobs` best
    ones, by id; null for the first. Without a tokenizer there are no texts.
    """

    def describe_token(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else token_text(tokenizer, token_id)
        return {"logprob": clamped_logprob(logprob), "rank": rank, "decoded_token": text}

    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            yield None
            continue
        description_by_token_id = {
            str(token_id): describe_token(token_id, entry.logprob, entry.rank)
        }
        best_tokens = zip(
            entry.top_token_ids[:num_top_logprobs],
            entry.top_logprobs[:num_top_logprobs],
            strict=True,
        )
        for rank, (top_token_id, logprob) in enumerate(best_tokens, 1):
            description_by_token_id[str(top_token_id)] = describe_token(top_token_id, logprob, rank)
        yield description_by_token_id


def prompt_logprobs_field(
    tokenizer: Tokenizer | None,
    generation: Generation,
    num_top_logprobs: int | None,
) -> dict[str, Any]:
    """vLLM's field for a prompt; empty if that is not wanted."""
    if num_top_logprobs is None:
        return {}
    entries = generation.prompt_logprobs
    if entries is None:
        return {}
    token_ids = generation.prompt_token_ids
    return {"prompt_logprobs": prompt_logprobs(tokenizer, token_ids, entries, num_top_logprobs)}


class Echo:
    """A prompt that is repeated with its log probabilities, a part at a time. The parts depend on
    their sizes alone, so that they add up to the same text and lists however they are divided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: str,
        token_ids: list[int],
        num_top_logprobs: int,
        *,
        is_text: bool,
    ) -> None:
        """`text`: what is repeated. `is_text`: it was given as text, special tokens spelled out."""
        self._tokenizer, self._text, self._num_top_logprobs = tokenizer, text, num_top_logprobs
        self._token_ids = iter(token_ids)
        offset_counter = Offsets(tokenizer, shows_special_tokens=is_text)
        self._remaining_offsets = (
            min(offset_counter.next(token), len(text)) for token in token_ids
        )
        self._next_offset = next(self._remaining_offsets, len(text))
        self._num_sent_chars = 0  # characters

    def take(self, entries: LogprobEntries) -> tuple[str, dict[str, Any]]:
        """The text and the log probabilities of the next tokens, to which these entries belong."""
        token_ids = list(islice(self._token_ids, len(entries)))
        offsets = [self._next_offset, *islice(self._remaining_offsets, len(entries))]
        is_last = len(offsets) == len(entries)
        self._next_offset = len(self._text) if is_last else offsets.pop()
        text = self._text[self._num_sent_chars : self._next_offset]
        self._num_sent_chars = self._next_offset
        return text, {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [entry and clamped_logprob(entry.logprob) for entry in entries],
            "top_logprobs": (
                entry and top_logprobs_by_text(self._tokenizer, entry, self._num_top_logprobs)
                for entry in entries
            ),
            "text_offset": offsets,
        }


def top_logprobs_by_text(
    tokenizer: Tokenizer, entry: TokenLogprobs, num_top_logprobs: int
) -> dict[str, float]:
    """The best tokens by their text, best first. Of tokens with the same text (parts of characters)
    the best one counts.
    """
    top_logprob_by_text: dict[str, float] = {}
    best_tokens = zip(
        entry.top_token_ids[:num_top_logprobs], entry.top_logprobs[:num_top_logprobs], strict=True
    )
    for token_id, logprob in best_tokens:
        top_logprob_by_text.setdefault(token_text(tokenizer, token_id), clamped_logprob(logprob))
    return top_logprob_by_text
