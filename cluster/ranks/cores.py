"""Which cores a rank computes on: its share among all ranks of all engines on this machine.

The threads of a product wait for each other, so two ranks that both use every core mostly wait.
Each rank announces itself with a file whose lock ends with its process; all read all files and come
to the same division. Ranks of other users and in other containers are not seen. The folder has a
name that others can guess: one that is not ours alone is not used, and what is not an announcement
is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# The name in /proc of the thread that computes, and of the threads it starts, which inherit it.
THREAD_NAME = "eagleray"
_MOST_BYTES = 65536  # of an announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a rank announces. group: identifies the engine; local_rank: this rank's number among the
    ranks_on_node of its engine; cores: those that its process may use.
    """

    group: str
    local_rank: int
    ranks_on_node: int
    cores: tuple[int, ...]


class CoreShare:
    """One rank's cores, until its process ends."""

    def __init__(self, claim: Claim, folder: Path | None = None) -> None:
        self._claim = claim
        self._folder = folder or Path(tempfile.gettempdir()) / f"eagleray-ranks-{os.getuid()}"
        self._path: Path | None = None
        try:
            self._announce()
        except OSError as error:
            logger.warning(
                "ranks of other engines on this machine are not seen, and may use the same cores:"
                " %s",
                error,
            )

    def _announce(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _check_ours(self._folder)
        # Others do not see the file before it is locked and complete.
        descriptor, name = tempfile.mkstemp(prefix=".", dir=self._folder)
        self._file = os.fdopen(descriptor, "w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump(asdict(self._claim), self._file)
        self._file.flush()
        beginning = Path(name)
        self._path = beginning.rename(self._folder / beginning.name.removeprefix("."))

    def now(self) -> tuple[tuple[int, ...], int]:
        """The cores this rank may use at present, and the number of threads: one thread on any of
        the cores when there are more ranks than cores.
        """
        mine = self._claim
        sizes = {mine.group: mine.ranks_on_node}
        for other in self._living():
            if set(other.cores) & set(mine.cores):
                sizes[other.group] = other.ranks_on_node
        place = sum(size for group, size in sizes.items() if group < mine.group) + mine.local_rank
        share = len(mine.cores) // sum(sizes.values())
        return (
            (mine.cores[place * share : (place + 1) * share], share) if share else (mine.cores, 1)
        )

    def _living(self) -> Iterator[Claim]:
        if self._path is None:
            return
        for path in self._folder.glob("[!.]*"):
            with contextlib.suppress(OSError), open(path, opener=_open_file) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        claim = json.loads(file.read(_MOST_BYTES))
                        yield Claim(**claim | {"cores": tuple(claim["cores"])})
                else:
                    path.unlink(missing_ok=True)  # its process has ended


def _check_ours(folder: Path) -> None:
    """Raise `PermissionError` unless only this user can write to the folder."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not a folder that this user alone can write to; remove it"
        )


def _open_file(path: str, flags: int) -> int:
    """A descriptor of a regular file; raises `OSError` for anything else, without waiting."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a file")
    return descriptor


def bind(cores: tuple[int, ...]) -> None:
    """Run the calling thread, and all threads that it has started or will start, on these cores."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    tasks = Path("/proc/self/task")
    (tasks / str(threading.get_native_id()) / "comm").write_text(THREAD_NAME)
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text().strip() == THREAD_NAME:
                os.sched_setaffinity(int(task.name), cores)


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))
