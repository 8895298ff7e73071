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


class OutstandingRequests(dict[str, Outstanding]):
    """By request id, in the order in which they were sent. Whoever reads or changes it holds
    `changed`, which is reentrant.
    """

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self._changed = changed

    def add(self, generations: Iterable[Generation]) -> None:
        """Wait for the outputs of these generations that have not ended."""
        for generation in generations:
            for output in generation.unfinished:
                self[output.request.request_id] = Outstanding(generation, output)

    def accept(self, requests: Iterable[Request]) -> None:
        """The driver has these requests; those that have ended meanwhile are ignored."""
        for request in requests:
            if request.request_id in self:
                self[request.request_id].is_accepted = True
        self._changed.notify_all()

    @property
    def has_accepted(self) -> bool:
        """Whether the driver has any of them."""
        return any(outstanding.is_accepted for outstanding in self.values())

    def accepted(self) -> list[Request]:
        """What the driver has, with the tokens received so far."""
        return [o.output.continued() for o in self.values() if o.is_accepted]

    def forget(self, generations: Iterable[Generation]) -> None:
        """Wait for none of their outputs any more."""
        with self._changed:
            for generation in generations:
                for request_id in generation.request_ids:
                    self.pop(request_id, None)

    def take(self, *, only_accepted: bool) -> list[Generation]:
        """Remove and return the generations: all, or those of which the driver has a request."""
        with self._changed:
            generations = {
                id(outstanding.generation): outstanding.generation
                for outstanding in self.values()
                if outstanding.is_accepted or not only_accepted
            }
            self.forget(generations.values())
        return list(generations.values())
