"""What the driver holds for one frontend until the frontend says it has it.

A poll acknowledges the reply before it, by number; what is not acknowledged is sent again together with what is new,
so a lost reply loses nothing. The receiver knows repeated tokens by their index. One event loop thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.errors import EaglerayError
from scheduler.messages import Deltas, TokenLogprobs


@dataclass(slots=True)
class News:
    """What is new of one request: tokens from output index `first_index` on, and its end if it ended."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: EaglerayError | None = None

    def extend(self, later: News) -> None:
        """Add what came after."""
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or [None] * len(self.token_ids)) + later.logprobs
        elif self.logprobs is not None:
            self.logprobs += [None] * len(later.token_ids)
        self.token_ids += later.token_ids
        self.num_cached_tokens = later.num_cached_tokens
        self.finish_reason = later.finish_reason or self.finish_reason
        self.error = later.error or self.error


class Mailbox:
    """News of the requests of one frontend."""

    def __init__(self) -> None:
        self._sent: dict[str, News] = {}
        self._new: dict[str, News] = {}
        self._sent_number = 0

    @property
    def has_news(self) -> bool:
        return bool(self._new)

    def put(self, request_id: str, news: News) -> None:
        held = self._new.get(request_id)
        if held is None:
            self._new[request_id] = news
        else:
            held.extend(news)

    def collect(self, acknowledged: int) -> Deltas:
        """Everything the frontend does not have, given the number of the last reply it received."""
        if acknowledged == self._sent_number:
            self._sent = {}
        for request_id, news in self._new.items():
            held = self._sent.get(request_id)
            if held is None:
                self._sent[request_id] = news
            else:
                held.extend(news)
        self._new = {}
        self._sent_number = max(self._sent_number, acknowledged) + 1
        return _deltas(self._sent_number, self._sent)


def _deltas(number: int, news: dict[str, News]) -> Deltas:
    values = news.values()
    return Deltas(
        up_to=number,
        request_ids=tuple(news),
        first_indices=array("i", (n.first_index for n in values)),
        num_tokens=array("i", (len(n.token_ids) for n in values)),
        num_cached_tokens=array("i", (n.num_cached_tokens for n in values)),
        token_ids=array("i", (token for n in values for token in n.token_ids)),
        finish_reasons={k: n.finish_reason for k, n in news.items() if n.finish_reason},
        errors={k: n.error for k, n in news.items() if n.error},
        logprobs={k: n.logprobs for k, n in news.items() if n.logprobs is not None},
    )


def unpack(deltas: Deltas) -> Iterable[tuple[str, News]]:
    """The news of each request in a reply."""
    start = 0
    for i, request_id in enumerate(deltas.request_ids):
        end = start + deltas.num_tokens[i]
        yield (
            request_id,
            News(
                first_index=deltas.first_indices[i],
                token_ids=deltas.token_ids[start:end].tolist(),
                logprobs=deltas.logprobs.get(request_id),
                num_cached_tokens=deltas.num_cached_tokens[i],
                finish_reason=deltas.finish_reasons.get(request_id),
                error=deltas.errors.get(request_id),
            ),
        )
        start = end
