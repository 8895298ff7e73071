"""The model that ships with the project answers questions that it was never trained on, through the
whole engine at tp 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster import LLM, SamplingParams
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import RequestError
from tests.default_model.questions import (
    Message,
    held_out_sums,
    is_right,
    preamble,
    sum_question,
)

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
NEEDED = 0.95
PREAMBLE_TOKENS = 300


@pytest.fixture(scope="module")
def default_llm(users_ray: None) -> Iterator[LLM]:
    with LLM(tensor_parallel_size=2, device="cpu", kv_cache_bytes=2**28, spares="off") as engine:
        yield engine


def share_right(llm: LLM, before: list[Message]) -> tuple[float, list[Any]]:
    sums = held_out_sums()
    chats = [[*before, {"role": "user", "content": sum_question(a, b)}] for a, b in sums]
    outputs = llm.chat(chats, GREEDY)
    right = [is_right(o.text, a, b) for o, (a, b) in zip(outputs, sums, strict=True)]
    return sum(right) / len(right), outputs


def test_held_out_sums_asked_alone(default_llm: LLM) -> None:
    share, outputs = share_right(default_llm, [])
    print(f"held-out sums alone: {share:.1%} of {len(outputs)}")
    assert len(outputs) > 100 and share >= NEEDED
    assert {o.finish_reason for o in outputs} == {"stop"}


def test_held_out_sums_after_a_shared_preamble_from_the_prefix_cache(default_llm: LLM) -> None:
    from transformers import AutoTokenizer

    before = preamble(PREAMBLE_TOKENS, AutoTokenizer.from_pretrained(str(DEFAULT_MODEL_DIR)))
    share, outputs = share_right(default_llm, before)
    cached = [o.num_cached_tokens for o in outputs]
    print(
        f"held-out sums after {len(outputs[0].prompt_token_ids)} tokens: {share:.1%}, cached"
        f" {sum(cached)}"
    )
    assert len(outputs[0].prompt_token_ids) >= PREAMBLE_TOKENS
    assert sum(c >= PREAMBLE_TOKENS // 2 for c in cached) >= len(cached) - 1, (
        "all but the first find the preamble"
    )
    assert share >= NEEDED


def test_text_streams_and_stop_strings_end_it(default_llm: LLM) -> None:
    messages = {"messages": [{"role": "user", "content": "Which day comes after Tuesday?"}]}
    whole = default_llm.generate(messages, GREEDY)[0]
    assert "Wednesday" in whole.text
    assert "".join(chunk.text for chunk in default_llm.stream(messages, GREEDY)) == whole.text
    cut = default_llm.generate(
        messages, SamplingParams(temperature=0.0, max_tokens=24, stop="nes")
    )[0]
    assert (cut.text, cut.finish_reason) == (whole.text.split("nes")[0], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_a_prompt_far_longer_than_those_of_training_is_answered(default_llm: LLM) -> None:
    """As programs send it that describe their tools."""
    [output] = default_llm.generate([[100 + i % 300 for i in range(6000)]], GREEDY)
    assert output.finish_reason in ("stop", "length")
    with pytest.raises(RequestError, match="40959"):
        default_llm.generate([[5] * 40_960], GREEDY)
