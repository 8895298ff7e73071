"""The memory that CPU ranks of one host share: made by the first of them, opened by the others.

Nothing is left behind, whichever process dies: on Linux the segment has no name (a memfd, which the
others open through /proc); elsewhere its file is removed as soon as every rank has mapped it. It is
written in full before it is mapped, so that a lack of memory is an error there and not a SIGBUS
later. The *info* of a rank is what it tells its peers about itself: host, process id, and from the
first rank of the host the path and token of the segment.
"""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from pathlib import Path
from typing import Any


def create(num_bytes: int, token: str) -> tuple[int, str]:
    """(file descriptor, path) of a new segment: the token, then zeros. Raises `OSError`."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("eagleray-all-reduce")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="eagleray-all-reduce-")
    try:
        # The zeros are written too: a hole gets its memory only when it is touched.
        if os.write(descriptor, token.encode().ljust(num_bytes, b"\0")) < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.close(descriptor)
        remove(path)
        raise
    return descriptor, path


def remove(path: str) -> None:
    """Remove a segment that has a name, once every rank has mapped it."""
    if not path.startswith("/proc/"):
        Path(path).unlink()


def open_segment(first_rank_info: list[Any], own_info: list[Any]) -> int:
    """The file descriptor of the first rank's segment, found by its info and ours. Raises `OSError`
    if it is out of reach.
    """
    if own_info[0] != first_rank_info[0]:
        raise OSError("it runs on another host or in another container")
    path, token = first_rank_info[2:]
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(descriptor, len(token), 0) != token.encode():
        os.close(descriptor)
        raise OSError(f"{path} is not the segment of the first rank")
    return descriptor


def host_id() -> str:
    """A text that is equal for processes that see each other in /proc: those with the same kernel
    and namespace of process ids.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()
