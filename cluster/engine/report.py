"""What a started engine reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.limits import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What a client needs to know about a started engine.

    seconds: the time of each phase of the start, by name. log_lines: for the log of its owner.
    checkpoint_id: differs if the files of the checkpoint have changed.
    """

    device: str
    limits: SchedulerLimits
    seconds: dict[str, float]
    log_lines: tuple[str, ...]
    checkpoint_id: str = ""
