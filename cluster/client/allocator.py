"""How a process gets its memory from the operating system, and gives it back: by glibc's calls.
Other C libraries do not have them, or do not need them.
"""

from __future__ import annotations

import ctypes

LARGE_BLOCK_BYTES = 2**20
_M_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def return_large_allocations() -> None:
    """From now on, have every block of a MiB or more returned once it is freed.

    glibc does so at first, but after the first such block that is freed, it keeps all that are no
    larger, up to 32 MiB, in one heap per thread. There they leave holes between small blocks: after
    270 large bodies, one at a time, a process had 74 MiB more than before, and with this 14.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def return_freed_memory() -> None:
    """Return the pages that hold only small blocks that have been freed."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
