"""The requests that a frontend waits for, and which of them the driver has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.client.outputs import Generation, OutputFollower
from scheduler.messages import Request


@dataclass(slots=True)
class OutstandingRequest:
    """One request that has not ended. is_accepted: the driver has it."""

    generation: Generation
    output: OutputFollower
    is_accepted: bool = False


class OutstandingRequests(dict[str, OutstandingRequest]):
    """By request id, in the order in which they were sent. Whoever reads or changes it holds
    `change_condition`, which is reentrant.
    """

    def __init__(self, change_condition: threading.Condition) -> None:
        super().__init__()
        self._change_condition = change_condition

    def add(self, generations: Iterable[Generation]) -> None:
        """Wait for the outputs of these generations that have not ended."""
        for generation in generations:
            for output in generation.unfinished_outputs:
                self[output.request.request_id] = OutstandingRequest(generation, output)

    def accept(self, requests: Iterable[Request]) -> None:
        """The driver has these requests; those that have ended meanwhile are ignored."""
        for request in requests:
            if request.request_id in self:
                self[request.request_id].is_accepted = True
        self._change_condition.notify_all()

    @property
    def has_accepted_requests(self) -> bool:
        """Whether the driver has any of them."""
        return any(outstanding.is_accepted for outstanding in self.values())

    def accepted_requests(self) -> list[Request]:
        """What the driver has, with the tokens received so far."""
        return [o.output.continued_request() for o in self.values() if o.is_accepted]

    def forget(self, generations: Iterable[Generation]) -> None:
        """Wait for none of their outputs any more."""
        with self._change_condition:
            for generation in generations:
                for request_id in generation.request_ids:
                    self.pop(request_id, None)

    def take(self, *, only_accepted: bool) -> list[Generation]:
        """Remove and return the generations: all, or those of which the driver has a request."""
        with self._change_condition:
            taken_generations = [
                o.generation for o in self.values() if o.is_accepted or not only_accepted
            ]
            generations = list(
                {id(generation): generation for generation in taken_generations}.values()
            )
            self.forget(generations)
        return generations
