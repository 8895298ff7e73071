"""Runs a program with the processor time that others leave, and prints what it said once it has
ended: `python -m tests.in_background PROGRAM ...`.

It gets a session of its own, because Linux may divide the processor among sessions first (`man 7
sched`, autogroups), and a process's niceness counts only beside those of its own session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

NICENESS = 10  # a tenth of what others get, so that limits of seconds hold
END_S = 30.0


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            sys.argv[1:], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            os.setpriority(os.PRIO_PGRP, process.pid, NICENESS)
            with suppress(OSError):  # there are none, or one was changed a moment ago
                Path(f"/proc/{process.pid}/autogroup").write_text(str(NICENESS))
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # pytest tells what has failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return 128 + signal.SIGINT
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
