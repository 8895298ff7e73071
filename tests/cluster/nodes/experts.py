"""An engine with a model of experts over two nodes with a CPU each: `python -m
tests.cluster.nodes.experts`. Fails unless its tokens equal those of transformers.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

from cluster import LLM
from tests.cluster.test_llm import GREEDY, check_against_transformers
from tests.default_model.experts import write_model_with_experts
from tests.default_model.questions import held_out_sums, sum_question

SUMS = held_out_sums()[:16]


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        write_model_with_experts(Path(directory))
        options: Any = {"experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
        with LLM(
            directory, tensor_parallel_size=2, device="cpu", dtype="float32", spares="off"
        ) as llm:
            nodes = {place.node_id for place in llm._engine_processes.places()}
            chats = [[{"role": "user", "content": sum_question(*sum_)}] for sum_ in SUMS]
            outputs = llm.chat(chats, GREEDY)
            check_against_transformers(model, outputs, [out.prompt_token_ids for out in outputs])
    ray.shutdown()
    cluster.shutdown()
    print(len(outputs), "answers of", len(nodes), "nodes equal those of transformers")


if __name__ == "__main__":
    main()
