"""Log probabilities of prompts over HTTP: OpenAI's `echo` with `logprobs`, vLLM's
`prompt_logprobs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.api.scripted import TOKENIZER, Server, serve

MARKED = "<|im_start|>user\nWas ist 4 + 3? \u00e9\u00e8 \u6771\u4eac<|im_end|>\n"
LONG = " ".join(str(number) for number in range(90))  # more than one part of a stream


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"seed": 3} | body)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


def streamed(server: Server, **body: Any) -> dict[int, dict[str, Any]]:
    """What a client assembles of each choice, and the number of events."""
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"seed": 3, "stream": True, **body}, timeout=30
    )
    choices: dict[int, dict[str, Any]] = {}
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        [choice] = json.loads(line[6:])["choices"]
        whole = choices.setdefault(choice["index"], {"text": "", "logprobs": {}, "num_events": 0})
        whole["num_events"] += 1
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return choices


def prompts() -> list[Any]:
    return ["Hi", MARKED, LONG, TOKENIZER.encode(MARKED), [72]]


@pytest.mark.parametrize("prompt", prompts(), ids=["short", "marked", "long", "ids", "one_id"])
def test_echo_with_logprobs_has_prompt_and_output_in_one_list(server: Server, prompt: Any) -> None:
    token_ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    plain = complete(server, prompt=prompt, max_tokens=3, logprobs=2)["choices"][0]
    body = complete(server, prompt=prompt, max_tokens=3, logprobs=2, echo=True)
    [choice] = body["choices"]
    logprobs, count = choice["logprobs"], len(token_ids)
    start = prompt if isinstance(prompt, str) else TOKENIZER.decode(token_ids)
    assert choice["text"] == start + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name][count:] == plain["logprobs"][name]
    assert logprobs["tokens"][:count] == [
        TOKENIZER.token_bytes(token_id).decode(errors="replace") for token_id in token_ids
    ]
    assert logprobs["token_logprobs"][:count] == [None, *(-p / 8 for p in range(1, count))]
    assert logprobs["top_logprobs"][0] is None
    for place, tops in enumerate(logprobs["top_logprobs"][1:count], 1):
        assert next(iter(tops.values())) == 0.0 and len(tops) in (1, 2), place
    offsets = logprobs["text_offset"]
    assert offsets[count:] == [len(start) + o for o in plain["logprobs"]["text_offset"]]
    for token, offset in zip(logprobs["tokens"][:count], offsets[:count], strict=True):
        is_hidden = token.startswith("<|") and not isinstance(prompt, str)
        assert "\ufffd" in token or is_hidden or start.startswith(token, offset), (token, offset)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_stream_adds_up_to_the_whole_answer(server: Server, max_tokens: int) -> None:
    for asked in (
        {"prompt": prompts()[:3]},
        {"prompt": [TOKENIZER.encode(MARKED), [72]], "n": 2},
        {"prompt": LONG, "n": 2},
    ):
        body = asked | {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
        choices, parts = complete(server, **body)["choices"], streamed(server, **body)
        assert len(choices) == len(parts)
        for choice in choices:
            part = parts[choice["index"]]
            assert part["text"] == choice["text"]
            assert part["logprobs"] == choice["logprobs"]
            assert part["finish_reason"] == choice["finish_reason"]
    assert parts[0]["num_events"] > 3, "a long prompt comes in parts"


def test_without_output_the_answer_is_the_prompt(server: Server) -> None:
    body = complete(server, prompt="Hi", echo=True, logprobs=0, max_tokens=0)
    [choice] = body["choices"]
    count = len(TOKENIZER.encode("Hi"))
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert len(choice["logprobs"]["tokens"]) == count and body["usage"]["completion_tokens"] == 0
    [choice] = complete(server, prompt="Hi", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Hi", None)


def test_completions_have_vllms_prompt_logprobs_on_each_choice(server: Server) -> None:
    body = complete(server, prompt=["Hi", MARKED], max_tokens=2, prompt_logprobs=2)
    for choice, prompt in zip(body["choices"], ("Hi", MARKED), strict=True):
        check_vllms_form(choice["prompt_logprobs"], TOKENIZER.encode(prompt))
        assert choice["logprobs"] is None and not choice["text"].startswith(prompt)


def test_chats_have_vllms_prompt_logprobs_on_the_answer(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "prompt_logprobs": 2, "return_token_ids": True}
    body = httpx.post(f"{server.url}/v1/chat/completions", json=asked).json()
    check_vllms_form(body["prompt_logprobs"], body["prompt_token_ids"])
    del asked["prompt_logprobs"]
    body = httpx.post(f"{server.url}/v1/chat/completions", json=asked).json()
    assert "prompt_logprobs" not in body


def check_vllms_form(entries: list[Any], token_ids: list[int]) -> None:
    """null, then by id the token of the prompt with its own rank and the best two."""
    assert len(entries) == len(token_ids) and entries[0] is None
    for place, (token_id, by_id) in enumerate(zip(token_ids, entries, strict=True)):
        if by_id is None:
            continue
        best = {str(place): 1, str(place + 1): 2}
        assert next(iter(by_id)) == str(token_id) and by_id.keys() == {str(token_id), *best}
        if str(token_id) not in best:
            text = TOKENIZER.token_bytes(token_id).decode(errors="replace")
            assert by_id[str(token_id)] == {
                "logprob": -place / 8,
                "rank": 1 + 2 * place,
                "decoded_token": text,
            }
        for other, rank in best.items():
            assert (by_id[other]["rank"], by_id[other]["logprob"]) == (rank, -(rank - 1) / 4)


def test_a_prompt_with_too_many_log_probabilities_is_refused(server: Server) -> None:
    body = {"prompt": [LONG * 3] * 64, "n": 2, "echo": True, "logprobs": 20, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text[:200]
    assert "log probabilities are too many" in answer.json()["error"]["message"]
