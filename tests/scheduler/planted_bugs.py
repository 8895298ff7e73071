"""Every planted bug by name, as the parts to simulate.

A number of simulated seeds means nothing unless planted bugs are found.
"""

from __future__ import annotations

from types import ModuleType

from scheduler.block_manager import BlockManager
from scheduler.engine import Engine
from scheduler.scheduler import Scheduler
from scheduler.suspects import Suspects
from tests.scheduler import planted_block_bugs, planted_rollback_bugs, planted_scheduler_bugs
from tests.scheduler.simulator import Parts


def _planted_in(module: ModuleType) -> dict[str, Parts]:
    """Parts in which each public class that a module defines replaces the class it breaks."""
    planted = {}
    for name, broken in vars(module).items():
        if (
            not isinstance(broken, type)
            or broken.__module__ != module.__name__
            or name.startswith("_")
        ):
            continue
        if issubclass(broken, Scheduler):
            planted[name] = Parts(scheduler=broken)
        elif issubclass(broken, BlockManager):
            planted[name] = Parts(block_manager=broken)
        elif issubclass(broken, Suspects):
            planted[name] = Parts(suspects=broken)
        else:
            assert issubclass(broken, Engine), f"{name} breaks nothing that is simulated"
            planted[name] = Parts(engine=broken)
    return planted


PLANTED = (
    _planted_in(planted_block_bugs)
    | _planted_in(planted_scheduler_bugs)
    | _planted_in(planted_rollback_bugs)
)
