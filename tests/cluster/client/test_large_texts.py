"""Large texts are encoded a few at a time, and others do not wait for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.client.requests import LARGE_TEXT_CHARS, MAX_LARGE_TEXTS, RequestBuilder
from cluster.client.tokenizer import Tokenizer
from scheduler.errors import RequestError
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import LIMITS, MODEL, TOKENIZER

LARGE = "a" * (LARGE_TEXT_CHARS + 1)


@pytest.fixture
def builder() -> RequestBuilder:
    return RequestBuilder(MODEL, TOKENIZER, SamplingParams(), LIMITS, 0)


def test_few_large_texts_are_encoded_at_a_time(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most_at_once, lock = 0, 0, threading.Lock()

    def encode(_: Tokenizer, text: str, most: int | None = None) -> list[int]:
        nonlocal running, most_at_once
        with lock:
            running += 1
            most_at_once = max(most_at_once, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(builder.encode, [LARGE] * 8)) == [[1]] * 8
    assert most_at_once == MAX_LARGE_TEXTS


def test_a_small_text_does_not_wait_for_large_ones(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real_encode = threading.Event(), Tokenizer.encode

    def encode(self: Tokenizer, text: str, most: int | None = None) -> list[int]:
        if text == LARGE:
            assert gate.wait(30)
        return real_encode(self, text[:2], most)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with ThreadPoolExecutor(MAX_LARGE_TEXTS) as threads:
        large = [threads.submit(builder.encode, LARGE) for _ in range(MAX_LARGE_TEXTS)]
        assert builder.encode("Hi") == real_encode(TOKENIZER, "Hi")
        assert not any(encoded.done() for encoded in large)
        gate.set()


def test_a_large_text_that_is_refused_makes_room_for_the_next(builder: RequestBuilder) -> None:
    for _ in range(MAX_LARGE_TEXTS + 1):
        with pytest.raises(RequestError, match="cannot be encoded"):
            builder.encode(LARGE + "\ud800")
    assert builder.encode(LARGE)
