"""Where an engine runs: the device, and a placement group with one bundle per rank.

A cluster that cannot hold the ranks is refused, saying what is needed and what each node has.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from configs.paths import CHECKOUT
from scheduler.errors import ConfigError
from workers.configuration import has_cuda
from workers.faults import VARIABLE as FAULTS

PLACEMENT_TIMEOUT_S = 30.0

logger = logging.getLogger("eagleray")


def actor_environment() -> dict[str, Any]:
    """Runtime environment of our actors: the checkout on the path.

    An actor passes its environment on to the actors it starts, so nothing about GPUs may be set
    here: the driver has none, but the ranks it starts have.
    """
    inherited = os.environ.get("PYTHONPATH")
    path = f"{CHECKOUT}:{inherited}" if inherited else str(CHECKOUT)
    faults = os.environ.get(FAULTS)  # set by tests alone
    return {"env_vars": {"PYTHONPATH": path} | ({FAULTS: faults} if faults else {})}


def pick_device(device: str, tensor_parallel_size: int) -> str:
    """The device the ranks run on: "auto" means "cuda" where the cluster has a GPU for every rank,
    else "cpu".

    Ray counts GPUs by itself; on a cluster of this machine alone, torch must also be able to use
    them.
    """
    if device != "auto":
        return device
    if ray.cluster_resources().get("GPU", 0) < tensor_parallel_size:
        return "cpu"
    if len([node for node in ray.nodes() if node["Alive"]]) > 1 or has_cuda():
        return "cuda"
    version = importlib.metadata.version("torch")
    logger.warning(
        "there are GPUs here, but torch %s cannot use them: the ranks run on the CPU", version
    )
    return "cpu"


def bundle_of(device: str) -> dict[str, float]:
    """What one rank needs."""
    return {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})


def check_room(tensor_parallel_size: int, device: str, groups: int = 1) -> bool:
    """Whether one node can hold all ranks of a group. Raises `ConfigError` when the cluster does
    not have the resources for so many groups, whoever uses them now.
    """
    bundle = bundle_of(device)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    held = [int(min(node.get(k, 0) // v for k, v in bundle.items())) for node in nodes]
    if sum(held) < tensor_parallel_size * groups:
        what = "the Ray cluster does not have the resources for"
        if groups > 1:
            what += f" {groups} replicas with"
        raise ConfigError(_shortage(tensor_parallel_size, bundle, what, groups))
    return max(held) >= tensor_parallel_size


def place(tensor_parallel_size: int, device: str) -> PlacementGroup:
    """Reserve one bundle per rank: on one node if one can hold all of them, otherwise on as few
    nodes as possible.

    Raises `ConfigError` at once when the cluster lacks the resources, or when they do not become
    free in time.
    """
    bundle = bundle_of(device)
    strategy = "STRICT_PACK" if check_room(tensor_parallel_size, device) else "PACK"
    group: PlacementGroup = placement_group(
        [dict(bundle) for _ in range(tensor_parallel_size)], strategy=strategy
    )
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        what = f"after {PLACEMENT_TIMEOUT_S:.0f} s, other work still holds the resources for"
        raise ConfigError(_shortage(tensor_parallel_size, bundle, what))
    return group


def _shortage(size: int, bundle: dict[str, float], what: str, groups: int = 1) -> str:
    needed = {name: amount * size * groups for name, amount in bundle.items()}
    rows = []
    for node in ray.nodes():
        if node["Alive"]:
            total = node["Resources"]
            rows.append(
                f"{node['NodeManagerAddress']}: "
                + ", ".join(f"{total.get(k, 0):g} {k}" for k in needed)
            )
    want = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    return (
        f"{what} tensor_parallel_size {size}: needed {want}; nodes have [{'; '.join(rows)}]. "
        "Lower tensor_parallel_size, add nodes, or wait for other work to end"
    )
