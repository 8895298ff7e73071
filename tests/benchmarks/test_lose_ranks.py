"""What the benchmark of lost ranks makes of tokens that came: real kills are in `tests/cluster`."""

from __future__ import annotations

import pytest

from benchmarks.http_load import Timings
from benchmarks.lose_ranks import Streams


def streams_of(*came_s: list[float]) -> Streams:
    streams = Streams.__new__(Streams)
    streams.came_s = [*came_s]
    return streams


def test_tokens_on_their_way_and_a_later_pause_are_not_the_next_token() -> None:
    before, after = [8.0, 9.0, 9.9], [10.6, 10.61, 13.0]
    assert streams_of([*before, *after], [*before, 10.02, 10.07, *after]).silences_s(
        10.0
    ) == pytest.approx([0.6, 0.6])


def test_streams_of_one_event_have_no_figures() -> None:
    timings = Timings(total_s=1.0, num_tokens=40, first_s=[1.0])
    with pytest.raises(RuntimeError, match="have no text"):
        timings.line()
    timings.between_s.append(0.1)
    assert timings.line()["inter_token_ms_p50"] == 100
