"""Memory that outlives the process that made it: it stays while any process has it open.

A file without a name (a memfd), which other processes of this machine and user open through /proc.
When the last one ends, the kernel frees it, so nothing is left behind, whoever dies in which order.
Only Linux has it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.memory.huge_pages import allocate, map_aligned
from workers.parallel.segment import host_id

if TYPE_CHECKING:
    from torch import Tensor

    from workers.progress import Progress


# Taken at a time: after each piece the others see less memory, and 6 to 400 ms have passed.
_PIECE_BYTES = 64 * 2**20
_CGROUP_DIR = Path("/sys/fs/cgroup")  # in a container, its own
# Folder, files of the limit and of what is used, and pages of files that the kernel may take back,
# in version 2 and 1 of control groups.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """Where other processes find the memory, as long as this one lives. host: `host_id` of the
    processes that can; name: its name in the kernel's lists; path: of the open file; identity: the
    same for all who have this memory open, the inode.
    """

    host: str
    name: str
    path: str
    num_bytes: int
    identity: int


class SharedMemfd:
    """One such file, open in this process until `close`, or until nobody refers to this object."""

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._name = name
        self._address = 0  # of the tensor
        self._makes_huge = True  # pages, when it grows
        # From then on, this process keeps the memory only as long as a tensor of it.
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, name: str, num_bytes: int, progress: Progress | None = None) -> SharedMemfd:
        """New memory, all zero. It is taken from the machine at once, so that a lack is an error
        here and not the end of a process later. `progress` counts the bytes. Raises `OSError`.
        """
        memory = cls(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), name, 0)
        try:
            memory.grow(num_bytes, progress)
        except OSError:
            memory.close()
            raise
        return memory

    def grow(self, num_bytes: int, progress: Progress | None = None) -> None:
        """Make it so long, before others open it: the new bytes are zero. Raises as `create`, and
        then it is as long as before.
        """
        try:
            start = self.num_bytes
            while start < num_bytes:
                # Asked for more, the kernel would take all there is and then end processes. Other
                # ranks take memory at the same time, so what was enough may be no more.
                if (missing := num_bytes - start) > (available := available_bytes()):
                    message = f"only {available} bytes of memory are available, not {missing}"
                    raise OSError(errno.ENOMEM, message)
                # Pieces end where huge pages do.
                end = min(num_bytes, (start // _PIECE_BYTES + 1) * _PIECE_BYTES)
                if start % _PIECE_BYTES == 0:
                    self._makes_huge = True  # in each piece, the first is tried
                self._makes_huge = allocate(self.descriptor, start, end, self._makes_huge)
                if progress is not None:
                    progress.allocated_bytes += end - start
                start = end
        except OSError:
            os.ftruncate(self.descriptor, self.num_bytes)
            raise
        self.num_bytes = num_bytes

    @classmethod
    def open(cls, handle: MemoryHandle) -> SharedMemfd:
        """The memory of another process. Raises `OSError` if it is out of reach or gone."""
        if handle.host != host_id():
            raise OSError("it is on another host or in another container")
        descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        kernel_name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        num_bytes = os.fstat(descriptor).st_size
        inode = os.fstat(descriptor).st_ino
        # Another process may have the number by now.
        if (kernel_name, num_bytes, inode) != (
            f"/memfd:{handle.name} (deleted)",
            handle.num_bytes,
            handle.identity,
        ):
            os.close(descriptor)
            raise OSError(f"{handle.path} is {kernel_name} of {num_bytes} bytes, not {handle}")
        return cls(descriptor, handle.name, num_bytes)

    @property
    def handle(self) -> MemoryHandle:
        """For others, who have to open it while this process lives."""
        return MemoryHandle(
            host=host_id(),
            name=self._name,
            path=f"/proc/{os.getpid()}/fd/{self.descriptor}",
            num_bytes=self.num_bytes,
            identity=os.fstat(self.descriptor).st_ino,
        )

    def tensor(self) -> Tensor:
        """All bytes, uint8, shared with every process that has the memory open. They can be read,
        and written after `allow_writing`. Call it once: it maps every page, so that no step has to.
        """
        import torch  # here, because a process opens memory before it has imported torch

        pages = map_aligned(
            self.descriptor, self.num_bytes, flags=mmap.MAP_SHARED, protection=mmap.PROT_READ
        )
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self._address = tensor.data_ptr()
        tensor[:: mmap.PAGESIZE].sum()
        return tensor

    def allow_writing(self) -> None:
        """Let this process write through `tensor`, which is in use; until then, a write ends it
        with SIGSEGV.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self._address)
        num_bytes = ctypes.c_size_t(self.num_bytes)
        if libc.mprotect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")


def physical_bytes() -> int:
    """Memory of this machine, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def available_bytes() -> int:
    """What the machine has, and the container that this process is in, if that has a limit."""
    available_amounts = [1024 * _read_number("MemAvailable:", Path("/proc/meminfo"))]
    for folder, limit_file, usage_file, reclaimable_fields in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # there is no limit, which some systems call "max"
            limit_bytes, used_bytes = (
                int((_CGROUP_DIR / folder / name).read_text()) for name in (limit_file, usage_file)
            )
            available_amounts.append(limit_bytes - used_bytes)
            statistics = _CGROUP_DIR / folder / "memory.stat"
            available_amounts[-1] += sum(
                _read_number(name, statistics) for name in reclaimable_fields
            )
    return min(available_amounts)


def _read_number(name: str, path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise OSError(f"{path} does not say {name}")


def has_memfds() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")
