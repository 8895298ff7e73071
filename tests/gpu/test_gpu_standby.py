"""On a GPU, with the kernels and graphs that users run, a spare that stands by takes over from a
rank that is killed.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.test_gpu_standby import FORMS, NUM_BLOCKS, check_that_a_spare_goes_on, serve
from workers.configuration import resolve_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def config_for(model_dir: Path, **options: Any) -> ResolvedConfig:
    options |= {"model": str(model_dir), "spares": "standby", "num_kv_blocks": NUM_BLOCKS}
    options |= {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    engine = EngineConfig.from_dict({"device": "cuda", "attention_backend": "triton", **options})
    return resolve_config(engine, ModelConfig.from_dir(model_dir), model_dir, "cuda")


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_spare_goes_on_with_the_cache_of_a_rank_that_is_killed(
    form: dict[str, Any], enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, Shape(name="small"))
    config = config_for(tmp_path, enforce_eager=enforce_eager, **form)
    replay, replays = torch.cuda.CUDAGraph.replay, list[None]()

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    check_that_a_spare_goes_on(config, serve, nullcontext)
    # Of twelve steps alone and six after the death, most decode.
    assert len(replays) == 0 if enforce_eager else len(replays) > 12
