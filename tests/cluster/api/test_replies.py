"""The events of a stream add up to the whole answer, however tokens arrive in bunches."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.api import replies
from cluster.api.completion_replies import CompletionWriter
from cluster.api.prompts_scored import LOWEST_LOGPROB
from cluster.api.replies import (
    DONE_EVENT,
    ChatWriter,
    TextEventTemplate,
    encode_json,
    json_pieces,
    usage_of,
)
from cluster.client.outputs import Chunk, Generation
from cluster.client.requests import RequestBuilder
from cluster.grammar.markers import AnswerState
from cluster.news import News
from scheduler.messages import TokenLogprobs
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import END_ID, LIMITS, MODEL, TOKENIZER, logprobs_of
from tests.cluster.api.test_parser import random_answer

NUM_ANSWERS = 300
STATES = (AnswerState.UNDECIDED, AnswerState.REASONING, AnswerState.CONTENT)


def run(
    text: str, rng: random.Random, params: SamplingParams, prompt: Any = "Hi"
) -> tuple[Generation, list[Chunk]]:
    """A generation whose answer is this text, with its tokens in random bunches, and its chunks."""
    builder = RequestBuilder(MODEL, TOKENIZER, SamplingParams(), LIMITS, 0)
    chunks: list[Chunk] = []
    generation = builder.build(prompt, params, chunks.append)
    tokens = [*TOKENIZER.encode(text), END_ID]
    if rng.random() < 0.2:
        rng.shuffle(tokens)  # characters are torn
    for output in generation.outputs:
        place = 0
        while place < len(tokens) and output.completion.finish_reason is None:
            end = min(len(tokens), place + rng.choice([1, 1, 1, 2, 5, 50]))
            new = tokens[place:end]
            top = params.logprobs
            generation.take(
                output,
                News(
                    first_index=place,
                    token_ids=new,
                    logprobs=[logprobs_of(t, top) for t in new] if top is not None else None,
                    finish_reason="stop" if end == len(tokens) else None,
                ),
            )
            place = end
    return generation, chunks


def events_of(writer: ChatWriter | CompletionWriter, chunks: list[Chunk]) -> list[dict[str, Any]]:
    end = writer.end(includes_usage=True)
    assert end.endswith(DONE_EVENT) and writer.end(includes_usage=False) == DONE_EVENT
    data = b"".join(writer.events(0, chunk) for chunk in chunks) + end.removesuffix(DONE_EVENT)
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line]


def body_of(writer: ChatWriter | CompletionWriter) -> dict[str, Any]:
    """The whole answer as a client reads it."""
    body: dict[str, Any] = json.loads(b"".join(json_pieces(writer.body())))
    return body


def joined(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The message that a client assembles."""
    message: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "reasoning_content": "",
        "tool_calls": [],
        "logprobs": [],
    }
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                delta = choice["delta"]
                for name in ("content", "reasoning", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls", []):
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(call["function"])
                if choice["logprobs"]:
                    message["logprobs"] += choice["logprobs"]["content"]
                message["finish_reason"] = choice["finish_reason"]
    return message


def check_chats() -> None:
    for seed in range(NUM_ANSWERS):
        rng = random.Random(seed)
        text, state = random_answer(rng)
        params = SamplingParams(
            n=rng.choice([1, 1, 2]),
            logprobs=rng.choice([None, 0, 2]),
            stop=rng.choice([None, "word", ["</", "}"]]),
        )
        generation, chunks = run(text, rng, params)
        tools = rng.random() < 0.7
        streamed, whole = (
            ChatWriter("tiny", [generation], TOKENIZER, state=state, looks_for_calls=tools)
            for _ in range(2)
        )
        events, body = events_of(streamed, chunks), body_of(whole)
        ChatCompletion.model_validate(body)
        for event in events:
            ChatCompletionChunk.model_validate(event)
        assert events[-1]["choices"] == [] and events[-1]["usage"] == body["usage"]
        for choice in body["choices"]:
            message, found = choice["message"], joined(events, choice["index"])
            assert found["content"] == (message["content"] or ""), seed
            assert found["reasoning"] == (message["reasoning"] or ""), seed
            assert found["reasoning_content"] == (message["reasoning_content"] or ""), seed
            calls = [call["function"] for call in message.get("tool_calls", [])]
            assert found["tool_calls"] == calls, seed
            assert found["logprobs"] == (choice["logprobs"] or {"content": []})["content"], seed
            assert found["finish_reason"] == choice["finish_reason"], seed
            if params.logprobs is not None:
                assert len(found["logprobs"]) == len(generation.completions[0].token_ids), seed
        check_shape(events)


def check_shape(events: list[dict[str, Any]]) -> None:
    """A role, then content, then an empty delta with the reason, then usage."""
    by_choice: dict[int, list[dict[str, Any]]] = {}
    for event in events[:-1]:
        [choice] = event["choices"]
        by_choice.setdefault(choice["index"], []).append(choice)
    for choices in by_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"]
        for choice in choices[1:-1]:
            assert choice["delta"] and "role" not in choice["delta"]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)


def test_a_streamed_chat_adds_up_to_the_whole_answer() -> None:
    check_chats()


def test_a_streamed_completion_adds_up_to_the_whole_answer() -> None:
    for seed in range(NUM_ANSWERS):
        rng = random.Random(seed)
        text, _ = random_answer(rng)
        params = SamplingParams(n=rng.choice([1, 2]), logprobs=rng.choice([None, 0, 2]))
        generation, chunks = run(text, rng, params, rng.choice(["Hi", [72, 105]]))
        echo = params.logprobs is None and rng.random() < 0.5
        streamed, whole = (
            CompletionWriter("tiny", [generation], TOKENIZER, echo=echo) for _ in range(2)
        )
        events, body = events_of(streamed, chunks), body_of(whole)
        for answer in [body, *events]:
            Completion.model_validate(answer | {"choices": _with_reasons(answer["choices"])})
        for choice in body["choices"]:
            parts = [
                c for event in events for c in event["choices"] if c["index"] == choice["index"]
            ]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert parts[-1] == {
                "index": choice["index"],
                "text": "",
                "logprobs": None,
                "finish_reason": "stop",
            }
            if choice["logprobs"]:
                for name in choice["logprobs"]:
                    got = [x for part in parts if part["logprobs"] for x in part["logprobs"][name]]
                    assert got == choice["logprobs"][name]


def _with_reasons(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The client's type does not allow null here, although the service sends it before the end."""
    return [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in choices]


def test_usage_adds_up_prompts_and_outputs() -> None:
    rng = random.Random(0)
    one, _ = run("a b c", rng, SamplingParams(n=2))
    two, _ = run("a", rng, SamplingParams(), [1, 2, 3, 4])
    usage = usage_of([one, two])
    outputs = [done for g in (one, two) for done in g.completions]
    assert usage["prompt_tokens"] == len(one.prompt_token_ids) + 4
    assert usage["completion_tokens"] == sum(len(done.token_ids) for done in outputs)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_logprobs_name_their_tokens_and_bytes() -> None:
    rng = random.Random(0)  # does not tear characters
    generation, _ = run("ü", rng, SamplingParams(logprobs=1))
    writer = ChatWriter(
        "tiny", [generation], TOKENIZER, state=AnswerState.CONTENT, looks_for_calls=False
    )
    [choice] = body_of(writer)["choices"]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "ü<|im_end|>".encode()
    assert entries[-1]["token"] == "<|im_end|>" and len(entries[0]["top_logprobs"]) == 1


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [], "b": {}, "c": None},
        {"a": [{"b": [{"c": [{"d": [{"e": [{"f": ["\u2028", 1.5]}]}]}]}]}, {"g": "ü"}]},
        {
            "ids": [*range(10_000)],
            "numbers": [1.0, math.inf],
            'key "': [{"x": i} for i in range(200)],
        },
    ],
)
def test_a_value_in_pieces_is_the_same_json(value: Any) -> None:
    assert b"".join(json_pieces(value)) == encode_json(value).encode()


def test_pieces_take_iterators_as_lists() -> None:
    entries = [{"x": i} for i in range(200)]
    for values in (entries, []):
        assert json.loads(b"".join(json_pieces({"a": iter(values)}))) == {"a": values}


@settings(deadline=None)
@given(st.text())
def test_an_event_of_which_only_a_text_changes_is_what_is_encoded_whole(text: str) -> None:
    def make(text: str) -> bytes:
        return replies.event(
            {"model": 'a "b"', "delta": {"reasoning": text, "again": text}, "index": 1}
        )

    assert TextEventTemplate(make)(text) == make(text)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_log_probabilities_that_json_lacks_are_the_lowest(logprob: float) -> None:
    generation, _ = run("a", random.Random(0), SamplingParams(logprobs=1))
    done = generation.completions[0]
    entry = TokenLogprobs(logprob=logprob, top_token_ids=(1,), top_logprobs=(logprob,))
    done.logprobs = [entry] * len(done.token_ids)
    chat = ChatWriter(
        "tiny", [generation], TOKENIZER, state=AnswerState.CONTENT, looks_for_calls=False
    )
    text = CompletionWriter("tiny", [generation], TOKENIZER, echo=False)
    first = body_of(chat)["choices"][0]["logprobs"]["content"][0]
    assert first["logprob"] == first["top_logprobs"][0]["logprob"] == LOWEST_LOGPROB
    logprobs = body_of(text)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == LOWEST_LOGPROB
    assert [*logprobs["top_logprobs"][0].values()] == [LOWEST_LOGPROB]


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("take_logprobs", lambda self: None),
        ("deltas", lambda self, parts: [{"content": parts.content}] if parts.content else []),
    ],
)
def test_planted_faults_of_the_writer_are_found(
    name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies._ChatChoice, name, replacement)
    with pytest.raises(AssertionError):
        check_chats()
