"""The figures of streams over HTTP."""

from __future__ import annotations

import pytest

from benchmarks.http_load import Timings


def test_streams_of_one_event_have_no_figures() -> None:
    timings = Timings(total_s=1.0, num_tokens=40, first_s=[1.0])
    with pytest.raises(RuntimeError, match="have no text"):
        timings.line()
    timings.between_s.append(0.1)
    assert timings.line()["inter_token_ms_p50"] == 100
