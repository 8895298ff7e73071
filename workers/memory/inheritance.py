"""What a rank leaves to the process that takes its place."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from workers.memory.gpu import GpuMemoryHandle, SharedGpuMemory
from workers.memory.lasting import MemoryHandle, SharedMemfd

LastingMemory = SharedMemfd | SharedGpuMemory
LastingMemoryHandle = MemoryHandle | GpuMemoryHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryHandles:
    """Where the memory of a living rank is; None for what ends with its process.
    checkpoint_hash, weights_hash: as in `WorkerReport`.
    """

    weights: LastingMemoryHandle | None = None
    cache: LastingMemoryHandle | None = None
    checkpoint_hash: str = ""
    weights_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedMemory:
    """The same, open in this process, so that it stays when the rank dies."""

    weights: LastingMemory | None = None
    cache: LastingMemory | None = None
    checkpoint_hash: str = ""
    weights_hash: str = ""

    @classmethod
    def open(cls, memory: RankMemoryHandles) -> InheritedMemory:
        """Open all of it, or nothing if a part is out of reach: the log says why."""
        try:
            weights, cache = (
                None if handle is None else _open(handle)
                for handle in (memory.weights, memory.cache)
            )
        except OSError as error:
            logger.warning("the memory of a rank cannot be shared: %s", error)
            return cls()
        return cls(
            weights=weights,
            cache=cache,
            checkpoint_hash=memory.checkpoint_hash,
            weights_hash=memory.weights_hash,
        )


def handle_of(memory: LastingMemory | None) -> LastingMemoryHandle | None:
    """Where other processes find it; None without memory, or if they cannot: the log says why."""
    try:
        return None if memory is None else memory.handle
    except OSError as error:
        logger.warning("the memory of a rank cannot be shared: %s", error)
        return None


def _open(handle: LastingMemoryHandle) -> LastingMemory:
    if isinstance(handle, GpuMemoryHandle):
        return SharedGpuMemory.open(handle)
    return SharedMemfd.open(handle)
