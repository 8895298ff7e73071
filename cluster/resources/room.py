"""What a cluster offers to the ranks of an engine: which device, and on how many nodes.

A cluster that cannot hold the ranks is refused, saying what is needed and what each node has.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from scheduler.errors import ConfigError
from workers.configuration import has_cuda

logger = logging.getLogger("eagleray")


def pick_device(device: str, tensor_parallel_size: int) -> str:
    """The device of the ranks: "auto" means "cuda" where there is a GPU for each, else "cpu".

    Ray counts GPUs by itself; on a cluster of this machine alone, torch must also be able to use
    them.
    """
    if device != "auto":
        return device
    if ray.cluster_resources().get("GPU", 0) < tensor_parallel_size:
        return "cpu"
    if len(living_nodes()) > 1 or has_cuda():
        return "cuda"
    version = importlib.metadata.version("torch")
    logger.warning(
        "there are GPUs here, but torch %s cannot use them: the ranks run on the CPU", version
    )
    return "cpu"


def living_nodes() -> list[dict[str, Any]]:
    """Ray's record of each node that is alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def bundle_of(device: str) -> dict[str, float]:
    """What one rank needs."""
    return {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})


def rank_capacities(device: str) -> list[int]:
    """How many ranks each living node could hold if nothing else used it."""
    bundle = bundle_of(device)
    node_resources = [node["Resources"] for node in living_nodes()]
    return [
        int(min(resources.get(k, 0) // v for k, v in bundle.items()))
        for resources in node_resources
    ]


def check_room(tensor_parallel_size: int, device: str, num_engines: int = 1) -> None:
    """Raise `ConfigError` when the cluster lacks the resources, whoever uses them now."""
    capacities = rank_capacities(device)
    if placement_strategy(tensor_parallel_size, device) == "STRICT_PACK":
        max_engines = sum(capacity // tensor_parallel_size for capacity in capacities)
    else:
        max_engines = sum(capacities) // tensor_parallel_size
    if max_engines < num_engines:
        problem = "the Ray cluster does not have the resources for"
        raise ConfigError(shortage_message(tensor_parallel_size, device, problem, num_engines))


def placement_strategy(tensor_parallel_size: int, device: str) -> str:
    """STRICT_PACK if one node can hold all ranks, otherwise PACK: as few nodes as possible."""
    fits_one_node = max(rank_capacities(device), default=0) >= tensor_parallel_size
    return "STRICT_PACK" if fits_one_node else "PACK"


def shortage_message(
    tensor_parallel_size: int,
    device: str,
    problem: str,
    num_engines: int = 1,
    strategy: str | None = None,
) -> str:
    """A message that begins with `problem`: what is needed, what each node has, and what to do.
    `num_engines`: each with so many ranks. `strategy`: by which they are placed; None: that
    of new ones.
    """
    bundle = bundle_of(device)
    needed_resources = {
        name: amount * tensor_parallel_size * num_engines for name, amount in bundle.items()
    }
    free_by_node = available_resources_per_node()
    rows = []
    for node in living_nodes():
        total_resources, free_resources = node["Resources"], free_by_node.get(node["NodeID"], {})
        resources_text = ", ".join(
            f"{total_resources.get(k, 0):g} {k} ({free_resources.get(k, 0):g} free)"
            for k in needed_resources
        )
        rows.append(f"{node['NodeManagerAddress']}: {resources_text}")
    needed_text = ", ".join(f"{amount:g} {name}" for name, amount in needed_resources.items())
    if num_engines > 1:
        problem += f" {num_engines} replicas with"
    strategy = strategy or placement_strategy(tensor_parallel_size, device)
    if strategy == "STRICT_PACK" and tensor_parallel_size > 1:
        needed_text += ", each replica on one node" if num_engines > 1 else ", on one node"
    option_names = ("--replicas or " if num_engines > 1 else "") + "tensor_parallel_size"
    advice = f"Lower {option_names}, add nodes, or wait for other work to end"
    if device == "cuda" and not any(node["Resources"].get("GPU") for node in living_nodes()):
        advice = "No node has a GPU: add nodes that have one, or use device cpu"
    return (
        f"{problem} tensor_parallel_size {tensor_parallel_size}: needed {needed_text}; nodes have"
        f" [{'; '.join(rows)}]. {advice}"
    )
