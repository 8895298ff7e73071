"""The news that the driver keeps for one frontend until the frontend has received it.

Each poll acknowledges the previous reply by its number. News that is not acknowledged is sent again
together with later news, so a lost reply loses nothing; the receiver recognizes repeated tokens by
their index. Used on the event loop only.
"""

from __future__ import annotations

from cluster.news import News, pack
from scheduler.messages import Deltas


class Mailbox:
    """News of the requests of one frontend."""

    def __init__(self) -> None:
        self._unsent_news: dict[str, News] = {}  # by request id, as the next
        self._unacknowledged_news: dict[str, News] = {}  # the content of the last reply
        self._last_reply_number = 0

    @property
    def has_news(self) -> bool:
        """Whether there is news that has never been sent."""
        return bool(self._unsent_news)

    def put(self, request_id: str, news: News) -> None:
        """Add news of one request, whose tokens follow those that were put before."""
        _append(self._unsent_news, request_id, news)

    def holds(self, request_id: str) -> bool:
        """Whether there is news of a request that the frontend has not acknowledged."""
        return request_id in self._unsent_news or request_id in self._unacknowledged_news

    def drop(self, request_id: str) -> None:
        """Drop the news of a request that nobody needs any more."""
        self._unsent_news.pop(request_id, None)
        self._unacknowledged_news.pop(request_id, None)

    def collect(self, acknowledged_reply_number: int) -> Deltas:
        """All news that the frontend lacks, which has the reply `acknowledged_reply_number`."""
        if acknowledged_reply_number == self._last_reply_number:
            self._unacknowledged_news = {}
        for request_id, news in self._unsent_news.items():
            _append(self._unacknowledged_news, request_id, news)
        self._unsent_news = {}
        self._last_reply_number = max(self._last_reply_number, acknowledged_reply_number) + 1
        return pack(self._last_reply_number, self._unacknowledged_news)


def _append(news_by_request: dict[str, News], request_id: str, later_news: News) -> None:
    earlier_news = news_by_request.setdefault(request_id, later_news)
    if earlier_news is not later_news:
        earlier_news.append(later_news)
