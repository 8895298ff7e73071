"""An engine with a model of experts does what one with a dense model does: it chats, also through
the HTTP API, keeps to a schema, finds cached prefixes, preempts, and outlives the loss of a rank.
Greedy tokens equal those of transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from cluster import LLM, RequestOutput, SamplingParams, StructuredOutputs
from cluster.api.app import Api
from cluster.api.endpoints import ServedModel
from cluster.client.tokenizer import Tokenizer
from cluster.commands.lose_rank import processes_of
from tests.cluster.processes import wait_until
from tests.cluster.test_llm import GREEDY, check_against_transformers
from tests.default_model.experts import write_model_with_experts
from tests.default_model.questions import Message, held_out_sums, is_right, sum_question

pytestmark = pytest.mark.engine
LIMIT_S = 60.0
BLOCK_SIZE = 4
ANSWER = SamplingParams(temperature=0.0, max_tokens=12)
SUMS = held_out_sums()[:24]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "day": {"enum": ["Monday", "Tuesday"]}},
    "required": ["sum", "day"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    write_model_with_experts(path)
    return path


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    options: Any = {"experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def llm(users_ray: None, model_dir: Path) -> Iterator[LLM]:
    """One engine for all tests, with so few blocks that sequences are preempted."""
    cache: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_blocks": 64, "max_model_len": 192}
    with LLM(
        model_dir, tensor_parallel_size=2, device="cpu", dtype="float32", spares="warm", **cache
    ) as engine:
        yield engine


def chat_of(a: int, b: int) -> list[Message]:
    return [{"role": "user", "content": sum_question(a, b)}]


def check_tokens(model: Any, outputs: list[RequestOutput]) -> None:
    check_against_transformers(model, outputs, [output.prompt_token_ids for output in outputs])


def test_sums_are_answered_in_chats(llm: LLM) -> None:
    outputs = llm.chat([chat_of(a, b) for a, b in SUMS], ANSWER)
    right = [is_right(output.text, a, b) for output, (a, b) in zip(outputs, SUMS, strict=True)]
    assert sum(right) >= len(SUMS) - 1, [output.text for output in outputs]


def test_tokens_equal_transformers_although_sequences_were_preempted(llm: LLM, model: Any) -> None:
    before = llm.stats().num_preemptions
    outputs = llm.chat([chat_of(a, b) for a, b in SUMS], GREEDY)
    assert llm.stats().num_preemptions > before
    check_tokens(model, outputs)


def test_a_prompt_that_comes_again_is_found_in_the_cache(llm: LLM, model: Any) -> None:
    first, again = (llm.chat(chat_of(99, 98), GREEDY)[0] for _ in range(2))
    in_whole_blocks = len(again.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
    assert again.num_cached_tokens == in_whole_blocks > first.num_cached_tokens
    assert again.token_ids == first.token_ids
    check_tokens(model, [again])


def check_constrained_output(llm: LLM) -> None:
    """Drawn outputs that end keep to a schema."""
    structure = StructuredOutputs(json=SCHEMA)
    params = [
        SamplingParams(structured_outputs=structure, temperature=1.0, seed=seed, max_tokens=80)
        for seed in range(6)
    ]
    outputs = llm.generate([{"messages": chat_of(12, 35)}] * len(params), params)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended, outputs
    for output in ended:
        jsonschema.validate(json.loads(output.text), SCHEMA)


def test_constrained_output_keeps_to_its_schema(llm: LLM) -> None:
    check_constrained_output(llm)


def test_the_api_answers_as_a_whole_and_as_a_stream(llm: LLM, model_dir: Path) -> None:
    served = ServedModel(name="experts", builder=llm.client.builder, tokenizer=Tokenizer(model_dir))

    async def ask() -> tuple[str | None, str]:
        app: Any = Api(llm.client, served, version="0")
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        chats = openai.AsyncOpenAI(
            base_url="http://engine/v1", api_key="any", http_client=http
        ).chat.completions
        asked: Any = {"model": "experts", "messages": chat_of(*SUMS[0]), "temperature": 0}
        whole = await chats.create(**asked)
        parts = [part async for part in await chats.create(**asked, stream=True)]
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        return whole.choices[0].message.content, streamed

    whole, streamed = asyncio.run(ask())
    assert whole == streamed and is_right(streamed, *SUMS[0])


def test_a_rank_that_is_killed_changes_no_token(llm: LLM, model: Any) -> None:
    wait_until(lambda: "spare 1" in processes_of(llm), "a group that stands by", LIMIT_S)
    before = llm.stats().num_recoveries
    prompts = [{"messages": chat_of(a, b)} for a, b in SUMS]
    generations = llm.client.submit(prompts, [GREEDY] * len(prompts))
    os.kill(processes_of(llm)["rank 1"].pid, signal.SIGKILL)
    check_tokens(model, llm.client.wait(generations))
    assert llm.stats().num_recoveries == before + 1
