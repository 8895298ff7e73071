"""A local Ray of our own, started with only what an engine uses.

Environment variables turn off most of the rest. What they cannot turn off is left out by replacing
methods of Ray's private classes, only in this file. Where Ray does not have these methods, it
starts everything, and takes longer.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._private.node import Node

from scheduler.errors import EngineError

# Settings of a local cluster that we start, unless the environment sets them.
LOCAL_RAY_SETTINGS = {
    # Ray runs its workers at nice 15, so any other program would take nearly all of a core that it
    # shares with a rank.
    "RAY_worker_niceness": "0",
    # The raylet retries its first connection after one second; here it retries soon, for the same
    # total time.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # Processes started in advance could not serve our actors, which have a runtime environment.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Serve's controller looks at its applications ten times per second otherwise: with what it asks
    # of Ray, 4% of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}

STOP_TIMEOUT_S = 1.0  # how long SIGSTOP may take; a process that waits for a disk ignores it

# Methods of `Node` that start a process which does nothing for a local Ray without a dashboard.
IDLE_PROCESS_STARTERS = (
    "start_monitor",  # for the autoscaler, which has no nodes to add
    "start_log_monitor",  # forwards the output of actors, which the program has not asked for
    "start_api_server",  # reports only usage statistics, but `ray.init` waits for it
)


@contextmanager
def minimal_local_ray() -> Iterator[None]:
    """A context for `ray.init` of a local Ray without a dashboard: sets those settings that the
    environment does not have already, starts none of `IDLE_PROCESS_STARTERS`, and the others in
    process groups of their own.

    The idle ones take 2 s of processor time at the start, which delays it on two cores, and 1% of a
    core until Ray ends. A signal to this program's group, as `timeout` sends it, would otherwise
    end the ranks below Ray at once, and the requests that run.
    """
    settings = LOCAL_RAY_SETTINGS.items()
    added_settings = {name: value for name, value in settings if name not in os.environ}
    method_names = [name for name in IDLE_PROCESS_STARTERS if hasattr(Node, name)]
    original_methods = {name: getattr(Node, name) for name in method_names}
    os.environ.update(added_settings)
    for name in original_methods:
        setattr(Node, name, _start_nothing)
    ray_services: Any = services
    original_popen = services.ConsolePopen
    if sys.platform == "linux":  # elsewhere Ray ends them by their group
        ray_services.ConsolePopen = _PopenInOwnGroup
    try:
        yield
    finally:
        for name in added_settings:
            del os.environ[name]
        for name, method in original_methods.items():
            setattr(Node, name, method)
        ray_services.ConsolePopen = original_popen


@contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """A context for `ray.init` in which Ray sets no handler of SIGTERM. Its own would end the
    program, or some of Ray's processes, in the middle of the start.
    """
    ray_utils: Any = ray._private.utils
    original_setter = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = original_setter


def check_local_ray_alive() -> None:
    """Raise `EngineError` if a process of a local Ray of our own has died, after killing the
    others. Without gcs_server, they would end only after a minute, and this program with them.
    """
    dead_names = dead_local_processes()
    if dead_names:
        kill_local_ray()
        raise EngineError(f"a process of Ray has died: {', '.join(dead_names)}")


def kill_local_ray() -> None:
    """Kill the processes of a local Ray of our own, but its gcs_server, which ends with this
    program.
    """
    node: Any = ray._private.worker._global_node
    for name, process in node.live_processes() if node is not None else ():
        if name == "raylet":
            _kill_with_descendants(process.pid)


def end_local_ray() -> None:
    """`ray.shutdown`, except where that would end this program before it has said what happened:
    Ray does so when its own raylet is dead and the program's parent is process 1, as it is in
    containers and under systemd. There, what is left of Ray ends with the program, at whose exit
    Ray does the same: what was printed is written before.
    """
    if os.getppid() == 1 and "raylet" in dead_local_processes():
        atexit.register(_flush_output)  # runs before what Ray registered
        return
    ray.shutdown()


def _flush_output() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def dead_local_processes() -> list[str]:
    """Ray's names of those of its processes that this one has started and that have died."""
    node: Any = ray._private.worker._global_node
    return [name for name, _ in node.dead_processes()] if node is not None else []


def _kill_with_descendants(pid: int) -> None:
    """Kill a process of this machine, then all below it. It is stopped first, so that it starts no
    more of them, and because the system may leave some out of the list while it does.
    """
    children = []
    with suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while not _has_stopped(pid) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_with_descendants(child)


def _has_stopped(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    return state in "TtZX"


class _PopenInOwnGroup(services.ConsolePopen):
    """Starts a process of Ray as the leader of a process group.

    Ray has the system end the process with its parent, by which Linux means the thread that started
    it. So that is one which lasts as long as this program.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        start = partial(super().__init__, *args, process_group=0, **options)
        if threading.current_thread() is threading.main_thread():
            start()
        else:
            outcome = Future[None]()
            _calls_of_lasting_thread().put((start, outcome))
            outcome.result()


@functools.cache
def _calls_of_lasting_thread() -> queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]:
    """What is put here, a thread calls that lasts until the very end of this program."""
    calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            function, outcome = calls.get()
            try:
                function()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

    threading.Thread(target=run, name="ray-parent", daemon=True).start()
    return calls


os.register_at_fork(after_in_child=_calls_of_lasting_thread.cache_clear)


def _start_nothing(node: Node, **_: Any) -> None:
    """Replaces a method of `IDLE_PROCESS_STARTERS`."""
