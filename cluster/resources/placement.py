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

from cluster.resources.room import bundle_of, check_room, living_nodes, shortage, strategy_for
from configs.paths import CHECKOUT, IS_INSTALLED
from scheduler.errors import ConfigError, WorkerError
from workers.faults import VARIABLE as FAULTS

PLACEMENT_TIMEOUT_S = 30.0
CHECK_PERIOD_S = 0.25
LOG_PERIOD_S = 10.0

logger = logging.getLogger("eagleray")


# Environment variables that torch reads when it is imported: whether its large tensors lie in huge
# pages; how often a thread of its OpenMP library looks for work before it sleeps, and whether it
# sleeps at all.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
OPENMP_SPINS, OPENMP_WAITS = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_SPINS = "3000"  # about 0.1 ms; left to itself it is 10 ms, while others wait for the core


def actor_environment() -> dict[str, Any]:
    """Runtime environment of our actors: the checkout on the path, and huge pages for torch's large
    tensors on a CPU where the system leaves them to programs. torch's threads soon stop to spin
    when they have nothing to do, unless the user has said how they wait.

    An actor passes its environment on to the actors it starts, so nothing about GPUs may be set
    here: the driver does not have one, but the ranks that it starts do.
    """
    # What was installed is found without.
    folders = [] if IS_INSTALLED else [str(CHECKOUT)]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    spins = os.environ.get(OPENMP_SPINS, None if OPENMP_WAITS in os.environ else _SPINS)
    faults = os.environ.get(FAULTS)  # set by tests alone
    variables = {
        **({"PYTHONPATH": ":".join(folders)} if folders else {}),
        HUGE_PAGES: os.environ.get(HUGE_PAGES, "1"),
        **({OPENMP_SPINS: spins} if spins is not None else {}),
        **({FAULTS: faults} if faults else {}),
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


class Placement:
    """The bundles of one engine. Copies of this object in other processes see the same bundles."""

    def __init__(
        self,
        size: int,
        device: str,
        name: str,
        group: PlacementGroup | None = None,
        wait_for_nodes_s: float = 0.0,
    ) -> None:
        """`group`: a placement group of the caller's, with one bundle per rank; it is used and
        never removed. Otherwise `reserve` makes one whose name begins with `name`, which no other
        engine has. `wait_for_nodes_s`: how long to wait for nodes that the cluster does not have
        yet.
        """
        self.size = size
        self.device = device
        self.name = name
        self.wait_for_nodes_s = wait_for_nodes_s
        self._callers = group
        self._known = group
        self._generation = 0
        self.missing_resources = ""  # what is missing, while a group is pending

    def reserve(self) -> None:
        """Reserve a bundle per rank.

        Raises `ConfigError` when the cluster lacks the resources, or when they do not become free
        in time.
        """
        if self._callers is not None:
            return
        if not self.wait_for_nodes_s:
            check_room(self.size, self.device)
        limit_s = max(PLACEMENT_TIMEOUT_S, self.wait_for_nodes_s)
        if not self._place(limit_s, lambda: True):
            problem = f"after {limit_s:.0f} s, there is still no room for"
            raise ConfigError(shortage(self.size, self.device, problem))

    def restore(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """If a node was lost, place every bundle on a living node again: on those that are left, or
        on one that joins within `limit_s`. Returns whether anything had to be done; if so,
        everything that ran in the bundles has ended.

        Raises `WorkerError` saying what is missing, also when the placement is no longer wanted.
        """
        if self.is_whole():
            return False
        if self._callers is None:
            logger.warning("the placement group %s has lost a node", self.name)
            self.remove()
            is_placed = self._place(limit_s, is_wanted)
        else:
            is_placed = self._wait(limit_s, is_wanted)
        if not is_placed:
            problem = f"after {limit_s:.0f} s, there is no room on other nodes for"
            raise WorkerError(shortage(self.size, self.device, problem))
        return True

    def disown_copies(self) -> None:
        """From now on, copies in other processes leave the groups of this one alone: a driver that
        was given up may still run where nobody reaches it.
        """
        self._generation += 1

    def is_whole(self) -> bool:
        """Whether every bundle is reserved on a node that is alive."""
        table = self._table()
        if table.get("state") != "CREATED":
            return False
        alive = {node["NodeID"] for node in living_nodes()}
        return set(table["bundles_to_node_id"].values()) <= alive

    def places(self) -> list[Place]:
        """The place of each rank. Raises `WorkerError` unless every bundle has a node."""
        by_bundle = self._table().get("bundles_to_node_id", {})
        nodes = [by_bundle.get(bundle) for bundle in range(self.size)]
        if not all(nodes):
            raise WorkerError(f"the placement group {self.name} has bundles without a node")
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        order = sorted(range(self.size), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))
        sorted_nodes = [nodes[bundle] for bundle in order]
        return [
            Place(
                rank=rank,
                bundle=order[rank],
                node_id=node,
                host=hosts.get(node, ""),
                local_rank=sorted_nodes[:rank].count(node),
                ranks_on_node=sorted_nodes.count(node),
            )
            for rank, node in enumerate(sorted_nodes)
        ]

    def in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy for an actor that should run in the bundle. Raises `WorkerError`
        without a group.
        """
        self._table()
        if self._known is None:
            raise WorkerError(f"the placement group {self.name} is gone")
        return PlacementGroupSchedulingStrategy(self._known, placement_group_bundle_index=bundle)

    def node_ids(self) -> set[str]:
        """The nodes that have bundles."""
        return {node for node in self._table().get("bundles_to_node_id", {}).values() if node}

    def remove(self) -> None:
        """Remove the bundles, if they are ours; Ray ends what runs in them."""
        if self._callers is None:
            for generation in range(self._generation + 1):
                for group, _ in self._ours(generation):
                    remove_placement_group(group)
            self._known = None

    def _table(self) -> dict[str, Any]:
        """Ray's record of the present group, whichever process made it; empty if there is none."""
        if self._known is not None:
            table: dict[str, Any] = placement_group_table(self._known)
            if self._callers is not None or table.get("state") != "REMOVED":
                return table
        found = self._ours(self._generation)
        self._known, table = found[0] if found else (None, {})
        return table

    def _ours(self, generation: int) -> list[tuple[PlacementGroup, dict[str, Any]]]:
        """The groups of one generation, with Ray's record of each."""
        prefix = f"{self.name}-{generation}-"
        return [
            (PlacementGroup(PlacementGroupID(bytes.fromhex(key))), table)
            for key, table in placement_group_table().items()
            if table["name"].startswith(prefix) and table["state"] != "REMOVED"
        ]

    def _place(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Whether a group could be reserved. While it is pending, Ray's autoscaler, if there is
        one, adds nodes for it. When nodes come or go, another strategy may become possible.
        """
        until = time.monotonic() + limit_s
        while True:
            strategy = strategy_for(self.size, self.device)
            # Ray frees the name of a group that is removed only later, so each has its own.
            name = f"{self.name}-{self._generation}-{uuid.uuid4().hex[:8]}"
            self._known = placement_group(
                [bundle_of(self.device)] * self.size, strategy=strategy, name=name
            )

            def is_another(strategy: str = strategy) -> bool:
                return strategy_for(self.size, self.device) != strategy

            left_s = until - time.monotonic()
            if self._wait(left_s, lambda: is_wanted() and not is_another()):
                return True
            self.remove()
            if time.monotonic() >= until or not is_wanted():
                return False

    def _wait(self, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Whether the present group is placed in time. Logs now and then what it waits for."""
        began_s = logged_s = time.monotonic()
        pause_s = 0.005
        try:
            while not self.is_whole():
                now_s = time.monotonic()
                if now_s - began_s > limit_s or self._known is None or not is_wanted():
                    return False
                if pause_s == CHECK_PERIOD_S:
                    self.missing_resources = shortage(
                        self.size, self.device, "there is no room yet for"
                    )
                if now_s - logged_s > LOG_PERIOD_S:
                    logged_s = now_s
                    passed = f"waiting for {now_s - began_s:.0f} s, at most {limit_s:.0f} s"
                    logger.warning("%s: %s", passed, self.missing_resources)
                time.sleep(pause_s)
                pause_s = min(CHECK_PERIOD_S, 2 * pause_s)
        finally:
            self.missing_resources = ""
        return True
