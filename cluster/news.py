"""News of a request on its way from the engine to its frontend, and the flat message for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.errors import EaglerayError
from scheduler.messages import Deltas, PromptLogprobs, TokenLogprobs


@dataclass(slots=True)
class News:
    """What is new in one request: tokens from output index `first_index` on, log probabilities of
    its prompt, and how it ended, if it did. num_cached_tokens: of its prompt, in the prefix cache.
    """

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: EaglerayError | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def append(self, later_news: News) -> None:
        """Add later news, whose tokens follow these."""
        if later_news.token_ids:
            next_index = self.first_index + len(self.token_ids)
            assert later_news.first_index == next_index, (self, later_news)
        if later_news.logprobs is not None:
            self.logprobs = (self.logprobs or [None] * len(self.token_ids)) + later_news.logprobs
        elif self.logprobs is not None:
            self.logprobs += [None] * len(later_news.token_ids)
        self.token_ids += later_news.token_ids
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later_news.prompt_logprobs
        elif later_news.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs.followed_by(later_news.prompt_logprobs)
        self.num_cached_tokens = later_news.num_cached_tokens
        self.finish_reason = later_news.finish_reason or self.finish_reason
        self.error = later_news.error or self.error


def pack(reply_number: int, news: dict[str, News]) -> Deltas:
    """Reply `reply_number` of a driver to one frontend."""
    values = list(news.values())
    # Most news is a token and no more, so what is rare is looked for once.
    rare_news = [
        (request_id, n)
        for request_id, n in news.items()
        if n.finish_reason or n.error or n.logprobs is not None or n.prompt_logprobs is not None
    ]
    return Deltas(
        reply_number=reply_number,
        request_ids=tuple(news),
        first_indices=array("i", [n.first_index for n in values]),
        num_tokens=array("i", [len(n.token_ids) for n in values]),
        num_cached_tokens=array("i", [n.num_cached_tokens for n in values]),
        token_ids=array("i", [token for n in values for token in n.token_ids]),
        finish_reasons={k: n.finish_reason for k, n in rare_news if n.finish_reason},
        errors={k: n.error for k, n in rare_news if n.error},
        logprobs={k: n.logprobs for k, n in rare_news if n.logprobs is not None},
        prompt_logprobs={
            k: n.prompt_logprobs for k, n in rare_news if n.prompt_logprobs is not None
        },
    )


def unpack(deltas: Deltas) -> Iterable[tuple[str, News]]:
    """The news of each request in a reply."""
    token_ids, start = deltas.token_ids.tolist(), 0
    finish_reasons, errors = deltas.finish_reasons, deltas.errors
    logprobs, prompt_logprobs = deltas.logprobs, deltas.prompt_logprobs
    for request_id, first_index, num_tokens, num_cached_tokens in zip(
        deltas.request_ids,
        deltas.first_indices,
        deltas.num_tokens,
        deltas.num_cached_tokens,
        strict=True,
    ):
        news = News(first_index, token_ids[start : start + num_tokens], num_cached_tokens)
        start += num_tokens
        if finish_reasons:
            news.finish_reason = finish_reasons.get(request_id)
        if errors:
            news.error = errors.get(request_id)
        if logprobs:
            news.logprobs = logprobs.get(request_id)
        if prompt_logprobs:
            news.prompt_logprobs = prompt_logprobs.get(request_id)
        yield request_id, news
