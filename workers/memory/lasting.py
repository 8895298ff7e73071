"""Memory that outlives the process that made it: it stays while any process has it open.

A file without a name (a memfd), which other processes of this machine and user open through /proc.
When the last one ends, the kernel frees it, so nothing is left behind, whoever dies in which order.
Only Linux has it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.parallel.segment import host_id

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCard:
    """Where other processes find the memory, as long as this one lives. host: `host_id` of the
    processes that can; name: its name in the kernel's lists; path: of the open file.
    """

    host: str
    name: str
    path: str
    num_bytes: int


class LastingMemory:
    """One such file, open in this process."""

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._name = name

    @classmethod
    def create(cls, name: str, num_bytes: int) -> LastingMemory:
        """New memory, zero and not yet taken from the machine: as anywhere, a page is when it is
        first written. Raises `OSError`.
        """
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, name, num_bytes)

    @classmethod
    def open(cls, card: MemoryCard) -> LastingMemory:
        """The memory of another process. Raises `OSError` if it is out of reach or gone."""
        if card.host != host_id():
            raise OSError("it is on another host or in another container")
        descriptor = os.open(card.path, os.O_RDWR | os.O_CLOEXEC)
        kernel_name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        num_bytes = os.fstat(descriptor).st_size
        # Another process may have the number by now.
        if kernel_name != f"/memfd:{card.name} (deleted)" or num_bytes != card.num_bytes:
            os.close(descriptor)
            raise OSError(f"{card.path} is {kernel_name} of {num_bytes} bytes, not {card}")
        return cls(descriptor, card.name, num_bytes)

    @property
    def card(self) -> MemoryCard:
        """For others, who have to open it while this process lives."""
        return MemoryCard(
            host=host_id(),
            name=self._name,
            path=f"/proc/{os.getpid()}/fd/{self.descriptor}",
            num_bytes=self.num_bytes,
        )

    def tensor(self) -> Tensor:
        """All bytes, uint8, shared with every process that has the memory open."""
        import torch  # here, because a process opens memory before it has imported torch

        return torch.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=torch.uint8)


def is_supported() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")
