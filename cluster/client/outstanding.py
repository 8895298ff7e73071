"""The requests that a frontend waits for, and which of them the driver has.

A driver knows each frontend under a number, with which it answers what the frontend submits. It
forgets a frontend that is silent for long, with its requests; if that submits again, it gets a
larger number, and what was accepted under a smaller one is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.client.outputs import Generation, OutputFollower
from scheduler.messages import Request


@dataclass(slots=True)
class OutstandingRequest:
    """One request that has not ended. is_accepted: a driver has accepted it. is_lost: the present
    driver does not have it, although it, or the one before, had accepted it.
    """

    generation: Generation
    output: OutputFollower
    is_accepted: bool = False
    is_lost: bool = False


class OutstandingRequests(dict[str, OutstandingRequest]):
    """By request id, in the order in which they were sent. Whoever reads or changes it holds
    `change_condition`, which is reentrant.
    """

    def __init__(self, change_condition: threading.Condition) -> None:
        super().__init__()
        self._change_condition = change_condition
        self._registration_number = -1  # the largest from the present driver

    def add(self, generations: Iterable[Generation]) -> None:
        """Wait for the outputs of these generations that have not ended."""
        for generation in generations:
            for output in generation.unfinished_outputs:
                self[output.request.request_id] = OutstandingRequest(generation, output)

    def accept(self, requests: Iterable[Request], registration_number: int) -> None:
        """The driver has accepted these requests, of the frontend that it knew under this number
        then; those that have ended meanwhile are ignored.
        """
        if registration_number > self._registration_number:
            self.note_lost()
            self._registration_number = registration_number
        for request in requests:
            if request.request_id in self:
                self[request.request_id].is_accepted = True
                self[request.request_id].is_lost = registration_number < self._registration_number
        self._change_condition.notify_all()

    def note_lost(self) -> None:
        """The driver has forgotten this frontend."""
        for outstanding in self.values():
            outstanding.is_lost = outstanding.is_accepted

    def note_new_driver(self) -> None:
        """There is another driver, which has none of them."""
        self.note_lost()
        self._registration_number = -1

    @property
    def has_accepted_requests(self) -> bool:
        """Whether any of them has been accepted."""
        return any(outstanding.is_accepted for outstanding in self.values())

    def lost_requests(self) -> list[Request]:
        """Those to send again, with the tokens received so far."""
        return [o.output.continued_request() for o in self.values() if o.is_lost]

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
