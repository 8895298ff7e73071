"""A request router of Ray Serve, for leases: the caller that wants a lease says which engine to ask
first.

The choice, and the count of open requests, stay with the owner of the requests (`EnginePool`),
which knows when each of them ends. Serve does not tell a router of every end: for instance not of a
request that is canceled after a replica was chosen and before it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a lease is for. avoid: replicas that have just failed; choose: from the names of all
    replicas to one of them, called by the router's thread. It stays in the process that asks.
    holder: the actor that will hold the lease, None if it is no actor.
    """

    avoid: tuple[str, ...] = ()
    choose: Callable[[Collection[str]], str] | None = None
    holder: Any | None = None

    def __reduce__(self) -> tuple[type[LeaseRequest], tuple[Any, ...]]:
        return LeaseRequest, (self.avoid, None, self.holder)


class LeaseRouter(RequestRouter):
    """Run by every handle of the engines."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others in case it refuses the request."""
        if pending_request is None or pending_request.metadata.call_method != "lease":
            return [candidate_replicas]
        # Its class is not checked: Ray may have pickled ours by value, with another `LeaseRequest`.
        wanted: LeaseRequest = pending_request.args[0]
        assert wanted.choose is not None
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        chosen = by_name.pop(wanted.choose(by_name.keys()))
        return [[chosen], [*by_name.values()]]
