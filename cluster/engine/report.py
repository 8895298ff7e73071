"""What a started engine reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.limits import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What a client needs to know about a started engine.

    checkpoint: changes when the files of the checkpoint do. seconds: of each phase of the start, by
    name. lines: for the log.
    """

    device: str
    limits: SchedulerLimits
    seconds: dict[str, float]
    lines: tuple[str, ...]
    checkpoint: str = ""
