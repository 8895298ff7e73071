"""What the benchmark of lost ranks makes of the tokens that come; `tests/cluster` kills ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lose_ranks import Streams
from scheduler.params import SamplingParams


def streams_of(*came_s: list[float]) -> Streams:
    streams = Streams.__new__(Streams)
    streams.came_s = [*came_s]
    return streams


def test_tokens_on_their_way_and_a_later_pause_are_not_the_next_token() -> None:
    before, after = [8.0, 9.0, 9.9], [10.6, 10.61, 13.0]
    streams = streams_of([*before, *after], [*before, 10.02, 10.07, *after])
    assert streams.silences_s(10.0) == [pytest.approx((0.7, 0.6)), pytest.approx((0.53, 0.6))]


def test_a_stream_that_fails_or_lacks_tokens_is_told() -> None:
    def stream(prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        yield SimpleNamespace(token_ids=[1, 2])
        if prompt == [7]:
            raise RuntimeError("the engine is dead")

    llm: Any = SimpleNamespace(stream=stream)
    Streams(llm, [[5], [6]], 2).join()
    with pytest.raises(SystemExit, match="has not ended"):
        Streams(llm, [[5], [6]], 3).join()
    with pytest.raises(SystemExit, match="a stream failed: the engine is dead"):
        Streams(llm, [[5], [7]], 2).join()
