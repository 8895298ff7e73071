"""Constrained output through the whole engine: complete outputs are valid, whatever happens
meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cluster import LLM, RequestOutput, SamplingParams, StructuredOutputs
from cluster.commands.lose_rank import processes_of
from scheduler.errors import RequestError
from tests.cluster.grammar.test_grammars import CHOICES, REGEXES, random_schema

pytestmark = pytest.mark.engine
USER = {"role": "user", "content": "What is 12 + 35?"}
NUM_SCHEMAS = 60


@pytest.fixture(scope="module")
def llm(users_ray: None) -> Iterator[LLM]:
    """An engine with so few blocks that sequences are preempted."""
    options: dict[str, Any] = {"num_kv_blocks": 24, "max_num_seqs": 16, "max_model_len": 256}
    with LLM(
        tensor_parallel_size=2, device="cpu", dtype="float32", block_size=16, **options
    ) as engine:
        yield engine


def wanted() -> list[StructuredOutputs]:
    rng = random.Random(11)
    schemas = [StructuredOutputs(json=random_schema(rng)) for _ in range(NUM_SCHEMAS)]
    regexes = [StructuredOutputs(regex=regex) for regex in REGEXES]
    choices = [StructuredOutputs(choice=choice) for choice in CHOICES]
    return [*schemas, *regexes, *choices, StructuredOutputs(json_object=True)]


def params(structure: StructuredOutputs | None, **more: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    return SamplingParams(structured_outputs=structure, **(values | more))


def check(output: RequestOutput, structure: StructuredOutputs) -> bool:
    """Whether the output is complete; if it is, it must be valid."""
    [completion] = output.outputs
    assert completion.finish_reason in ("stop", "length"), completion
    if completion.finish_reason == "length":
        return False
    validate(completion.text, structure)
    return True


def validate(text: str, structure: StructuredOutputs) -> None:
    if structure.regex is not None:
        assert re.fullmatch(structure.regex, text), text
    elif structure.choice is not None:
        assert text in structure.choice
    else:
        schema = {"type": "object"} if structure.json_object else structure.json
        assert isinstance(schema, dict)
        jsonschema.validate(json.loads(text), schema)


def test_whatever_ends_validates_beside_free_requests_and_after_preemptions(llm: LLM) -> None:
    structures = wanted()
    prompts = [{"messages": [USER]} for _ in structures]
    before = llm.stats().num_preemptions
    free = [params(None, max_tokens=12, seed=number) for number in range(20)]
    outputs = llm.generate(
        [*prompts, *prompts[:20]], [*(params(structure) for structure in structures), *free]
    )
    ended = sum(map(check, outputs, structures))
    assert llm.stats().num_preemptions > before
    print(f"{ended} of {len(structures)} ended; {llm.stats().num_preemptions} preemptions")
    assert ended > len(structures) // 2
    again = llm.generate([prompts[0]] * 20, free)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs[len(structures) :]]
    one_by_one = [
        llm.generate(prompt, params(structure))[0]
        for prompt, structure in zip(prompts[:8], structures[:8], strict=True)
    ]
    assert [o.token_ids for o in one_by_one] == [o.token_ids for o in outputs[:8]]


def test_a_rank_that_dies_changes_nothing(llm: LLM) -> None:
    structures = wanted()[:12]
    prompts = [{"messages": [USER]} for _ in structures]
    each = [params(structure, max_tokens=40) for structure in structures]
    want = [output.token_ids for output in llm.generate(prompts, each)]
    generations = llm.client.submit(prompts, each)
    os.kill(processes_of(llm)["rank 1"].pid, signal.SIGKILL)
    outputs = llm.client.wait(generations)
    assert llm.stats().num_recoveries >= 1
    assert [output.token_ids for output in outputs] == want
    for output, structure in zip(outputs, structures, strict=True):
        check(output, structure)


def test_streams_are_the_same(llm: LLM) -> None:
    structure = StructuredOutputs(regex=r"[a-z]{3,8}-\d{2}")
    [whole] = llm.generate({"messages": [USER]}, params(structure))
    chunks = list(llm.stream({"messages": [USER]}, params(structure)))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert check(whole, structure)


def test_what_is_not_possible_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"json\.not: this keyword"):
        llm.generate("Hi", params(StructuredOutputs(json={"not": {}})))
    with pytest.raises(RequestError, match="regex: nothing is repeated"):
        llm.generate("Hi", params(StructuredOutputs(regex="a{3,1}")))
