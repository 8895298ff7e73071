"""What is accepted at a time, where several processes count together."""

from __future__ import annotations

import contextlib

import pytest

from cluster.api.admission import Admission, ApiLimits, OpenOutputCounts
from scheduler.errors import OverloadedError


def admissions(num_processes: int, max_open_outputs: int) -> list[Admission]:
    """Those of processes that share their counts."""
    counts = memoryview(bytearray(8 * num_processes)).cast("q")
    found = []
    for place in range(num_processes):
        found.append(Admission(ApiLimits(max_open_outputs=max_open_outputs)))
        found[-1].open_output_counts = OpenOutputCounts(counts, place)
    return found


def test_outputs_of_all_processes_count_against_one_limit() -> None:
    first, second = admissions(2, max_open_outputs=3)
    with first.admit(2), second.admit(1):
        assert (first.num_open_outputs, second.num_open_outputs) == (2, 1)
        for admission in (first, second):
            with pytest.raises(OverloadedError, match="3 outputs are running or waiting, of 3"):
                admission.check_room()
            with pytest.raises(OverloadedError), admission.admit(1):
                pass
    with second.admit(3):
        pass


def test_what_is_refused_takes_no_room() -> None:
    first, second = admissions(2, max_open_outputs=3)
    with first.admit(2):
        with pytest.raises(OverloadedError, match="2 outputs are running"), second.admit(2):
            pass
        assert second.num_open_outputs == 0
        with second.admit(1):
            pass


def test_two_that_take_the_last_room_at_the_same_time_are_never_both_let_in() -> None:
    """The second one counts itself between the first one's count and its look at the others."""
    counts = memoryview(bytearray(16)).cast("q")
    second = OpenOutputCounts(counts, 1)

    class Between(OpenOutputCounts):
        def add(self, num_outputs: int) -> None:
            super().add(num_outputs)
            if num_outputs > 0:
                second.add(1)

    first = Admission(ApiLimits(max_open_outputs=1))
    first.open_output_counts = Between(counts, 0)
    with contextlib.suppress(OverloadedError), first.admit(1):
        raise AssertionError("there are two")
    assert second.num_in_all_processes == 1
