"""Which rank is where, which group is ours, and what is waited for; Ray's records are invented."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.resources import placement as placement_module
from cluster.resources import room
from cluster.resources.placement import Placement, shortage_of_groups
from cluster.resources.room import check_room
from scheduler.errors import ConfigError, WorkerError


class MadeUpRay:
    """Nodes, and placement groups by id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpus = {"a": 2.0, "b": 2.0}
        self.groups: dict[str, dict[str, Any]] = {}
        self.strategies: list[str] = []
        ray = SimpleNamespace(nodes=self.nodes)
        monkeypatch.setattr(placement_module, "ray", ray)
        monkeypatch.setattr(room, "ray", ray)
        monkeypatch.setattr(room, "available_resources_per_node", dict)
        monkeypatch.setattr(placement_module, "placement_group", self.make)
        monkeypatch.setattr(placement_module, "placement_group_table", self.table)
        monkeypatch.setattr(placement_module, "remove_placement_group", self.remove)
        monkeypatch.setattr(placement_module, "PlacementGroup", lambda id_: id_)
        monkeypatch.setattr(placement_module, "PlacementGroupID", bytes.hex)
        monkeypatch.setattr(placement_module, "CHECK_PERIOD_S", 0.01)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": True,
                "NodeManagerAddress": f"host-{name}",
                "Resources": {"CPU": cpus},
            }
            for name, cpus in self.cpus.items()
        ]

    def make(self, bundles: list[Any], strategy: str, name: str) -> str:
        key = f"{len(self.groups):02x}"
        self.strategies.append(strategy)
        self.groups[key] = {
            "name": name,
            "state": "PENDING",
            "strategy": strategy,
            "bundles": dict(enumerate(bundles)),
            "bundles_to_node_id": {},
        }
        free = [node for node, cpus in self.cpus.items() for _ in range(int(cpus))]
        if len(free) >= len(bundles):
            self.place(key, *free[: len(bundles)])
        return key

    def place(self, key: str, *nodes: str) -> None:
        self.groups[key] |= {"state": "CREATED", "bundles_to_node_id": dict(enumerate(nodes))}

    def table(self, key: str | None = None) -> dict[str, Any]:
        return self.groups if key is None else self.groups[key]

    def remove(self, key: str) -> None:
        self.groups[key]["state"] = "REMOVED"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    return MadeUpRay(monkeypatch)


def test_neighbors_share_a_node_whatever_order_ray_gave_the_bundles(ray: MadeUpRay) -> None:
    placement = Placement(4, "cpu", "engine")
    placement.reserve()
    ray.place("00", "b", "a", "b", "a")
    places = placement.places()
    assert [place.node_id for place in places] == ["b", "b", "a", "a"]
    assert [place.bundle for place in places] == [0, 2, 1, 3]
    assert [place.local_rank for place in places] == [0, 1, 0, 1]
    assert [place.host for place in places] == ["host-b", "host-b", "host-a", "host-a"]
    assert {place.ranks_on_node for place in places} == {2}


def test_a_lost_node_is_replaced_on_what_is_left(ray: MadeUpRay) -> None:
    placement = Placement(2, "cpu", "engine")
    placement.reserve()
    assert ray.strategies == ["STRICT_PACK"] and placement.node_ids() == {"a"}
    assert not placement.restore(1.0, lambda: True) and len(ray.groups) == 1
    del ray.cpus["a"]
    ray.cpus |= {"b": 1.0, "c": 1.0}
    assert not placement.is_whole()
    assert placement.restore(1.0, lambda: True)
    assert ray.strategies == ["STRICT_PACK", "PACK"] and placement.node_ids() == {"b", "c"}
    assert ray.groups["00"]["state"] == "REMOVED"


def test_what_is_missing_is_said_while_it_is_waited_for(ray: MadeUpRay) -> None:
    placement = Placement(2, "cpu", "engine")
    placement.reserve()
    del ray.cpus["a"]
    ray.cpus["b"] = 1.0
    told: list[str] = []

    def is_wanted() -> bool:
        if placement.missing_resources:
            told.append(placement.missing_resources)
            ray.cpus["c"] = 2.0  # a node joins
        return True

    placement.restore(5.0, is_wanted)
    assert "needed 2 CPU; nodes have [host-b: 1 CPU (0 free)]" in told[0]
    # The group that was pending, for several nodes, gave way to one on the node that joined.
    assert (
        ray.strategies == ["STRICT_PACK", "PACK", "STRICT_PACK"] and not placement.missing_resources
    )


def test_a_wait_for_nodes_ends(ray: MadeUpRay) -> None:
    ray.cpus = {"a": 1.0}
    with pytest.raises(ConfigError, match="does not have the resources for tensor_parallel_size 2"):
        Placement(2, "cpu", "engine").reserve()
    placement = Placement(2, "cpu", "engine")
    with pytest.raises(WorkerError, match=r"no room on other nodes for .* needed 2 CPU"):
        placement.restore(0.1, lambda: True)
    assert all(group["state"] == "REMOVED" for group in ray.groups.values())


def test_what_engines_of_an_application_wait_for_is_said(ray: MadeUpRay) -> None:
    for name, num_bundles in [("chat#0", 2), ("chat#1", 9), ("chat#2", 9), ("chatter#0", 9)]:
        ray.make([{"CPU": 1.0}] * num_bundles, "STRICT_PACK", name)
    assert shortage_of_groups("chat#").startswith(
        "there is no room yet for 2 replicas with tensor_parallel_size 9: needed 18 CPU,"
        " each replica on one node; nodes have [host-a: 2 CPU (0 free); host-b: 2 CPU (0 free)]."
        " Lower --replicas or tensor_parallel_size, "
    )
    ray.place("02", *"ab")
    assert "size 9: needed 9 CPU, on one node; nodes have" in shortage_of_groups("chat#")
    assert "]. Lower tensor_parallel_size, add nodes" in shortage_of_groups("chat#")
    ray.place("01", *"ab")
    assert shortage_of_groups("chat#") == ""


def test_engines_that_fit_one_node_each_are_counted_by_node(ray: MadeUpRay) -> None:
    ray.cpus = {"a": 8.0, "b": 8.0}
    check_room(5, "cpu", num_engines=2)
    with pytest.raises(
        ConfigError, match=r"3 replicas with .* 5: needed 15 CPU, each replica on one node; nodes"
    ):
        check_room(5, "cpu", num_engines=3)
    check_room(9, "cpu")  # more than a node holds: over both
    with pytest.raises(ConfigError, match=r"2 replicas with .* 9: needed 18 CPU; nodes"):
        check_room(9, "cpu", num_engines=2)


def test_a_cluster_without_gpus_is_not_asked_for_fewer(ray: MadeUpRay) -> None:
    with pytest.raises(ConfigError, match=r"\]\. No node has a GPU: add nodes that have one"):
        check_room(1, "cuda")


def test_a_driver_that_was_given_up_does_not_touch_the_groups_of_its_successor(
    ray: MadeUpRay,
) -> None:
    owner, driver = Placement(2, "cpu", "engine"), Placement(2, "cpu", "engine")
    owner.reserve()
    assert driver.is_whole()
    owner.fence_stale_copies()
    del ray.cpus["a"]
    owner.restore(1.0, lambda: True)
    assert owner.is_whole() and not driver.is_whole() and driver.node_ids() == set()
    ray.cpus["c"] = 2.0
    assert driver.restore(1.0, lambda: True)  # it makes one of its own
    assert owner.is_whole()
    owner.remove()
    assert all(group["state"] == "REMOVED" for group in ray.groups.values())
