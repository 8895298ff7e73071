"""The first process of a container, as which a command may run: without `docker run --init` or the
like, nobody else ends the processes that lost their parent, and signals without a handler are lost.
"""

from __future__ import annotations

import os
import signal
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def leave_process_one() -> None:
    """Go on in a child if this is process 1, which then only passes signals on, reaps what ends,
    and ends with the child and its exit code. Call before anything has started threads.
    """
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    for number in _PASSED_ON:
        # A terminal sends Ctrl-C to the child as well.
        if not (has_terminal and number in (signal.SIGINT, signal.SIGQUIT)):
            signal.signal(number, lambda number, _: os.kill(child, number))
        else:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
