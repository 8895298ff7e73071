"""An engine whose matrices are held as codes does what one with plain weights does: it answers,
finds cached prefixes, keeps to a schema, and outlives the loss of a rank.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import LLM, SamplingParams
from cluster.commands.lose_rank import processes_of
from configs.paths import DEFAULT_MODEL_DIR
from kernels.cpu.capabilities import CPU_CAPABILITIES
from tests.cluster.processes import wait_until
from tests.cluster.test_experts import chat_of, check_constrained_output
from tests.default_model.questions import held_out_sums, is_right

pytestmark = pytest.mark.engine
LIMIT_S = 60.0
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SUMS = held_out_sums()[:24]


@pytest.fixture(scope="module", params=["int8", "int4", "fp8"])
def llm(users_ray: None, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One engine for all tests of a form of weights."""
    if request.param not in CPU_CAPABILITIES.quantizations:
        pytest.skip(f"the kernels of this processor have no {request.param}")
    cache: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_blocks": 256, "max_model_len": 192}
    with LLM(
        DEFAULT_MODEL_DIR,
        tensor_parallel_size=2,
        device="cpu",
        quantization=request.param,
        spares="warm",
        **cache,
    ) as engine:
        yield engine


def test_sums_are_answered(llm: LLM) -> None:
    outputs = llm.chat([chat_of(a, b) for a, b in SUMS], GREEDY)
    assert all(is_right(output.text, a, b) for output, (a, b) in zip(outputs, SUMS, strict=True))


def test_a_prompt_that_comes_again_is_found_in_the_cache(llm: LLM) -> None:
    first, again = (llm.chat(chat_of(99, 98), GREEDY)[0] for _ in range(2))
    in_whole_blocks = len(again.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
    assert again.num_cached_tokens == in_whole_blocks > first.num_cached_tokens
    assert again.token_ids == first.token_ids


# Masks act on logits, whatever form the weights have.
@pytest.mark.parametrize("llm", ["int4"], indirect=True)
def test_constrained_output_keeps_to_its_schema(llm: LLM) -> None:
    check_constrained_output(llm)


def test_a_rank_that_is_killed_changes_no_answer(llm: LLM) -> None:
    wait_until(lambda: "spare 1" in processes_of(llm), "a group that stands by", LIMIT_S)
    before = llm.stats().num_recoveries
    prompts = [{"messages": chat_of(a, b)} for a, b in SUMS]
    generations = llm.client.submit(prompts, [GREEDY] * len(prompts))
    os.kill(processes_of(llm)["rank 1"].pid, signal.SIGKILL)
    outputs = llm.client.wait(generations)
    assert all(is_right(output.text, a, b) for output, (a, b) in zip(outputs, SUMS, strict=True))
    assert llm.stats().num_recoveries == before + 1
