"""The requests that a frontend waits for, and which of them the driver has.

A driver knows each frontend under a number, with which it answers what the frontend submits. It
forgets a frontend that is silent for long, with its requests; should that submit again, it gets a
larger number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.client.outputs import Generation, OutputFollower
from scheduler.messages import Request

_LOST = -1  # less than any number of a driver


@dataclass(slots=True)
class OutstandingRequest:
    """One request that has not ended. record_number: under which the driver knew this frontend when
    it accepted the request; None until then.
    """

    generation: Generation
    output: OutputFollower
    record_number: int | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether a driver has accepted it."""
        return self.record_number is not None


class OutstandingRequests(dict[str, OutstandingRequest]):
    """By request id, in the order in which they were sent. Whoever reads or changes it holds
    `change_condition`, which is reentrant.
    """

    def __init__(self, change_condition: threading.Condition) -> None:
        super().__init__()
        self._change_condition = change_condition
        self._last_record_number = 0  # at the present driver

    def add(self, generations: Iterable[Generation]) -> None:
        """Wait for the outputs of these generations that have not ended."""
        for generation in generations:
            for output in generation.unfinished_outputs:
                self[output.request.request_id] = OutstandingRequest(generation, output)

    def accept(self, requests: Iterable[Request], record_number: int) -> None:
        """The driver has these requests, of the frontend that it knows under this number; those
        that have ended meanwhile are ignored.
        """
        self._last_record_number = max(self._last_record_number, record_number)
        for request in requests:
            if request.request_id in self:
                self[request.request_id].record_number = record_number
        self._change_condition.notify_all()

    def note_lost(self) -> None:
        """The driver has none of those that were accepted: it is new, or has forgotten them."""
        self._last_record_number = 0
        for outstanding in self.values():
            if outstanding.is_accepted:
                outstanding.record_number = _LOST

    @property
    def has_accepted_requests(self) -> bool:
        """Whether any of them has been accepted."""
        return any(outstanding.is_accepted for outstanding in self.values())

    def lost_requests(self) -> list[Request]:
        """Those that were accepted, but which the driver does not have, with the tokens received so
        far. A driver that knows the frontend under another number has forgotten what it accepted
        under an earlier one.
        """
        return [
            outstanding.output.continued_request()
            for outstanding in self.values()
            if outstanding.record_number is not None
            and outstanding.record_number < self._last_record_number
        ]

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
