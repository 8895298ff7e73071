"""The processes of an engine on any node: identifying them, ending them for certain, and describing
what they are doing.

`ray.kill` only asks a process to end, and a stopped process does not react. Here, processes that do
not end soon are killed with SIGKILL, and each node checks that all are dead. A mark (an open file
with the engine's name) finds processes whose ids are not known.
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
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.error_kinds import kind_of
from cluster.ray_errors import NoAnswerError, result_of, start_call
from cluster.resources.placement import actor_environment
from cluster.resources.room import living_nodes
from cluster.timeouts import NODE_TIMEOUT_S
from scheduler.errors import EaglerayError, EngineDeadError

IS_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PIDFD_THREAD = os.O_EXCL if IS_LINUX else 0  # linux/pidfd.h
END_TIMEOUT_S = 10.0
MAX_POLICY_PASSES = 10  # over the threads of a process, until all have a scheduling policy
# Time for processes that Ray was told to end: if they are killed earlier, Ray reports a fault.
END_GRACE_S = 0.2
STACKS_TIMEOUT_S = 0.5
DESCRIBE_TIMEOUT_S = 3.0
NODE_CHECK_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identifies a process forever: its pid may be used again, but not with the same start time.

    start_ticks: clock ticks from the start of the machine to that of the process. mark_fd: its file
    descriptor of the mark, -1 without one. thread_id: of a thread that ends only when the process
    does, -1 without one.
    """

    node_id: str
    pid: int
    start_ticks: int
    mark_fd: int = -1
    thread_id: int = -1


def mark_this_process(engine_id: str) -> ProcessId:
    """Mark this process as one of an engine's. From then on, SIGUSR2 makes it write the Python
    stack of each of its threads into the mark, even if the interpreter is blocked.
    """
    mark_fd, thread_id, pid = -1, -1, os.getpid()
    if IS_LINUX:
        if ray.get_runtime_context().get_actor_id() is not None:
            end_with_parent()
        mark_fd = os.memfd_create(f"eagleray-{engine_id}")
        faulthandler.register(signal.SIGUSR2, os.fdopen(os.dup(mark_fd), "w"), all_threads=True)
        thread = threading.Thread(target=threading.Event().wait, name="until the end", daemon=True)
        thread.start()
        thread_id = thread.native_id or -1
    return ProcessId(
        node_id=ray.get_runtime_context().get_node_id(),
        pid=pid,
        start_ticks=_start_ticks(pid),
        mark_fd=mark_fd,
        thread_id=thread_id,
    )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent, the raylet, ends, even if it is stopped.

    The raylet of a node that was cut off and declared dead ends itself, and asks its workers to
    end; a worker that waits for a lost peer would not react.
    """
    if not IS_LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == 1:  # the parent has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def end_processes(processes: list[ProcessId], grace_s: float = END_GRACE_S) -> None:
    """End processes, each on its node, and return when they are dead. Those that do not end by
    themselves within `grace_s` are killed. Raises `NoAnswerError` naming those that stay alive.
    """
    processes_by_node: dict[str, list[tuple[int, int]]] = {}
    for process in processes:
        processes_by_node.setdefault(process.node_id, []).append((process.pid, process.start_ticks))
    for node_id, node_processes in processes_by_node.items():
        run_on_node(node_id, end_local_processes, node_processes, grace_s)


def end_marked_processes(engine_id: str, node_ids: set[str]) -> None:
    """End every process of an engine on these nodes but this one, as `end_processes`."""
    for node_id in node_ids:
        run_on_node(node_id, end_marked_local_processes, engine_id)


def processes_on_this_node(processes: list[ProcessId | None]) -> dict[int, ProcessId]:
    """The processes on this node, by index; none where the kernel cannot watch processes."""
    if not has_pidfds() or not any(processes):
        return {}
    node_id = ray.get_runtime_context().get_node_id()
    return {
        index: process
        for index, process in enumerate(processes)
        if process is not None and process.node_id == node_id
    }


def watch_local_processes(processes: dict[int, ProcessId], on_end: Callable[[int], None]) -> None:
    """Call `on_end` with the key of each process on this node when it ends, on a thread that ends
    with the last; for one that is gone already, before this returns. The kernel reports an end at
    once, Ray only after 0.05 s, or ten times that on a busy machine. A process ends only once the
    memory that it has mapped is given back, 0.1 to 0.2 s per GiB of small pages later than its
    threads: from Linux 6.9 on, the end of its `thread_id` counts.
    """
    poller = select.poll()
    key_of_pidfd: dict[int, int] = {}
    for key, process in processes.items():
        pidfd = _open_thread_pidfd(process)
        if pidfd is None:
            pidfd = open_pidfd(process.pid, process.start_ticks)
        if pidfd is None:
            on_end(key)
        else:
            poller.register(pidfd, select.POLLIN)
            key_of_pidfd[pidfd] = key

    def watch() -> None:
        while key_of_pidfd:
            for pidfd, _ in poller.poll():
                poller.unregister(pidfd)
                os.close(pidfd)
                on_end(key_of_pidfd.pop(pidfd))

    if key_of_pidfd:
        threading.Thread(target=watch, name="ends", daemon=True).start()


def is_local_process_stopped(process: ProcessId) -> bool:
    """Whether a process on this node was stopped by a signal, or is gone."""
    try:
        stat_line = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return True
    state = stat_line.rsplit(") ", 1)[1][0]
    return state in "TtZX"


def describe_process(process: ProcessId) -> str:
    """The state of a process, and the Python stacks of its threads if it can still write them."""
    return str(
        run_on_node(process.node_id, describe_local_process, process, limit_s=DESCRIBE_TIMEOUT_S)
    )


def run_on_node(
    node_id: str, function: Callable[..., Any], *arguments: Any, limit_s: float = NODE_TIMEOUT_S
) -> Any:
    """Run a function on a node; it may run more than once.

    Returns None for a node that Ray has declared dead: Ray ends every process there. That takes a
    while, so a node that does not answer is asked again. Raises `NoAnswerError` for a node that
    neither answers nor is declared dead within `limit_s`, or if the function raises it.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    action, deadline_s = f"run {function.__name__} on node {node_id}", time.monotonic() + limit_s
    while _is_node_alive(node_id):
        remote_function = ray.remote(function).options(
            num_cpus=0,
            max_retries=3,
            runtime_env=actor_environment(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        ref = start_call(remote_function, action, *arguments)
        while not ray.wait([ref], timeout=NODE_CHECK_PERIOD_S)[0]:
            if not _is_node_alive(node_id):
                return None
            if time.monotonic() > deadline_s:
                raise NoAnswerError(f"could not {action}: no answer within {limit_s:g} s")
        try:
            return result_of(ref, action)
        except EaglerayError as error:  # the node, or the process there, may be another now
            if type(error) is NoAnswerError:
                raise  # the function has said so itself
            may_retry = isinstance(error, EngineDeadError) or kind_of(error).is_transient
            if not may_retry or time.monotonic() > deadline_s:
                raise
            time.sleep(NODE_CHECK_PERIOD_S)
    return None


def _is_node_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id for node in living_nodes())


# -- on the node itself ----------------------------------------------------------------------------


def end_local_processes(processes: list[tuple[int, int]], grace_s: float = END_GRACE_S) -> None:
    """See `end_processes`. `processes`: (pid, start ticks)."""
    if not has_pidfds():
        _end_without_pidfds([pid for pid, _ in processes])
        return
    pid_of_pidfd: dict[int, int] = {}  # of living processes
    for pid, start_ticks in processes:
        pidfd = open_pidfd(pid, start_ticks)
        if pidfd is not None:
            pid_of_pidfd[pidfd] = pid
    try:
        _wait_for_ends(pid_of_pidfd, grace_s)
        for pidfd, pid in pid_of_pidfd.items():
            # While a spare warms up, it has a thread that runs only when no other needs the core,
            # even to end.
            set_scheduling_policy(pid, "SCHED_OTHER")
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait_for_ends(pid_of_pidfd, END_TIMEOUT_S)
        _check_ended(pid_of_pidfd.values())
    finally:
        for pidfd in pid_of_pidfd:
            os.close(pidfd)


def set_scheduling_policy(process: int | str, name: str) -> None:
    """Have Linux schedule all threads of a process, and those they will start, as "SCHED_OTHER" or
    as "SCHED_BATCH", as far as this user may: such a thread interrupts none but those of
    "SCHED_IDLE" when it wakes up. `process`: its id, or "self".
    """
    with suppress(OSError):  # the process has ended, or this is no Linux
        for _ in range(MAX_POLICY_PASSES):
            has_changed = False
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):  # so has the thread, or this user may not do it
                    if os.sched_getscheduler(int(thread.name)) != getattr(os, name):
                        os.sched_setscheduler(
                            int(thread.name), getattr(os, name), os.sched_param(0)
                        )
                        has_changed = True
            if not has_changed:
                return  # and no thread was started meanwhile by one that was yet to be changed


@functools.cache
def has_pidfds() -> bool:
    """Whether this system has descriptors of processes: Linux since 5.3, except some sandboxes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def open_pidfd(pid: int, start_ticks: int) -> int | None:
    """A descriptor of a process; None if it is gone, even if another process has its pid now."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with suppress(OSError):
        if _start_ticks(pid) == start_ticks:
            return pidfd
    os.close(pidfd)
    return None


def _open_thread_pidfd(process: ProcessId) -> int | None:
    """A descriptor of the thread of a process that ends with it; None if there is none, or if the
    kernel has no descriptors of threads (Linux before 6.9).
    """
    pidfd = None
    with suppress(OSError):
        pidfd = os.pidfd_open(process.thread_id, PIDFD_THREAD)
        thread_folder = Path(f"/proc/{process.pid}/task/{process.thread_id}")
        if thread_folder.exists() and _start_ticks(process.pid) == process.start_ticks:
            return pidfd
    if pidfd is not None:
        os.close(pidfd)
    return None


def _end_without_pidfds(pids: list[int]) -> None:
    """`end_local_processes` where processes have neither descriptors nor start times."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    living_pids = list(pids)
    while living_pids and time.monotonic() < deadline_s:
        for pid in list(living_pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                living_pids.remove(pid)
        time.sleep(0.01)
    _check_ended(living_pids)


def _check_ended(living_pids: Collection[int]) -> None:
    """Raise `NoAnswerError` if any processes are left: one that has much memory ends in time."""
    if living_pids:
        raise NoAnswerError(
            f"processes {sorted(living_pids)} did not end within {END_TIMEOUT_S:g} s of SIGKILL"
        )


def _wait_for_ends(pid_of_pidfd: dict[int, int], limit_s: float) -> None:
    """Close and remove the descriptors of processes that end in time."""
    poller, deadline_s = select.poll(), time.monotonic() + limit_s
    for pidfd in pid_of_pidfd:
        poller.register(pidfd, select.POLLIN)
    while pid_of_pidfd and (remaining_s := deadline_s - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(1e3 * remaining_s):
            poller.unregister(pidfd)
            os.close(pidfd)
            del pid_of_pidfd[pidfd]


def end_marked_local_processes(engine_id: str) -> None:
    """See `end_marked_processes`. This process goes on."""
    processes = []
    for pid in set(marked_local_pids(engine_id)) - {os.getpid()}:
        with suppress(OSError):  # it has ended since
            processes.append((pid, _start_ticks(pid)))
    end_local_processes(processes)


def marked_local_pids(engine_id: str) -> list[int]:
    """The pids of an engine's living processes on this node."""
    if not IS_LINUX:
        return []
    mark_path = Path(f"/memfd:eagleray-{engine_id} (deleted)")
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and mark_path in _open_files(folder)
    ]


def _open_files(process_folder: Path) -> list[Path]:
    """The files that a process has open. One that is ending may have them in some threads only."""
    paths = _link_targets(process_folder / "fd")
    if not paths:
        with suppress(OSError):
            for thread_folder in (process_folder / "task").iterdir():
                paths += _link_targets(thread_folder / "fd")
    return paths


def _link_targets(folder: Path) -> list[Path]:
    """Where the links of a folder lead; without those that vanish meanwhile."""
    paths = []
    with suppress(OSError):
        for link in folder.iterdir():
            with suppress(OSError):
                paths.append(link.readlink())
    return paths


def describe_local_process(process: ProcessId) -> str:
    """See `describe_process`."""
    pid = process.pid
    try:
        if _start_ticks(pid) != process.start_ticks:
            return "it is gone"
        state = Path(f"/proc/{pid}/status").read_text().split("State:", 1)[1].split("\n")[0].strip()
        mark_path = Path(f"/proc/{pid}/fd/{process.mark_fd}")
        size_before = mark_path.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        deadline_s = time.monotonic() + STACKS_TIMEOUT_S
        while mark_path.stat().st_size == size_before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.05)  # until all threads are written
        stacks = mark_path.read_bytes()[size_before:].decode(errors="replace").strip()
    except (OSError, IndexError):
        return "it is gone"
    return f"state {state}\n{stacks or 'it wrote no stacks'}"


def _start_ticks(pid: int) -> int:
    """See `ProcessId`. Raises `OSError` if there is no such process."""
    if not IS_LINUX:
        return 0
    fields_after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields_after_name[19])
