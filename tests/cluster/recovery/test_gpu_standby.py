"""A rank on a GPU is killed under load while its spare stands by: nothing is computed again. The
GPU is made up, the rest is real.
"""

from __future__ import annotations

import pytest

from cluster import LLM
from tests.cluster.processes import wait_until
from tests.cluster.recovery.gpu_rank import DriverOfFakeGpus
from tests.cluster.recovery.load import Load, cases, compare
from tests.cluster.recovery.test_recovery import (
    LIMIT_S,
    OPTIONS,
    kill,
    processes_of,
    wait_for_recovery,
    wait_until_ready,
)
from tests.workers.memory import fake_cuda

pytestmark = [
    pytest.mark.engine,
    pytest.mark.programs,
    pytest.mark.skipif(not fake_cuda.is_possible, reason="needs gcc and Linux"),
]


def test_what_a_rank_on_a_gpu_had_computed_is_not_computed_again(
    users_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.engine.start.Driver", DriverOfFakeGpus)
    options = OPTIONS | {
        "device": "cuda",
        "attention_backend": "triton",  # for what it can do; the reference takes its place
        "tensor_parallel_size": 1,
        "spares": "standby",
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
    }
    requests = cases(16, tokens=60)
    with LLM(**options) as llm:
        expected = Load(llm, requests).wait(LIMIT_S)
        for epoch in range(2):
            wait_until_ready(llm)
            wait_until(lambda: "spare 0" in processes_of(llm), "a group that stands by", LIMIT_S)
            spare = processes_of(llm)["spare 0"]
            load = Load(llm, requests)
            for _ in range(3):
                load.wait_for_news(10.0)
            kill(llm, "rank 0")
            wait_for_recovery(llm, epoch)
            assert compare(requests, load.wait(LIMIT_S), expected) == []
            assert processes_of(llm)["rank 0"].pid == spare.pid
            assert llm.stats().num_recomputed_tokens == 0
