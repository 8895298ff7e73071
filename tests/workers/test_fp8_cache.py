"""A KV cache of 8-bit numbers: half the memory, and the same model except for the precision of the
numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.in_process import InProcessExecutor
from benchmarks.rank_pool import WorkerPool, executor_of
from cluster.client.tokenizer import Tokenizer
from cluster.scheduler_limits import limits_of
from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from kernels import select
from kernels.interface import Capabilities
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.checkpoints import Shape, make_checkpoint
from tests.default_model.questions import (
    held_out_sums,
    is_right,
    question_text,
    sum_question,
)
from tests.workers.conftest import config_of
from tests.workers.test_exactness import run_logits
from workers.batch.kv_plan import block_bytes
from workers.configuration import resolve_config

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 512, 40)]


def test_ranks_and_backends_agree_on_the_logits(pool: WorkerPool, tmp_path: Path) -> None:
    """Sums in another order move a few keys and values by one step of 8 bits, so the tolerance is a
    tenth of the error that 8 bits cause.
    """
    make_checkpoint(tmp_path, Shape(name="plain"))

    def logits(size: int, backend: str, kv_cache_dtype: str) -> Any:
        config = config_of(
            tmp_path,
            tensor_parallel_size=size,
            attention_backend=backend,
            kv_cache_dtype=kv_cache_dtype,
        )
        with executor_of(pool, config) as executor:
            return run_logits(executor, TOKENS)

    want, plain = logits(1, "reference", "fp8_e4m3"), logits(1, "reference", "auto")
    cost = np.abs(want - plain).mean()
    for size in (1, 2, 4):
        difference = np.abs(logits(size, "cpu", "fp8_e4m3") - want).mean()
        print(f"tp {size}: {difference:.1e} from the reference, which is {cost:.1e} from float32")
        assert difference < 0.1 * cost
    assert cost > 1e-3, "the cache holds more than 8 bits"


def test_a_token_takes_half_the_memory_of_16_bits() -> None:
    sizes = [
        block_bytes(config_of(DEFAULT_MODEL_DIR, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype))
        for kv_cache_dtype in ("auto", "fp8_e4m3")
    ]
    assert sizes[0] == 2 * sizes[1]


def test_the_default_model_answers_held_out_sums() -> None:
    sums = held_out_sums()[::4]
    tokenizer = Tokenizer(DEFAULT_MODEL_DIR)
    engine_config = EngineConfig(device="cpu", kv_cache_dtype="fp8_e4m3", kv_cache_bytes=2**26)
    model = ModelConfig.from_dir(DEFAULT_MODEL_DIR)
    config = resolve_config(engine_config, model, DEFAULT_MODEL_DIR, "cpu")
    executor = InProcessExecutor(config, 2)
    scheduler = Scheduler(limits_of(config, executor.num_kv_blocks))
    engine = Engine(scheduler, executor)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for number, (a, b) in enumerate(sums):
        prompt = tokenizer.encode(question_text(sum_question(a, b)))
        engine.add(
            Request(
                request_id=str(number),
                token_ids=int32_array(prompt),
                num_prompt_tokens=len(prompt),
                sampling=params.resolve(seed=0, eos_token_ids=model.eos_token_ids),
            )
        )
    right = 0
    while engine.has_work:
        output = engine.step()
        for seq in output.finished_sequences if output is not None else ():
            answer = tokenizer.decode(seq.token_ids[seq.num_prompt_tokens : -1].tolist())
            right += is_right(answer, *sums[int(seq.request_id)])
    executor.close()
    assert right >= 0.99 * len(sums), f"{right} of {len(sums)}"


def test_flash_attn_is_not_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Capabilities(
        name="flash_attn",
        description="",
        default_block_size=16,
        dtypes=("bfloat16",),
        fast_dtypes=("bfloat16",),
    )
    installed = select.Backend(describe=lambda: found, load=lambda: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(select.BACKENDS["cuda"], "flash_attn", installed)
    assert select.choose_capabilities("cuda").name == "flash_attn"
    assert select.choose_capabilities("cuda", kv_cache_dtype="fp8_e4m3").name == "triton"
