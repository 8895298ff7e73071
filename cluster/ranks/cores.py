"""Which cores a rank computes on: its share among all ranks of all engines on this machine.

The threads of a matrix product wait for each other, so two ranks that both use every core mostly
wait. Each rank writes its claim to a file whose lock ends with its process; all ranks read all
claims and compute the same division. Ranks of other users and in other containers are not seen.
Others can guess the name of the folder: if another user can write to it, it is not used, and files
that are no claims are ignored.
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
_MAX_CLAIM_CHARS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreClaim:
    """What a rank tells the others. engine: identifies its engine, with another text in each epoch
    and on each node; local_rank: this rank's number among the ranks_on_node of its engine; cores:
    those that its process may use.
    """

    engine: str
    local_rank: int
    ranks_on_node: int
    cores: tuple[int, ...]


class CoreShare:
    """One rank's cores, until its process ends."""

    def __init__(self, claim: CoreClaim, folder: Path | None = None) -> None:
        self._claim = claim
        self._folder = folder or Path(tempfile.gettempdir()) / f"eagleray-ranks-{os.getuid()}"
        self._path: Path | None = None
        try:
            self._write_claim()
        except OSError as error:
            logger.warning(
                "ranks of other engines on this machine are not seen, and may use the same cores:"
                " %s",
                error,
            )

    def _write_claim(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _check_only_we_can_write(self._folder)
        # Others do not see the file before it is locked and complete.
        descriptor, hidden_name = tempfile.mkstemp(prefix=".", dir=self._folder)
        self._file = os.fdopen(descriptor, "w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump(asdict(self._claim), self._file)
        self._file.flush()
        hidden_path = Path(hidden_name)
        self._path = hidden_path.rename(self._folder / hidden_path.name.removeprefix("."))

    def cores_and_num_threads(self) -> tuple[tuple[int, ...], int]:
        """The cores this rank may use at present, and the number of threads: one thread on any of
        the cores when there are more ranks than cores.
        """
        own_claim = self._claim
        rank_counts = {own_claim.engine: own_claim.ranks_on_node}  # by engine
        for claim in self._living_claims():
            if set(claim.cores) & set(own_claim.cores):
                rank_counts[claim.engine] = claim.ranks_on_node
        cores_per_rank = len(own_claim.cores) // sum(rank_counts.values())
        if cores_per_rank == 0:
            return own_claim.cores, 1
        num_before = sum(n for engine, n in rank_counts.items() if engine < own_claim.engine)
        start = (num_before + own_claim.local_rank) * cores_per_rank
        return own_claim.cores[start : start + cores_per_rank], cores_per_rank

    def _living_claims(self) -> Iterator[CoreClaim]:
        """The claims of ranks whose processes live, this one's too; removes the others."""
        if self._path is None:
            return
        for claim_path in self._folder.glob("[!.]*"):
            with contextlib.suppress(OSError), open(claim_path, opener=_open_file) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    with contextlib.suppress(ValueError, TypeError, KeyError):
                        fields = json.loads(file.read(_MAX_CLAIM_CHARS))
                        yield CoreClaim(**fields | {"cores": tuple(fields["cores"])})
                else:
                    claim_path.unlink(missing_ok=True)  # its process has ended


def _check_only_we_can_write(folder: Path) -> None:
    """Raise `PermissionError` unless only this user can write to the folder."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
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


def pin_to_cores(cores: tuple[int, ...]) -> None:
    """Run the calling thread, and all threads that it has started or will start, on these cores.
    Renames the calling thread to `THREAD_NAME`.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    task_folders = Path("/proc/self/task")
    (task_folders / str(threading.get_native_id()) / "comm").write_text(THREAD_NAME)
    for task_folder in task_folders.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task_folder / "comm").read_text().strip() == THREAD_NAME:
                os.sched_setaffinity(int(task_folder.name), cores)


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))
