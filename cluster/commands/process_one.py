"""For a command that runs as the first process of a container: without `docker run --init` or the
like, nobody else reaps orphaned processes, and signals without a handler are lost.
"""

from __future__ import annotations

import os
import signal
import sys

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def leave_process_one() -> None:
    """If this is process 1, continue in a child. Process 1 then only forwards signals, reaps
    processes, and ends with the child's exit code. Call before any thread has started.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)
    child_pid = os.fork()
    if child_pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED_SIGNALS)
        return
    has_terminal = sys.stdin.isatty()
    for signal_number in _FORWARDED_SIGNALS:
        # A terminal sends Ctrl-C to the child as well.
        if not (has_terminal and signal_number in (signal.SIGINT, signal.SIGQUIT)):
            signal.signal(signal_number, lambda signal_number, _: os.kill(child_pid, signal_number))
        else:
            signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED_SIGNALS)
    while True:
        pid, wait_status = os.wait()
        if pid == child_pid:
            exit_code = os.waitstatus_to_exitcode(wait_status)
            os._exit(exit_code if exit_code >= 0 else 128 - exit_code)
