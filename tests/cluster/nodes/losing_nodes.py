"""An engine on a Ray cluster of several nodes that come and go: `python -m
tests.cluster.nodes.losing_nodes`.

A program of its own, since a process can be part of one Ray cluster only. The nodes are raylets
with two CPUs each on this machine. Fails if a promise is broken; prints seconds as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from cluster import LLM, SamplingParams
from cluster.resources.placement import Place
from configs.paths import DEFAULT_MODEL_DIR
from tests.cluster.processes import descendants, wait_until
from tests.cluster.recovery.load import History, Load, cases, compare

CASES = cases(16, tokens=60)
LIMIT_S = 120.0
# Ray declares a node dead after 3 s instead of 15, and one that is cut off after 9 s instead of 60.
SOON_DEAD = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "6",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class World:
    """A cluster, one engine on it, and the tokens that its clients must get."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.nodes = [self.cluster.add_node(num_cpus=2) for _ in range(3)]
        ray.init(self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        self.seconds: dict[str, float] = {}
        self.llm = LLM(tensor_parallel_size=4, device="cpu", dtype="float32", log_level="error")
        self.expected: list[History] = Load(self.llm, CASES).wait(LIMIT_S)

    def remove(self, node_id: str) -> None:
        """End a node the way a power cut does."""
        [node] = [node for node in self.nodes if node.node_id == node_id]
        self.nodes.remove(node)
        raylet = node.all_processes["raylet"][0].process.pid
        for pid in [*descendants(raylet), raylet]:
            os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=2))

    def under_load(self, what: str, harm: Callable[[], None]) -> None:
        """Harm the cluster while requests run; the requests must end as if nothing had happened."""
        load = Load(self.llm, CASES)
        load.wait_for_news(LIMIT_S)
        began = time.monotonic()
        harm()
        load.wait_for_news(LIMIT_S)
        self.seconds[what] = round(time.monotonic() - began, 1)
        seen = load.wait(LIMIT_S)
        assert compare(CASES, seen, self.expected) == []


def check_tokens(llm: LLM) -> None:
    """Greedy tokens equal those of transformers."""
    [output] = llm.generate("What is 47 + 38?", GREEDY)
    model: Any = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL_DIR, dtype=torch.float32)
    prompt = output.prompt_token_ids
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert output.token_ids == expected[0, len(prompt) :].tolist(), output


def check_places(places: list[Place]) -> None:
    """Two nodes, and neighbors on the same one."""
    nodes = [place.node_id for place in places]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
    assert [place.local_rank for place in places] == [0, 1, 0, 1]
    assert {place.ranks_on_node for place in places} == {2}


def main() -> None:
    os.environ.update(SOON_DEAD)
    world = World()
    check_places(world.llm._engine_processes.places())
    check_tokens(world.llm)

    def remove_the_driver() -> None:
        world.remove(world.llm._engine_processes.places()[0].node_id)

    world.under_load("the driver's node", remove_the_driver)
    check_places(world.llm._engine_processes.places())

    def remove_what_cannot_be_spared() -> None:
        world.remove(world.llm._engine_processes.places()[3].node_id)
        told = r"no room yet for .* needed 4 CPU; nodes have \[.*: 2 CPU \("
        wait_until(
            lambda: re.search(told, world.llm.stats().recovery_waits_for) is not None,
            "a state that says what is missing",
            60.0,
        )
        world.add()

    world.under_load("a node with ranks, with too little left", remove_what_cannot_be_spared)
    check_places(world.llm._engine_processes.places())
    world.llm.shutdown()
    ray.shutdown()
    world.cluster.shutdown()
    print(json.dumps(world.seconds))


if __name__ == "__main__":
    main()
