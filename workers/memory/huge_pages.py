"""Memory files in huge pages, of which a processor remembers where more of the memory lies: a
decode step, which reads all weights, takes 6 to 29% longer in small pages than in huge ones, and
attention over a cache 6 to 10%. A process that ends unmaps a GiB in 0.02 s instead of 0.07.

Systems seldom give huge pages to memory files by themselves, but the kernel makes one of a file's
small pages on request (MADV_COLLAPSE, since Linux 6.1), even if all but one of these are missing
yet. Taking memory in this way, before anything is written, takes less time than in small pages.
But where a hypervisor has taken back what was free, a huge page takes 5 to 14 ms; small ones, of
which such a system often has others, do not. There, small pages become huge while nothing else is
to be done. All processes that map the file use huge pages, if their mapping is aligned as
`map_aligned` does it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2**21  # on x86-64, and on ARM with pages of 4 KiB
_SLOW_PAGE_S = 0.002  # of processor time; otherwise a page takes 0.1 ms
_BYTES_WHEN_IDLE = 4 * HUGE_PAGE_BYTES  # what a request may have to wait for
_CHECK_PERIOD_S = 0.25
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # not in Python's mmap


def map_aligned(descriptor: int, num_bytes: int, *, flags: int, protection: int) -> Any:
    """Map the start of a file, at the address of a huge page. flags, protection: `mmap.MAP_*` and
    `mmap.PROT_*`. Returns an object with a buffer of the bytes, which stay mapped while it, or a
    tensor or an array of it, is in use. Raises `OSError`.
    """
    # Room for the mapping at an aligned address; the mapping takes its place, and ends with it.
    reservation = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE, 0)
    address = np.frombuffer(reservation, np.uint8).ctypes.data
    address += -address % HUGE_PAGE_BYTES
    libc = _libc()
    mapped_address = libc.mmap(address, num_bytes, protection, flags | _MAP_FIXED, descriptor, 0)
    if mapped_address != address:
        raise OSError(ctypes.get_errno(), "mmap")
    # By its address, because torch warns of memory that it may not write.
    pages: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    pages.reservation = reservation
    return pages


def allocate(descriptor: int, start: int, end: int, makes_huge: bool = True) -> bool:
    """Take memory for bytes `start` to `end` of a memory file, none of which is there yet, as
    `os.posix_fallocate` does, and raise as it does; if `makes_huge`, in huge pages where the system
    makes them. Returns `makes_huge`, but False if the first took long: then all others are small.
    """
    huge_start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    huge_end = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if makes_huge and huge_end > huge_start:
        os.ftruncate(descriptor, end)
        for offset in range(huge_start, huge_end, HUGE_PAGE_BYTES):
            os.posix_fallocate(descriptor, offset, 1)  # a small page, of which one can be made
        pages = map_aligned(descriptor, end, flags=mmap.MAP_PRIVATE, protection=mmap.PROT_READ)
        address = ctypes.addressof(pages) + huge_start
        start_s = time.thread_time()
        _libc().madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        makes_huge = time.thread_time() - start_s < _SLOW_PAGE_S
        num_other_bytes = huge_end - huge_start - HUGE_PAGE_BYTES
        if makes_huge and num_other_bytes:
            # In one call: each waits for every core.
            _libc().madvise(address + HUGE_PAGE_BYTES, num_other_bytes, _MADV_COLLAPSE)
    # All that is not there, also where huge pages were not made.
    os.posix_fallocate(descriptor, start, end - start)
    return makes_huge


def collapse_when_idle(
    descriptor: int, num_bytes: int, is_idle: Callable[[], bool], stop_event: threading.Event
) -> None:
    """Make the small pages of a memory file huge, for every process that maps it, a few at a time
    whenever there is nothing else to do: `is_idle` is asked four times a second. The contents stay
    the same, and may be used meanwhile; each process maps a page again when it next uses it.
    Returns early once `stop_event` is set, or where the system makes no huge pages. Raises
    `OSError`.
    """
    # Private, because a sealed file may have no shared mapping before Linux 6.7.
    pages = map_aligned(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, protection=mmap.PROT_READ)
    address, end = ctypes.addressof(pages), num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for start in range(0, end, _BYTES_WHEN_IDLE):
        may_go_on = False
        while not may_go_on:
            if stop_event.wait(_CHECK_PERIOD_S):
                return
            may_go_on = is_idle()
        piece_bytes = min(_BYTES_WHEN_IDLE, end - start)
        has_failed = _libc().madvise(address + start, piece_bytes, _MADV_COLLAPSE)
        if has_failed and ctypes.get_errno() == errno.EINVAL:
            return


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, integer, integer, integer, ctypes.c_long]
    libc.madvise.argtypes = [pointer, size, integer]
    return libc


def round_up(num_bytes: int, multiple: int) -> int:
    """The next multiple."""
    return -(-num_bytes // multiple) * multiple
