"""How the ranks of an epoch ended, and so whether the memory that they left can be trusted."""

from __future__ import annotations

import logging

from cluster.ranks.causes import DeathWatch, may_have_corrupted_memory
from cluster.ranks.group import RankGroup
from cluster.ranks.processes import processes_on_this_node

EXIT_NOTICE_LIMIT_S = 1.0  # for the raylet to notice that a process of its node has ended

logger = logging.getLogger("eagleray.driver")


class GroupDeathWatch:
    """Watches a group's ranks on this node, if it has pidfds. To be created while they live."""

    def __init__(self, group: RankGroup) -> None:
        local_processes = processes_on_this_node([handle.process for handle in group.ranks])
        self._death_watches = [DeathWatch(process) for process in local_processes.values()]
        self._num_unwatched_ranks = len(group.ranks) - len(local_processes)

    def distrust_reason(self, *reasons: str) -> str:
        """Why the memory of the ranks, whose processes have ended, cannot be trusted; empty if it
        can. `reasons`: why the group was given up. May be asked once.
        """
        endings = [watch.ending(EXIT_NOTICE_LIMIT_S) for watch in self._death_watches]
        for watch in self._death_watches:
            watch.close()
        for crash_report in filter(None, (ending.crash_report for ending in endings)):
            logger.error("the crash report of a rank: %s", crash_report)
        for reason in filter(may_have_corrupted_memory, reasons):
            return reason.split("\n")[0]
        if self._num_unwatched_ranks:
            return "nobody has seen how some ranks ended"
        texts = [ending.text for ending in endings if ending.may_have_written_anywhere]
        return f"a rank ended by {texts[0]}" if texts else ""
