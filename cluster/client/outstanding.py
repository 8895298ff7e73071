"""The requests that a frontend waits for, and which of them the driver has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.client.outputs import Generation, OutputFollower
from scheduler.messages import Request


@dataclass(slots=True)
class Outstanding:
    """One request that has not ended. is_accepted: the driver has it."""

    generation: Generation
    output: OutputFollower
    is_accepted: bool = False


class OutstandingRequests:
    """By request id, in the order in which they were sent. Every call takes `changed`, which is
    reentrant and shared with the frontend.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._by_id: dict[str, Outstanding] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Outstanding | None:
        """None for a request that has ended."""
        return self._by_id.get(request_id)

    def add(self, generations: Iterable[Generation]) -> None:
        """Wait for the outputs of these generations that have not ended."""
        with self._changed:
            for generation in generations:
                for output in generation.unfinished:
                    self._by_id[output.request.request_id] = Outstanding(generation, output)

    def accept(self, request_ids: Iterable[str]) -> None:
        """The driver has these requests; those that have ended meanwhile are ignored."""
        with self._changed:
            for request_id in request_ids:
                if request_id in self._by_id:
                    self._by_id[request_id].is_accepted = True
            self._changed.notify_all()

    @property
    def has_accepted(self) -> bool:
        """Whether the driver has any of them."""
        with self._changed:
            return any(outstanding.is_accepted for outstanding in self._by_id.values())

    def accepted(self) -> list[Request]:
        """What the driver has, with the tokens received so far."""
        with self._changed:
            return [o.output.continued() for o in self._by_id.values() if o.is_accepted]

    def forget(self, generations: Iterable[Generation]) -> None:
        """Wait for none of their outputs any more."""
        with self._changed:
            for generation in generations:
                for request_id in generation.request_ids:
                    self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Wait for this request no more."""
        with self._changed:
            self._by_id.pop(request_id, None)

    def take(self, *, only_accepted: bool) -> list[Generation]:
        """Remove and return the generations: all, or those of which the driver has a request."""
        with self._changed:
            generations = {
                id(outstanding.generation): outstanding.generation
                for outstanding in self._by_id.values()
                if outstanding.is_accepted or not only_accepted
            }
            self.forget(generations.values())
        return list(generations.values())
