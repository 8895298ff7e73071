"""What the driver keeps for one frontend until the frontend confirms that it has received it.

Each poll acknowledges the previous reply by its number. What is not acknowledged is sent again
together with what is new, so a lost reply loses nothing; the receiver recognizes repeated tokens by
their index. One event loop thread.
"""

from __future__ import annotations

from cluster.client.news import News, pack
from scheduler.messages import Deltas


class Mailbox:
    """News of the requests of one frontend."""

    def __init__(self) -> None:
        self._sent: dict[str, News] = {}
        self._new: dict[str, News] = {}
        self._sent_number = 0

    @property
    def has_news(self) -> bool:
        """Whether there is anything that has never been sent."""
        return bool(self._new)

    def put(self, request_id: str, news: News) -> None:
        """Add news of one request."""
        held = self._new.get(request_id)
        if held is None:
            self._new[request_id] = news
        else:
            held.extend(news)

    def holds(self, request_id: str) -> bool:
        """Whether there is news of a request that the frontend has not confirmed."""
        return request_id in self._new or request_id in self._sent

    def drop(self, request_id: str) -> None:
        """Forget the news of this request, which nobody needs any more."""
        self._new.pop(request_id, None)
        self._sent.pop(request_id, None)

    def collect(self, acknowledged: int) -> Deltas:
        """Everything that the frontend does not have yet, given the number of the last reply it
        received.
        """
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
        return pack(self._sent_number, self._sent)
