"""What a rank leaves to the process that takes its place."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from workers.memory.lasting import LastingMemory, MemoryCard

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Where the memory of a living rank is; None for what ends with its process. loaded: identifies
    the weights, as in `WorkerReport`.
    """

    weights: MemoryCard | None = None
    cache: MemoryCard | None = None
    loaded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedMemory:
    """The same, open in this process, so that it stays when the rank dies."""

    weights: LastingMemory | None = None
    cache: LastingMemory | None = None
    loaded: str = ""

    @classmethod
    def open(cls, memory: RankMemory) -> InheritedMemory:
        """Open all of it, or nothing if a part is out of reach: the log says why."""
        try:
            return cls(
                weights=LastingMemory.open(memory.weights) if memory.weights else None,
                cache=LastingMemory.open(memory.cache) if memory.cache else None,
                loaded=memory.loaded,
            )
        except OSError as error:
            logger.warning("the memory of a rank cannot be shared: %s", error)
            return cls()
