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

NICENESS = 19


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            sys.argv[1:], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            os.setpriority(os.PRIO_PGRP, process.pid, NICENESS)
            with suppress(FileNotFoundError):  # where there are none
                Path(f"/proc/{process.pid}/autogroup").write_text(str(NICENESS))
            return process.wait()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
