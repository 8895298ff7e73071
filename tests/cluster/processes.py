"""Processes of engines, seen from outside: Ray names an actor's process after its class."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.ranks.cores import THREAD_NAME

OURS = ("ray::RankActor", "ray::Driver")
# The number of this one of the processes in which tests run at the same time.
TEST_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@contextmanager
def ray_folder() -> Iterator[dict[str, str]]:
    """Variables for a program that makes a cluster: programs that run beside it would find that
    cluster and join it. The path is short, because sockets are below it.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield {"RAY_TMPDIR": folder}


def command_of(pid: int) -> str | None:
    """The command line of a living process; None for one that is gone or a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except (OSError, IndexError):
        return None
    return None if state == "Z" else command


def state_of(pid: int) -> str:
    """The state of a process as one letter, such as T for one that is stopped; empty if it is
    gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except OSError:
        return ""


def family(session: int) -> set[int]:
    """Living processes of a session: everything that Ray starts stays in the session of the program
    that started it.
    """
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid for pid in pids if command_of(pid) is not None and _session_of(pid) == session}


def opened_by(pid: int) -> list[str]:
    """What a living process has open, as the kernel names it: paths, `socket:[inode]` and such."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed just now
            found.append(str(path.readlink()))
    return found


def open_files() -> set[tuple[str, int, int]]:
    """Each descriptor of this process, with the device and inode of what it is of. What a later
    call has and an earlier one lacked was opened in between, whatever was closed meanwhile.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed just now
            status = path.stat()
            found.add((path.name, status.st_dev, status.st_ino))
    return found


def num_memory_files(pids: Iterable[int]) -> int:
    """How many memory files of engines the processes hold open, each counted once."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it was closed just now
                    if str(path.readlink()).startswith("/memfd:eagleray"):
                        found.add(path.stat().st_ino)
    return len(found)


def cores_of_computing_threads(pid: int) -> list[set[int]]:
    """The cores on which each computing thread of a rank may run."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == THREAD_NAME:
                found.append(os.sched_getaffinity(int(task.name)))
        except OSError:  # it has ended
            continue
    return found


def listening(pid: int) -> list[tuple[str, int]]:
    """(address as the kernel writes it, port) of each TCP socket on which a process listens."""
    sockets: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            address, port = local.split(":")
            if state == "0A":
                sockets[f"socket:[{rest[5]}]"] = (address, int(port, 16))
    return [sockets[name] for name in opened_by(pid) if name in sockets]


def descendants(pid: int) -> set[int]:
    """The living children of a process, their children and so on."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or is none
            parents[int(path.name)] = _parent_of(path)
    below, new = set[int](), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - below:
        below |= new
    return {child for child in below if command_of(child) is not None}


def _parent_of(path: Path) -> int:
    return int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])


def processes(*names: str) -> set[int]:
    """Living processes below this one whose command line begins with one of `names`. Others of our
    session may belong to tests that run at the same time.
    """
    return {pid for pid in descendants(os.getpid()) if (command_of(pid) or "").startswith(names)}


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {limit_s} s"
        time.sleep(0.02)


def connections(pid: int, port: int) -> set[int]:
    """The ports of the clients to which a process is connected by its own TCP port."""
    clients: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *rest = line.split()
        if state == "01" and int(local.split(":")[1], 16) == port:
            clients[f"socket:[{rest[5]}]"] = int(remote.split(":")[1], 16)
    return {clients[name] for name in opened_by(pid) if name in clients}
