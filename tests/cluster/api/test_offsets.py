"""`text_offset` says where in the text of a completion a token begins, streamed and whole."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api.completion_replies import CompletionWriter
from cluster.api.offsets import Offsets
from cluster.client.outputs import Chunk, Generation
from cluster.client.requests import RequestBuilder
from cluster.news import News
from scheduler.messages import TokenLogprobs
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import END_ID, LIMITS, MODEL, TOKENIZER

TEXTS = [
    "plain words",
    "🦅",
    "ü🦅a🦅🦅ü",
    "日本語 and ü",
    "e\u0301 👩‍👩‍👧 🇩🇪",
    "\ufffd is a character of its own",
    "<think>so</think>ü",
    "",
]
ENTRY = TokenLogprobs(logprob=-0.5, top_token_ids=(), top_logprobs=())


def tokens_of(text: str) -> list[int]:
    """With each character beyond ASCII as one token per byte, and a special token at the end."""
    return [*TOKENIZER.encode(text), END_ID]


def answer(token_ids: list[int], cuts: list[int]) -> tuple[Generation, list[Chunk]]:
    """A generation whose tokens arrive cut at these places, and its chunks."""
    chunks: list[Chunk] = []
    builder = RequestBuilder(MODEL, TOKENIZER, SamplingParams(), LIMITS, 0)
    generation = builder.build("Hi", SamplingParams(logprobs=0), chunks.append)
    for start, end in itertools.pairwise([0, *cuts, len(token_ids)]):
        news = News(
            first_index=start,
            token_ids=token_ids[start:end],
            logprobs=[ENTRY] * (end - start),
            finish_reason="stop" if end == len(token_ids) else None,
        )
        generation.take(generation.outputs[0], news)
    return generation, chunks


def all_cuts(num_tokens: int) -> Iterator[list[int]]:
    """Every cut in two, and one token at a time."""
    yield from ([place] for place in range(1, num_tokens))
    yield [*range(1, num_tokens)]


def offsets_of(choices: list[dict[str, Any]]) -> list[int]:
    return [
        x for choice in choices if choice["logprobs"] for x in choice["logprobs"]["text_offset"]
    ]


def whole_offsets(generation: Generation) -> list[int]:
    writer = CompletionWriter("tiny", [generation], TOKENIZER, echo=False)
    return offsets_of(writer.body()["choices"])


def streamed_offsets(generation: Generation, chunks: list[Chunk]) -> list[int]:
    writer = CompletionWriter("tiny", [generation], TOKENIZER, echo=False)
    data = b"".join(writer.events(0, chunk) for chunk in chunks).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in data.split("\n") if line]
    return offsets_of([choice for event in events for choice in event["choices"]])


def expected(token_ids: list[int]) -> list[int]:
    """For tokens of a valid text: the characters that are complete before the token."""
    return [
        len(b"".join(map(TOKENIZER.token_bytes, token_ids[:i])).decode(errors="ignore"))
        for i in range(len(token_ids))
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_characters_and_the_same_streamed_and_whole(text: str) -> None:
    token_ids = tokens_of(text)
    for cuts in all_cuts(len(token_ids)):
        generation, chunks = answer(token_ids, cuts)
        assert generation.completions[0].text == text
        assert whole_offsets(generation) == expected(token_ids)
        assert streamed_offsets(generation, chunks) == expected(token_ids)


def test_offsets_of_torn_characters_point_into_the_text() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        token_ids = tokens_of("".join(rng.choices(["ü", "🦅", "日", "a", "word"], k=6)))
        rng.shuffle(token_ids)
        cuts = sorted(rng.sample(range(1, len(token_ids)), k=2))
        generation, chunks = answer(token_ids, cuts)
        offsets, text = whole_offsets(generation), generation.completions[0].text
        assert streamed_offsets(generation, chunks) == offsets
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
        for token_id, offset in zip(token_ids, offsets, strict=True):
            written = TOKENIZER.decode([token_id])
            if written and "\ufffd" not in written:
                assert text[offset : offset + len(written)] == written, seed


def test_a_special_token_has_no_place_in_the_text() -> None:
    token_ids = [*TOKENIZER.encode("ü"), END_ID, *TOKENIZER.encode("a"), END_ID]
    generation, _ = answer(token_ids, [])
    assert generation.completions[0].text == "üa"
    assert whole_offsets(generation)[-3:] == [1, 1, 2]


def test_offsets_begin_behind_the_text_that_is_repeated() -> None:
    offsets = Offsets(TOKENIZER, 7)
    assert [offsets.next(token_id) for token_id in TOKENIZER.encode("ab")] == [7, 8]
