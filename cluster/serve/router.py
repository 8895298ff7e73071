"""A request router of Ray Serve, for leases: the caller of a lease chooses the engine.

The choice, and the count of open requests, stay with the caller (`EngineLeases`), which knows when
each request ends. Serve does not tell a router of every end: for instance not of a request that is
canceled after a replica was chosen and before it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The argument of a call that asks for a lease.

    avoided_replica_ids: of replicas that have just failed. choose: picks one of the given replica
    ids; called on the router's thread, and not sent along. holder: the actor that will hold the
    lease, None if it is no actor.
    """

    avoided_replica_ids: tuple[str, ...] = ()
    choose: Callable[[Collection[str]], str] | None = None
    holder: Any | None = None

    def __reduce__(self) -> tuple[type[LeaseRequest], tuple[Any, ...]]:
        return LeaseRequest, (self.avoided_replica_ids, None, self.holder)


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
        lease_request: LeaseRequest = pending_request.args[0]
        assert lease_request.choose is not None
        replica_by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen_replica = replica_by_id.pop(lease_request.choose(replica_by_id.keys()))
        return [[chosen_replica], [*replica_by_id.values()]]
