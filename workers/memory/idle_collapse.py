"""Small pages of a rank's memory files become huge while it has nothing else to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from workers.memory.huge_pages import collapse_when_idle
from workers.memory.lasting import SharedMemfd
from workers.progress import Progress

STOP_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


class IdleCollapse:
    """A thread that lasts until all pages are huge, or until `stop`. `progress`: of the rank."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_launches = -1  # when the thread looked last
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, memories: Sequence[SharedMemfd]) -> None:
        """Begin with these, one after the other, instead of those of an earlier call."""
        self.stop()
        self._stop_event = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(memories, self._stop_event), name="huge-pages", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are allowed
            logger.debug("memory may stay in small pages: %s", error)
        else:
            self._thread = thread

    def stop(self) -> None:
        """Wait until the thread has ended and has given up the memory, which takes at most 0.1 s on
        a machine that is not overloaded.
        """
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(STOP_LIMIT_S)
            self._thread = None

    def is_idle(self) -> bool:
        """Whether no step has been launched since the call before, and none is being launched."""
        num_ended = self._progress.num_launches_ended  # first: it may only be too small
        last, self._num_launches = self._num_launches, self._progress.num_launches
        return last == self._num_launches == num_ended

    def _run(self, memories: Sequence[SharedMemfd], stop_event: threading.Event) -> None:
        try:
            for memory in memories:
                collapse_when_idle(memory.descriptor, memory.num_bytes, self.is_idle, stop_event)
        except OSError as error:
            logger.debug("the rest may stay in small pages: %s", error)
