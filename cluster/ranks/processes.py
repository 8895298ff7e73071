"""Processes of an engine, wherever they run: who they are, how to end them for certain, and what
they are doing.

`ray.kill` asks a process to end, and one that is stopped does not answer. Here, processes that do
not end soon are killed with SIGKILL, and on each node it is checked that all are dead. A mark (an
open file with the engine's name) finds those whose ids are not known.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.error_kinds import kind_of
from cluster.ray_errors import NoAnswerError, call, made
from cluster.resources.placement import actor_environment
from cluster.resources.room import living_nodes
from cluster.timeouts import NODE_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError, EngineError

IS_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
END_TIMEOUT_S = 10.0
# Time for processes that Ray was told to end: Ray reports one that is killed otherwise as a fault.
GRACE_S = 0.2
STACKS_TIMEOUT_S = 0.5
DESCRIBE_TIMEOUT_S = 3.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identifies a process for all time: its number may be used again, but not with the same start
    time.
    """

    node_id: str
    pid: int
    started: int  # clock ticks since the machine started
    marked_fd: int = -1


def mark(engine_id: str) -> ProcessId:
    """Mark this process as one of an engine's. From then on, SIGUSR2 makes it write the Python
    stack of each of its threads into the mark, even if the interpreter is blocked.
    """
    descriptor, pid = -1, os.getpid()
    if IS_LINUX:
        if ray.get_runtime_context().get_actor_id() is not None:
            end_with_parent()
        descriptor = os.memfd_create(f"eagleray-{engine_id}")
        faulthandler.register(signal.SIGUSR2, os.fdopen(os.dup(descriptor), "w"), all_threads=True)
    return ProcessId(
        node_id=ray.get_runtime_context().get_node_id(),
        pid=pid,
        started=_started(pid),
        marked_fd=descriptor,
    )


def end_with_parent() -> None:
    """Have the kernel end this process with its parent, the raylet, even if it is stopped.

    The raylet of a node that was cut off and declared dead ends itself, and asks its workers to
    end; a worker that waits for a lost peer would not obey.
    """
    if not IS_LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == 1:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def end_all(processes: list[ProcessId]) -> None:
    """End processes, each on its node, and return when they are dead. Raises `EngineError` naming
    those that stay alive.
    """
    by_node: dict[str, list[tuple[int, int]]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append((process.pid, process.started))
    for node_id, pids in by_node.items():
        on_node(node_id, end_here, pids)


def end_marked(engine_id: str, node_ids: set[str]) -> None:
    """End every process of an engine on these nodes, as `end_all`."""
    for node_id in node_ids:
        on_node(node_id, end_marked_here, engine_id)


def on_this_node(processes: list[ProcessId | None]) -> dict[int, ProcessId]:
    """Those that run on this node, by index; none where the kernel cannot watch processes."""
    if not has_descriptors() or not any(processes):
        return {}
    node_id = ray.get_runtime_context().get_node_id()
    return {
        index: process
        for index, process in enumerate(processes)
        if process is not None and process.node_id == node_id
    }


def watch_here(processes: dict[int, ProcessId], ended: Callable[[int], None]) -> None:
    """Call `ended` with the key of each process on this node when it ends, on a thread that ends
    with the last. The kernel reports an end at once, Ray only after 0.05 s, or ten times that on a
    busy machine.
    """
    poll = select.poll()
    keys: dict[int, int] = {}  # by descriptor
    for key, process in processes.items():
        descriptor = _open(process.pid, process.started)
        if descriptor is None:
            ended(key)
        else:
            poll.register(descriptor, select.POLLIN)
            keys[descriptor] = key

    def watch() -> None:
        while keys:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                os.close(descriptor)
                ended(keys.pop(descriptor))

    if keys:
        threading.Thread(target=watch, name="ends", daemon=True).start()


def is_stopped_here(process: ProcessId) -> bool:
    """Whether a process on this node was stopped by a signal, or is gone."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return True
    return stat.rsplit(") ", 1)[1][0] in "TtZX"


def describe(process: ProcessId) -> str:
    """The state of a process, and the Python stacks of its threads if it can still write them."""
    return str(on_node(process.node_id, describe_here, process, limit_s=DESCRIBE_TIMEOUT_S))


def on_node(
    node_id: str, function: Callable[..., Any], *arguments: Any, limit_s: float = NODE_TIMEOUT_S
) -> Any:
    """Run a function on a node; it may run more than once.

    Returns None for a node that is gone, where there is nothing to do. Ray ends every process of a
    node that it has declared dead, but it declares that only after a while, so a node that does not
    answer is asked again. Raises `EngineError` when it has neither answered nor been declared dead
    in time.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    what, until = f"run {function.__name__} on node {node_id}", time.monotonic() + limit_s
    while _is_alive(node_id):
        there = ray.remote(function).options(
            num_cpus=0,
            max_retries=3,
            runtime_env=actor_environment(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        answer = made(there, what, *arguments)
        while not ray.wait([answer], timeout=LOOK_S)[0]:
            if not _is_alive(node_id):
                return None
            if time.monotonic() > until:
                raise NoAnswerError(f"could not {what}: no answer within {limit_s:g} s")
        try:
            return call(answer, what)
        except EaglerayError as error:  # the node, or the process there, has died meanwhile
            is_over = isinstance(error, EngineDeadError) or kind_of(error).may_pass
            if not is_over or time.monotonic() > until:
                raise
            time.sleep(LOOK_S)
    return None


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id for node in living_nodes())


# -- on the node itself ----------------------------------------------------------------------------


def end_here(processes: list[tuple[int, int]]) -> None:
    """See `end_all`."""
    if not has_descriptors():
        _end_elsewhere([pid for pid, _ in processes])
        return
    alive: dict[int, int] = {}  # pid by descriptor
    for pid, started in processes:
        descriptor = _open(pid, started)
        if descriptor is not None:
            alive[descriptor] = pid
    try:
        _wait_for_ends(alive, GRACE_S)
        for descriptor in alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _wait_for_ends(alive, END_TIMEOUT_S)
        if alive:
            raise EngineError(
                f"processes {sorted(alive.values())} did not end within {END_TIMEOUT_S:g} s of"
                " SIGKILL"
            )
    finally:
        for descriptor in alive:
            os.close(descriptor)


@functools.cache
def has_descriptors() -> bool:
    """Whether this system has descriptors of processes, as Linux has since 5.3, except in some
    sandboxes.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _open(pid: int, started: int) -> int | None:
    """A descriptor of a process; None if it is gone, even if another process has its number now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with suppress(OSError):
        if _started(pid) == started:
            return descriptor
    os.close(descriptor)
    return None


def _end_elsewhere(pids: list[int]) -> None:
    """`end_here` for systems that have neither descriptors nor start times of processes."""
    until = time.monotonic() + END_TIMEOUT_S
    alive = list(pids)
    while alive and time.monotonic() < until:
        for pid in list(alive):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                alive.remove(pid)
        time.sleep(0.01)
    if alive:
        raise EngineError(f"processes {alive} did not end within {END_TIMEOUT_S:g} s of SIGKILL")


def _wait_for_ends(alive: dict[int, int], limit_s: float) -> None:
    """Remove those that end in time."""
    poll, until = select.poll(), time.monotonic() + limit_s
    for descriptor in alive:
        poll.register(descriptor, select.POLLIN)
    while alive and (left_s := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1e3 * left_s):
            poll.unregister(descriptor)
            os.close(descriptor)
            del alive[descriptor]


def end_marked_here(engine_id: str) -> None:
    """See `end_marked`."""
    found = []
    for pid in marked_here(engine_id):
        with suppress(OSError):  # it has ended since it was found
            found.append((pid, _started(pid)))
    end_here([(pid, started) for pid, started in found if pid != os.getpid()])


def marked_here(engine_id: str) -> list[int]:
    """Living processes of an engine on this machine."""
    if not IS_LINUX:
        return []
    target, found = Path(f"/memfd:eagleray-{engine_id} (deleted)"), []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if any(link.readlink() == target for link in (path / "fd").iterdir()):
                    found.append(int(path.name))
    return found


def describe_here(process: ProcessId) -> str:
    """See `describe`."""
    pid = process.pid
    try:
        if _started(pid) != process.started:
            return "it is gone"
        state = Path(f"/proc/{pid}/status").read_text().split("State:", 1)[1].split("\n")[0].strip()
        written = Path(f"/proc/{pid}/fd/{process.marked_fd}")
        before = written.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        until = time.monotonic() + STACKS_TIMEOUT_S
        while written.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)  # until all threads are written
        stacks = written.read_bytes()[before:].decode(errors="replace").strip()
    except (OSError, IndexError):
        return "it is gone"
    return f"state {state}\n{stacks or 'it wrote no stacks'}"


def _started(pid: int) -> int:
    """When a process was started. Raises `OSError` if there is none."""
    if not IS_LINUX:
        return 0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[19])
