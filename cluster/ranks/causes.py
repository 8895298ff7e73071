"""Why a process ended, and whether memory that it shared can be trusted after it.

    killed    by a signal from outside: SIGTERM, SIGHUP, SIGINT, SIGQUIT, or SIGKILL of a fence or
              of the OOM killer
    exited    by itself, with an exit code: `os._exit`, or an exception that nobody caught
    crashed   by any other signal, such as SIGSEGV or SIGABRT: it may have written anywhere
    unknown   nothing tells; counts as a crash

Ranks are children of the raylet, and only a parent can wait for a process. So there are two other
sources, of which one is enough, and a crash that either of them tells is one:

The kernel keeps the status of a process for those who opened a pidfd while it lived, and tells it
when the parent has read it. Linux 6.15 or later.

Last words: a process that crashes says so in its mark (a memory file, see `mark_this_process`),
which outlives it in whoever has it open. On older kernels, a process that promised to speak and
died in silence counts as killed. Some crashes are silent: if the stack of a thread other than the
main one overflows (nothing but that stack was written); if not even the handler can run, because
thread-local storage is destroyed; and SIGTRAP and SIGSYS.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import select
import signal
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from cluster.ranks.processes import ProcessId, has_pidfds, open_pidfd
from scheduler.errors import DIFFERENT_TOKENS_PHRASE, OTHER_OPERATION_PHRASE

SIGNALS_FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
SIGNALS_FROM_OUTSIDE |= {signal.SIGTERM, signal.SIGKILL}

# linux/pidfd.h: the first published `struct pidfd_info`, with the mask first and the status last
PIDFD_INFO = struct.Struct("=QQ11Ii")
PIDFD_INFO_EXIT = 1 << 3
PIDFD_GET_INFO = 0xC000_0000 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11

CRASH_REPORT_PROMISE = b"If this process crashes, it says so here.\n"
CRASH_PREFIX = b"Fatal Python error: "  # how `faulthandler` begins

CORRUPTING_ERROR_PATTERN = re.compile(
    "AcceleratorError|CUDA error|CUDA driver error|Triton Error|Cuda failure|unhandled ?cuda ?error"
    "|cudaError|CUDA_ERROR_|CUBLAS_STATUS_|CUDNN_STATUS_"
    r"|\bSystemError"  # the interpreter finds itself in an impossible state
    f"|{DIFFERENT_TOKENS_PHRASE}|{OTHER_OPERATION_PHRASE}",  # ranks contradict each other
    re.IGNORECASE,
)


class EndingKind(Enum):
    """See the table at the top."""

    KILLED = "killed"
    EXITED = "exited"
    CRASHED = "crashed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended. text: for a message, as "SIGKILL" or "exit code 1". crash_report: of a
    crash, the Python stack of each thread.
    """

    kind: EndingKind
    text: str
    crash_report: str = ""

    @property
    def may_have_written_anywhere(self) -> bool:
        return self.kind in (EndingKind.CRASHED, EndingKind.UNKNOWN)


def enable_crash_report(mark_fd: int) -> None:
    """Promise that this process says in its mark when it crashes. For one that is watched: these
    words reach no log by themselves.

    Replaces the handlers that Ray installs, and thus Ray's report. They allocate memory, so if the
    heap is destroyed, they hang before a handler that was there earlier gets to write.
    """
    if mark_fd < 0:
        return
    faulthandler.disable()  # enabling what is enabled would leave Ray's handlers in front
    faulthandler.enable(file=os.fdopen(os.dup(mark_fd), "w"), all_threads=True)
    os.write(mark_fd, CRASH_REPORT_PROMISE)


class DeathWatch:
    """Tells how a process of this node ended. To be created while it lives, by another process of
    its engine: one that holds a mark open counts as marked (`end_marked_processes`). Keeps two
    files open. Without pidfds, every ending is unknown.
    """

    def __init__(self, process: ProcessId) -> None:
        self._pidfd = self._mark_fd = -1
        if not has_pidfds():
            return
        with suppress(OSError):
            # Not blocking, because by now this may be another process with other files.
            mark_path = f"/proc/{process.pid}/fd/{process.mark_fd}"
            self._mark_fd = os.open(mark_path, os.O_RDONLY | os.O_NONBLOCK)
        # After that: if the process still has its number, it had it above.
        pidfd = open_pidfd(process.pid, process.start_ticks)
        if pidfd is None:
            self.close()
        else:
            self._pidfd = pidfd

    def close(self) -> None:
        """Close the files; from then on, the ending is unknown."""
        for descriptor in {self._pidfd, self._mark_fd} - {-1}:
            os.close(descriptor)
        self._pidfd = self._mark_fd = -1

    def ending(self, limit_s: float) -> Ending:
        """How it ended. Waits up to `limit_s` until its parent has noticed. May be asked again."""
        deadline_s = time.monotonic() + limit_s
        if self._pidfd == -1:
            return Ending(kind=EndingKind.UNKNOWN, text="it was not watched when it ended")
        if not self._wait(select.POLLIN, deadline_s):
            return Ending(kind=EndingKind.UNKNOWN, text=f"it did not end within {limit_s:g} s")
        status = None
        with suppress(OSError):  # a kernel that does not tell
            status = _status(self._pidfd)
            if status is None and self._wait(0, deadline_s):
                status = _status(self._pidfd)
        return _ending(status, self._crash_report())

    def _wait(self, events: int, deadline_s: float) -> bool:
        """Wait for the end (`POLLIN`), or for the parent to have noticed (no events)."""
        poller = select.poll()
        poller.register(self._pidfd, events)
        return bool(poller.poll(1e3 * max(0.0, deadline_s - time.monotonic())))

    def _crash_report(self) -> str | None:
        """What the process said of its crash, "" if it said nothing; None without a promise."""
        if self._mark_fd == -1:
            return None
        text = os.pread(self._mark_fd, os.fstat(self._mark_fd).st_size, 0)
        if CRASH_REPORT_PROMISE not in text:
            return None
        report_start = text.find(b"\n" + CRASH_PREFIX)
        return "" if report_start == -1 else text[report_start:].decode(errors="replace").strip()


def _status(pidfd: int) -> int | None:
    """The status of a process, as of `waitpid`; None before its parent has read it. Raises
    `OSError` if this kernel does not tell.
    """
    info = bytearray(PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    mask, *_, status = PIDFD_INFO.unpack(info)
    return int(status) if mask & PIDFD_INFO_EXIT else None


def _ending(status: int | None, crash_report: str | None) -> Ending:
    """`status`: None if the kernel did not tell. `crash_report`: see `_crash_report`."""
    status_text = "" if status is None else _status_text(status)
    if crash_report:  # even if it was killed later, because its crash hung
        crash = crash_report.splitlines()[0].removeprefix(CRASH_PREFIX.decode())
        text = f"{crash}, {status_text}" if status_text else crash
        return Ending(kind=EndingKind.CRASHED, text=text, crash_report=crash_report)
    if status is not None:
        kind = EndingKind.EXITED
        if os.WIFSIGNALED(status):
            is_from_outside = os.WTERMSIG(status) in SIGNALS_FROM_OUTSIDE
            kind = EndingKind.KILLED if is_from_outside else EndingKind.CRASHED
        return Ending(kind=kind, text=status_text)
    if crash_report is not None:
        return Ending(kind=EndingKind.KILLED, text="killed, or ended by itself, without a crash")
    return Ending(kind=EndingKind.UNKNOWN, text="neither the kernel nor the process told")


def _status_text(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:  # a real-time signal
        return f"signal {os.WTERMSIG(status)}"


def may_have_corrupted_memory(reason: str) -> bool:
    """Whether the error that a living rank reports, with its class, means that the memory of the
    ranks cannot be trusted: an error of the device, or of the interpreter, or ranks that contradict
    each other. Other exceptions, no room, a peer that is gone: no.
    """
    return CORRUPTING_ERROR_PATTERN.search(reason) is not None
