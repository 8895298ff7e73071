"""Where the ranks of an engine are: a placement group with one bundle per rank, which is replaced
when it loses a node.

Ranks are numbered so that neighbors share a node, whatever order Ray gave the bundles.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.resources.room import (
    bundle_of,
    check_room,
    living_nodes,
    placement_strategy,
    shortage_message,
)
from configs.paths import IS_INSTALLED, SOURCE_ROOT
from scheduler.errors import ConfigError, WorkerError
from workers.faults import FAULTS_VARIABLE

MIN_PLACEMENT_TIMEOUT_S = 30.0
CHECK_PERIOD_S = 0.25
LOG_PERIOD_S = 10.0
NO_ROOM_YET = "there is no room yet for"

logger = logging.getLogger("eagleray")


# Environment variables that torch reads when it is imported: whether its large tensors lie in huge
# pages; how often a thread of its OpenMP library looks for work before it sleeps, and whether it
# sleeps at all.
HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
SPIN_COUNT_VARIABLE, WAIT_POLICY_VARIABLE = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
# About 0.1 ms; left to itself it is 10 ms, while others wait for the core.
_DEFAULT_SPIN_COUNT = "3000"


def actor_environment() -> dict[str, Any]:
    """Runtime environment of our actors: the checkout on the path, and huge pages for torch's large
    tensors on a CPU where the system leaves them to programs. torch's threads soon stop to spin
    when they have nothing to do, unless the user has said how they wait.

    An actor passes its environment on to the actors it starts, so nothing about GPUs may be set
    here: the driver does not have one, but the ranks that it starts do.
    """
    # What was installed is found without.
    folders = [] if IS_INSTALLED else [str(SOURCE_ROOT)]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    spin_count = os.environ.get(
        SPIN_COUNT_VARIABLE, None if WAIT_POLICY_VARIABLE in os.environ else _DEFAULT_SPIN_COUNT
    )
    faults = os.environ.get(FAULTS_VARIABLE)  # set by tests alone
    variables = {
        **({"PYTHONPATH": ":".join(folders)} if folders else {}),
        HUGE_PAGES_VARIABLE: os.environ.get(HUGE_PAGES_VARIABLE, "1"),
        **({SPIN_COUNT_VARIABLE: spin_count} if spin_count is not None else {}),
        **({FAULTS_VARIABLE: faults} if faults else {}),
    }
    return {"env_vars": variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank is.

    bundle: index in the placement group. node_id: Ray's. host: the node's address. local_rank: how
    many of the ranks_on_node have lower numbers.
    """

    rank: int
    bundle: int
    node_id: str
    host: str
    local_rank: int
    ranks_on_node: int


def shortage_of_groups(name_prefix: str) -> str:
    """What the cluster lacks for engines whose placement groups wait for room; "" if none waits.
    Names of these groups, which have one bundle per rank, begin with `name_prefix`.
    """
    waiting_groups = [
        table
        for table in placement_group_table().values()
        if table["name"].startswith(name_prefix) and table["state"] in ("PENDING", "RESCHEDULING")
    ]
    if not waiting_groups:
        return ""
    bundles = list(waiting_groups[0]["bundles"].values())
    device = "cuda" if "GPU" in bundles[0] else "cpu"
    return shortage_message(
        len(bundles), device, NO_ROOM_YET, len(waiting_groups), waiting_groups[0]["strategy"]
    )


class Placement:
    """The bundles of one engine. Copies of this object in other processes see the same bundles."""

    def __init__(
        self,
        num_bundles: int,
        device: str,
        name_prefix: str,
        group: PlacementGroup | None = None,
        wait_for_nodes_s: float = 0.0,
    ) -> None:
        """`group`: a placement group of the caller's, with one bundle per rank; it is used and
        never removed. Otherwise `reserve` makes one whose name begins with `name_prefix`, which no
        other engine has. `wait_for_nodes_s`: how long to wait for nodes that do not exist yet.
        """
        self.num_bundles = num_bundles
        self.device = device
        self.name_prefix = name_prefix
        self.wait_for_nodes_s = wait_for_nodes_s
        self._caller_group = group
        self._group = group
        self._fencing_token = 0  # in the names of its groups, see `fence_stale_copies`
        self.missing_resources = ""  # what is missing, while a group is pending

    def reserve(self) -> None:
        """Reserve a bundle per rank.

        Raises `ConfigError` when the cluster lacks the resources, or does not free them in time.
        """
        if self._caller_group is not None:
            return
        if not self.wait_for_nodes_s:
            check_room(self.num_bundles, self.device)
        limit_s = max(MIN_PLACEMENT_TIMEOUT_S, self.wait_for_nodes_s)
        if not self._try_reserve(limit_s, lambda: True):
            problem = f"after {limit_s:.0f} s, there is still no room for"
            raise ConfigError(shortage_message(self.num_bundles, self.device, problem))

    def restore(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """If a node was lost, place every bundle on a living node again: on those that are left, or
        on one that joins within `limit_s`. Returns whether anything had to be done; if so,
        everything that ran in the bundles has ended.

        Raises `WorkerError` saying what is missing, also when the placement is no longer wanted.
        """
        if self.is_whole():
            return False
        if self._caller_group is None:
            logger.warning("the placement group %s has lost a node", self.name_prefix)
            self.remove()
            is_placed = self._try_reserve(limit_s, is_wanted)
        else:
            is_placed = self._wait_until_placed(limit_s, is_wanted)
        if not is_placed:
            problem = f"after {limit_s:.0f} s, there is no room on other nodes for"
            raise WorkerError(shortage_message(self.num_bundles, self.device, problem))
        return True

    def fence_stale_copies(self) -> None:
        """From now on, copies in other processes leave the groups of this one alone: a driver that
        was given up may still run where nobody reaches it.
        """
        self._fencing_token += 1

    def is_whole(self) -> bool:
        """Whether every bundle is reserved on a node that is alive."""
        table = self._table()
        if table.get("state") != "CREATED":
            return False
        living_node_ids = {node["NodeID"] for node in living_nodes()}
        return set(table["bundles_to_node_id"].values()) <= living_node_ids

    def places(self) -> list[Place]:
        """The place of each rank. Raises `WorkerError` unless every bundle has a node."""
        node_of_bundle = self._table().get("bundles_to_node_id", {})
        node_ids = [node_of_bundle.get(bundle) for bundle in range(self.num_bundles)]
        if not all(node_ids):
            raise WorkerError(f"the placement group {self.name_prefix} has bundles without a node")
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        bundle_of_rank = sorted(
            range(self.num_bundles), key=lambda bundle: (node_ids.index(node_ids[bundle]), bundle)
        )
        sorted_node_ids = [node_ids[bundle] for bundle in bundle_of_rank]
        return [
            Place(
                rank=rank,
                bundle=bundle_of_rank[rank],
                node_id=node_id,
                host=hosts.get(node_id, ""),
                local_rank=sorted_node_ids[:rank].count(node_id),
                ranks_on_node=sorted_node_ids.count(node_id),
            )
            for rank, node_id in enumerate(sorted_node_ids)
        ]

    def bundle_strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """How to schedule an actor into the bundle. Raises `WorkerError` without a group."""
        self._table()
        if self._group is None:
            raise WorkerError(f"the placement group {self.name_prefix} is gone")
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def node_ids(self) -> set[str]:
        """The nodes that have bundles."""
        return {each for each in self._table().get("bundles_to_node_id", {}).values() if each}

    def remove(self) -> None:
        """Remove the bundles, if they are ours; Ray ends what runs in them."""
        if self._caller_group is None:
            for fencing_token in range(self._fencing_token + 1):
                for group, _ in self._own_groups(fencing_token):
                    remove_placement_group(group)
            self._group = None

    def _table(self) -> dict[str, Any]:
        """Ray's record of the present group, whichever process made it; empty if there is none."""
        if self._group is not None:
            table: dict[str, Any] = placement_group_table(self._group)
            if self._caller_group is not None or table.get("state") != "REMOVED":
                return table
        own_groups = self._own_groups(self._fencing_token)
        self._group, table = own_groups[0] if own_groups else (None, {})
        return table

    def _own_groups(self, fencing_token: int) -> list[tuple[PlacementGroup, dict[str, Any]]]:
        """The groups with one fencing token, with Ray's record of each."""
        prefix = f"{self.name_prefix}-{fencing_token}-"
        return [
            (PlacementGroup(PlacementGroupID(bytes.fromhex(key))), table)
            for key, table in placement_group_table().items()
            if table["name"].startswith(prefix) and table["state"] != "REMOVED"
        ]

    def _try_reserve(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Whether a group could be reserved. While it is pending, Ray's autoscaler, if there is
        one, adds nodes for it. When nodes come or go, another strategy may become possible.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            strategy = placement_strategy(self.num_bundles, self.device)
            # Ray frees the name of a group that is removed only later, so each has its own.
            name = f"{self.name_prefix}-{self._fencing_token}-{uuid.uuid4().hex[:8]}"
            self._group = placement_group(
                [bundle_of(self.device)] * self.num_bundles, strategy=strategy, name=name
            )

            def is_still_wanted(strategy: str = strategy) -> bool:
                return is_wanted() and strategy == placement_strategy(self.num_bundles, self.device)

            if self._wait_until_placed(deadline_s - time.monotonic(), is_still_wanted):
                return True
            self.remove()
            if time.monotonic() >= deadline_s or not is_wanted():
                return False

    def _wait_until_placed(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Whether the present group is placed in time. Logs now and then what it waits for."""
        began_s = logged_s = time.monotonic()
        pause_s = 0.005
        try:
            while not self.is_whole():
                now_s = time.monotonic()
                if now_s - began_s > limit_s or self._group is None or not is_wanted():
                    return False
                if pause_s == CHECK_PERIOD_S:
                    self.missing_resources = shortage_message(
                        self.num_bundles, self.device, NO_ROOM_YET
                    )
                if now_s - logged_s > LOG_PERIOD_S:
                    logged_s = now_s
                    waited_text = f"waiting for {now_s - began_s:.0f} s, at most {limit_s:.0f} s"
                    logger.warning("%s: %s", waited_text, self.missing_resources)
                time.sleep(pause_s)
                pause_s = min(CHECK_PERIOD_S, 2 * pause_s)
        finally:
            self.missing_resources = ""
        return True
