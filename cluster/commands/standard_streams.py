"""Standard streams that are closed, or whose output cannot be written."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any

from scheduler.errors import ConfigError


class _Output(io.FileIO):
    """Standard output; what it cannot write is a `ConfigError`, once. A pipe whose reader has gone
    stays a `BrokenPipeError`, for which commands end without a message.
    """

    _has_failed = False

    def write(self, data: Any) -> int:
        """Write, or after a failure drop, what Python still has when the program ends."""
        if self._has_failed:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._has_failed = True
            raise _unwritable_error(error) from None


def prepare_standard_streams() -> None:
    """Open what is closed, so that no other file gets its number: input and error output as
    /dev/null, and output as something that cannot be written.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # as the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    output = sys.stdout or os.fdopen(1, "w", closefd=False)
    raw_output: Any = _Output(1, "w", closefd=False)
    is_unbuffered = getattr(output, "write_through", False)  # by PYTHONUNBUFFERED
    sys.stdout = io.TextIOWrapper(
        raw_output if is_unbuffered else io.BufferedWriter(raw_output),
        encoding=output.encoding,
        errors=output.errors,
        line_buffering=output.isatty(),
        write_through=is_unbuffered,
    )


def check_output() -> None:
    """Raise `ConfigError` where standard output is closed or full, before answers are made."""
    try:
        os.write(1, b"")
        is_file = stat.S_ISREG(os.fstat(1).st_mode)
        if is_file and os.fstatvfs(1).f_bavail == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _unwritable_error(error) from None


def _unwritable_error(error: OSError) -> ConfigError:
    return ConfigError(
        f"standard output cannot be written: {error}. Redirect it to something that can, or name a"
        " file with --output where the command has that option"
    )
