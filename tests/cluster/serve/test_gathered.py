"""Counters of several processes, of which some have ended or do not answer."""

from __future__ import annotations

from cluster.api.metrics import MetricFamily, merge
from cluster.serve.gathered import (
    MAX_REMEMBERED_PROCESSES,
    GatheredCounters,
    counters_of_engine,
)
from scheduler.messages import EngineStats


class Process:
    """A process that has answered some requests."""

    def __init__(self, name: str, num_answered: int = 0) -> None:
        self.num_answered = num_answered
        self.counters = GatheredCounters(name, self.families)

    def families(self) -> list[MetricFamily]:
        answered, open_now = float(self.num_answered), 1.0
        return [
            MetricFamily(
                name="answered", kind="counter", help="", samples=[("answered", (), answered)]
            ),
            MetricFamily(name="open", kind="gauge", help="", samples=[("open", (), open_now)]),
        ]

    def report(self, *others: Process) -> tuple[float, float]:
        """What it says of all, if these others and itself answer: (answered, open)."""
        known = [process.counters.known_counters() for process in (self, *others)]
        values = {f.name: f.samples[0][2] for f in merge(self.counters.families_of_all(known))}
        return values["answered"], values["open"]


def test_whoever_is_asked_gives_the_sum() -> None:
    first, second = Process("a", 3), Process("b", 4)
    assert first.report(second) == second.report(first) == (7, 2)


def test_what_has_been_reported_of_a_process_stays_when_it_ends_but_not_what_it_has_open() -> None:
    first, second, third = Process("a", 3), Process("b", 4), Process("c", 5)
    assert first.report(second, third) == (12, 3)
    third.num_answered = 6
    assert second.report(first, third) == (13, 3), "known to the second only"
    assert first.report(second) == (13, 2), "the first one asks it"
    assert second.report(first) == (13, 2)


def test_a_process_that_answers_again_is_counted_once() -> None:
    first, second = Process("a", 3), Process("b", 4)
    assert first.report(second) == (7, 2)
    assert first.report() == (7, 1)
    second.num_answered = 5
    assert first.report(second) == (8, 2)


def test_a_process_that_takes_the_place_of_another_adds_to_what_that_one_had() -> None:
    first, second = Process("a", 3), Process("b", 4)
    first.report(second)
    assert first.report(Process("c", 1)) == (8, 2)


def test_the_sums_of_several_engines_do_not_fall_when_one_or_its_driver_is_lost() -> None:
    api = Process("a").counters

    def report(**steps_by_driver: int) -> tuple[float, float]:
        """Steps and running sequences that are reported when these drivers answer."""
        engines = [
            EngineStats(
                num_running=1,
                num_waiting=0,
                num_free_blocks=0,
                num_blocks=0,
                num_steps=num_steps,
                num_preemptions=0,
                num_prompt_tokens=0,
                num_cached_tokens=0,
                driver_id=driver_id,
            )
            for driver_id, num_steps in steps_by_driver.items()
        ]
        families = merge(api.families_of_all([counters_of_engine(stats) for stats in engines]))
        values = {name: value for f in families for name, _, value in f.samples}
        running = values.get("eagleray_num_requests_running", 0)
        return values["eagleray_steps_total"], running

    assert report(first=1450, second=2855) == (4305, 2)
    assert report(first=1450) == (4305, 1), "an engine is lost, or does not answer"
    assert report() == (4305, 0)
    assert report(first=1460, third=5) == (4320, 2), "the next driver begins at 0"


def test_only_so_many_processes_are_remembered() -> None:
    first = Process("a")
    for number in range(3 * MAX_REMEMBERED_PROCESSES):
        first.report(Process(f"lost {number}", 1))
    assert len(first.counters.known_counters().other_families) <= MAX_REMEMBERED_PROCESSES + 1
