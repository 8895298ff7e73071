"""An engine that fits on no node yet, so the autoscaler adds nodes for it.

The program below joins a cluster whose autoscaler has Ray's fake provider: its nodes are raylets on
the same machine.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from cluster import LLM, SamplingParams
from scheduler.errors import ConfigError

NOTHING: tuple[str, ...] = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "rsync_exclude"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    *("cluster_synced_files", "rsync_filter"),
)


def cluster_config(cpus_per_node: int) -> dict[str, Any]:
    """For `ray start --autoscaling-config`: up to two nodes, at first none."""
    worker = {"resources": {"CPU": cpus_per_node}, "node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "fake",
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True},  # all have one address
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 10,
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": worker | {"max_workers": 2},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in NOTHING},
    }


ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}
QUESTION: Any = {"messages": [{"role": "user", "content": "What is 47 + 38?"}]}


def main() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 4, "device": "cpu", "log_level": "error"}
    options["ray_address"] = f"{sys.argv[1]}:6379"
    try:
        LLM(**options)
    except ConfigError as error:
        assert "needed 4 CPU" in str(error), error
    else:
        raise AssertionError("it began without the resources")
    began = time.monotonic()
    with LLM(**options, wait_for_nodes_s=120) as llm:
        assert [place.local_rank for place in llm._engine_processes.places()] == [0, 1, 0, 1]
        [output] = llm.generate([QUESTION], SamplingParams(temperature=0))
        assert output.text == "85", output
        print(f"nodes were made and it answered after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
