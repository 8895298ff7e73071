"""Ray Serve's interface for routers over `PrefixTable`: leases go to the engine that has seen the
beginning of the prompt, unless it has more than its share of what is open.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.serve.prefixes import PrefixTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a lease is for. avoid: replicas that have just failed; they come last."""

    hashes: array[int]
    session: int | None = None
    avoid: tuple[str, ...] = ()


class PrefixRouter(RequestRouter):
    """Run by every handle of the engines, each with a table of its own."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray Serve once."""
        self._table = PrefixTable(**kwargs)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others for when it does not take the request."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None or pending_request.metadata.call_method != "lease":
            return [candidate_replicas]
        # Not asked for its class: Ray may have pickled ours by value, with another `Wanted`.
        wanted: Wanted = pending_request.args[0]
        names = by_name.keys() - set(wanted.avoid) or by_name.keys()
        request_id = pending_request.metadata.internal_request_id
        chosen = self._table.choose(request_id, names, wanted.hashes, wanted.session)
        pending_request.future.add_done_callback(
            lambda future: self._table.ended(request_id) if future.cancelled() else None
        )
        others = [replica for name, replica in by_name.items() if name != chosen]
        return [[by_name[chosen]], others]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a lease ends, however it ends."""
        self._table.ended(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas come and go."""
        super().update_replicas(replicas)
        self._table.keep([replica.replica_id.unique_id for replica in replicas])
