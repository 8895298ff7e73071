"""The log of a process that Ray has started."""

from __future__ import annotations

import logging


def log_to_stderr(level: str) -> None:
    """Log what is at least as severe as `level`, with the time. Ray keeps the standard error of a
    process in its session's folder, as `logs/worker-*-PID.err`.
    """
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
