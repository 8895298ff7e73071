"""The counters of all processes of the API and of several engines, whichever process is asked, also
of those that have ended.

A sum must not fall when a process ends: whoever reads it would take that for a restart, and count
the rest again. So each process remembers what it has read of the others, and tells that with its
own. What has once been reported is known to whoever reported it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.api.metrics import MetricFamily, engine_families
from scheduler.messages import EngineStats

MAX_REMEMBERED_PROCESSES = 64  # processes that have ended, or do not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCounters:
    """What one process knows: its own families, gauges too, and those of other processes by id.
    process_id: Ray Serve's of the replica, or the id of an engine's driver.
    """

    process_id: str
    own_families: list[MetricFamily]
    other_families: dict[str, list[MetricFamily]]


class GatheredCounters:
    """What one process remembers of the others. Used from one event loop only."""

    def __init__(
        self, process_id: str, collect_own_families: Callable[[], list[MetricFamily]]
    ) -> None:
        self._process_id = process_id
        self._collect_own_families = collect_own_families
        self._other_families: dict[str, list[MetricFamily]] = {}

    def known_counters(self) -> ProcessCounters:
        """What to tell the process that is asked for all."""
        return ProcessCounters(
            process_id=self._process_id,
            own_families=self._collect_own_families(),
            other_families=self._other_families,
        )

    def families_of_all(self, answers: list[ProcessCounters]) -> list[list[MetricFamily]]:
        """The families of each process, from the answers of those that gave one. Of the others
        there is what only counts up, as it was last known.
        """
        answered_families = {answer.process_id: answer.own_families for answer in answers}
        answered_families[self._process_id] = self._collect_own_families()
        lost_families: dict[str, list[MetricFamily]] = {}
        for families_by_process in (self._other_families, *(a.other_families for a in answers)):
            for process_id, families in families_by_process.items():
                if process_id not in answered_families:
                    known_families = lost_families.get(process_id, [])
                    lost_families[process_id] = max(known_families, families, key=_total)
        remembered_families = dict(list(lost_families.items())[-MAX_REMEMBERED_PROCESSES:])
        for process_id, families in answered_families.items():
            if process_id != self._process_id:
                remembered_families[process_id] = [f for f in families if f.kind != "gauge"]
        self._other_families = remembered_families
        return [*answered_families.values(), *lost_families.values()]


def counters_of_engine(stats: EngineStats) -> ProcessCounters:
    """The counters of one of several engines. They begin at 0 with each driver."""
    return ProcessCounters(
        process_id=stats.driver_id, own_families=engine_families(stats), other_families={}
    )


def _total(families: list[MetricFamily]) -> float:
    """Larger for the later of two states of one process: none of its counters falls."""
    return sum(value for family in families for _, _, value in family.samples)
