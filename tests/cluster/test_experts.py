"""An engine with a model of experts: tokens equal those of transformers, also from the group that
stood by when a rank is killed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from cluster import LLM
from cluster.commands.lose_rank import processes_of
from tests.checkpoints import make_checkpoint
from tests.cluster.conftest import OPTIONS, SHAPE
from tests.cluster.processes import wait_until
from tests.cluster.test_llm import GREEDY, check_against_transformers
from tests.workers.test_engine_exactness import prompts

pytestmark = pytest.mark.engine
LIMIT_S = 60.0
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "experts_implementation": "eager",
}


def test_tokens_equal_transformers_and_do_so_after_a_rank_was_killed(
    users_ray: None, tmp_path: Path
) -> None:
    shape = dataclasses.replace(SHAPE, layers=3, extra={**SHAPE.extra, **EXPERTS})
    model = make_checkpoint(tmp_path, shape)
    options = OPTIONS | {"spares": "warm"}
    with LLM(tmp_path, tensor_parallel_size=2, **options) as engine:
        check_against_transformers(model, engine.generate(prompts(), GREEDY))
        wait_until(lambda: "spare 1" in processes_of(engine), "a group that stands by", LIMIT_S)
        os.kill(processes_of(engine)["rank 1"].pid, signal.SIGKILL)
        check_against_transformers(model, engine.generate(prompts(), GREEDY))
        assert engine.stats().num_recoveries == 1
