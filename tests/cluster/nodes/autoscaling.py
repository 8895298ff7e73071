"""An engine that no node can hold yet: the autoscaler adds nodes for it. A program of its own, with
Ray's fake provider, whose nodes are raylets on this machine.
"""

from __future__ import annotations

import time

import ray
from ray.cluster_utils import AutoscalingCluster

from cluster import LLM, SamplingParams
from scheduler.errors import ConfigError
from tests.cluster.nodes.losing_nodes import check_places

QUESTION = {"messages": [{"role": "user", "content": "What is 47 + 38?"}]}


def main() -> None:
    worker = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = AutoscalingCluster(
        head_resources={"CPU": 0}, worker_node_types={"worker": worker}, idle_timeout_minutes=10
    )
    cluster.start()
    try:
        ray.init("auto", log_to_driver=False)
        try:
            LLM(tensor_parallel_size=4, device="cpu")
        except ConfigError as error:
            assert "needed 4 CPU" in str(error), error
        else:
            raise AssertionError("it did not wait, and began all the same")
        began = time.monotonic()
        with LLM(tensor_parallel_size=4, device="cpu", wait_for_nodes_s=120) as llm:
            check_places(llm._engine.places())
            [output] = llm.generate([QUESTION], SamplingParams(temperature=0))
            assert output.text == "85", output
        print(f"nodes were made and the engine answered after {time.monotonic() - began:.1f} s")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
