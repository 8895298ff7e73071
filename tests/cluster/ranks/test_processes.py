"""Ending processes for certain: running ones, stopped ones, those that are gone, and those whose
number belongs to another process by now.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.ranks import processes
from cluster.ranks.processes import (
    PIDFD_THREAD,
    ProcessId,
    _link_targets,
    _start_ticks,
    describe_local_process,
    end_local_processes,
    end_marked_local_processes,
    is_local_process_stopped,
    marked_local_pids,
    processes_on_this_node,
    watch_local_processes,
)
from cluster.ray_errors import NoAnswerError
from tests.cluster.processes import command_of, state_of, wait_until

SLEEP = "import time; time.sleep(60)"
MARK = f"of-a-test-in-{os.getpid()}"  # another process may run the same tests
MARKED = """
import ctypes, os, sys, faulthandler, signal, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
libc = ctypes.CDLL(None)
signal.signal(signal.SIGUSR1, lambda *_: libc.pthread_exit(None))
descriptor = os.memfd_create("eagleray-" + sys.argv[1])
faulthandler.register(signal.SIGUSR2, os.fdopen(os.dup(descriptor), "w"), all_threads=True)
print(descriptor, flush=True)
def where_it_sleeps():
    time.sleep(60)
where_it_sleeps()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    yield process
    process.kill()
    process.wait()


# It maps page after page, which takes the kernel some 0.1 s to undo.
WITH_MEMORY = """
import mmap, threading, time
threads = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(9)]
for thread in threads:
    thread.start()
pages = mmap.mmap(-1, 2**29, mmap.MAP_SHARED)
for start in range(0, len(pages), mmap.PAGESIZE):
    pages[start] = 1
print(threads[0].native_id, flush=True)  # mostly not the last to end, which frees the memory
time.sleep(60)
"""


@pytest.fixture
def marked() -> Iterator[tuple[subprocess.Popen[str], ProcessId]]:
    process = subprocess.Popen(
        [sys.executable, "-c", MARKED, MARK], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    descriptor = int(process.stdout.readline())
    yield (
        process,
        ProcessId(
            node_id="here",
            pid=process.pid,
            start_ticks=_start_ticks(process.pid),
            mark_fd=descriptor,
        ),
    )
    process.kill()
    process.wait()


def test_the_end_of_a_process_on_this_node_is_told_at_once(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    told: queue.Queue[tuple[int, float]] = queue.Queue()
    living = ProcessId(node_id="here", pid=sleeper.pid, start_ticks=_start_ticks(sleeper.pid))
    reused = dataclasses.replace(living, start_ticks=living.start_ticks - 1, thread_id=sleeper.pid)
    elsewhere = dataclasses.replace(reused, node_id="another")
    found = processes_on_this_node([None, elsewhere, living, reused])
    assert list(found) == [2, 3]
    watch_local_processes(found, lambda index: told.put((index, time.monotonic())))
    assert told.get_nowait()[0] == 3, "its number belongs to another"
    time.sleep(0.1)
    assert told.empty()
    assert not is_local_process_stopped(living)
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: is_local_process_stopped(living), "it is seen stopped", 2)
    killed_s = time.monotonic()
    sleeper.kill()
    index, ended_s = told.get(timeout=5)
    assert index == 2 and ended_s - killed_s < 0.5
    wait_until(
        lambda: not any(each.name == "ends" for each in threading.enumerate()), "the thread ends"
    )


def test_the_end_of_a_process_is_told_before_its_memory_is_given_back() -> None:
    try:
        os.close(os.pidfd_open(threading.get_native_id(), PIDFD_THREAD))
    except OSError:
        pytest.skip("this kernel has no descriptors of threads")
    # The last thread to end gives the memory back, and that may be the one that is watched.
    assert any(_is_told_early() for _ in range(5))


def _is_told_early() -> bool:
    """Whether the end of a process is told while it still has memory to give back."""
    with subprocess.Popen(
        [sys.executable, "-c", WITH_MEMORY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        living = ProcessId(
            node_id="here",
            pid=process.pid,
            thread_id=int(process.stdout.readline()),
            start_ticks=_start_ticks(process.pid),
        )
        of_another = dataclasses.replace(living, thread_id=threading.get_native_id())
        told: queue.Queue[tuple[int, bool]] = queue.Queue()
        watch_local_processes(
            {0: living, 1: of_another}, lambda key: told.put((key, process.poll() is None))
        )
        time.sleep(0.1)
        is_early = not told.empty()
        process.kill()
        is_running = dict(told.get(timeout=60) for _ in range(2))
    assert not is_early
    assert not is_running[1], "this descriptor is of the process"
    return is_running[0]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_dead_when_the_call_returns(
    sleeper: subprocess.Popen[bytes], stopped: bool
) -> None:
    if stopped:
        os.kill(sleeper.pid, signal.SIGSTOP)
    began = time.monotonic()
    end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid))])
    assert command_of(sleeper.pid) is None
    assert time.monotonic() - began < 2.0


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has this priority")
def test_a_process_that_runs_only_when_nothing_else_does_ends_at_the_usual_priority(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs take all cores, it would not end in time."""
    os.sched_setscheduler(sleeper.pid, os.SCHED_IDLE, os.sched_param(0))
    try:
        os.sched_setscheduler(sleeper.pid, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError:
        pytest.skip("this user may not raise a priority")
    os.sched_setscheduler(sleeper.pid, os.SCHED_IDLE, os.sched_param(0))
    send, policies = signal.pidfd_send_signal, []

    def note(pidfd: int, number: int) -> None:
        policies.append(os.sched_getscheduler(sleeper.pid))
        send(pidfd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", note)
    end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid))], 0.0)
    assert policies == [os.SCHED_OTHER]


def test_without_descriptors_of_processes_they_are_killed_all_the_same(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "has_pidfds", lambda: False)
    threading.Thread(target=sleeper.wait, daemon=True).start()  # a zombie still has its number
    end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid)), (2**30, 0)])
    assert sleeper.wait() == -signal.SIGKILL


def test_a_process_that_goes_by_itself_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.terminate()
    end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid))])
    assert sleeper.wait() == -signal.SIGTERM


def test_a_number_that_belongs_to_another_process_by_now_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid) - 1), (2**22 - 1, 5)])
    assert sleeper.poll() is None


def test_a_process_that_does_not_die_is_named(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.1)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as in the state "D"
    with pytest.raises(
        NoAnswerError, match=rf"processes \[{sleeper.pid}\] did not end within 0.1 s"
    ):
        end_local_processes([(sleeper.pid, _start_ticks(sleeper.pid))])


def test_a_mark_finds_the_processes_of_one_engine(
    marked: tuple[subprocess.Popen[str], ProcessId],
) -> None:
    process, _ = marked
    assert marked_local_pids(MARK) == [process.pid]
    assert marked_local_pids("of-another") == []
    end_marked_local_processes(MARK)
    assert command_of(process.pid) is None


def test_a_mark_finds_a_process_of_which_only_a_thread_is_left(
    marked: tuple[subprocess.Popen[str], ProcessId],
) -> None:
    process, _ = marked
    process.send_signal(signal.SIGUSR1)
    fd_folder = Path(f"/proc/{process.pid}/fd")
    wait_until(lambda: not _link_targets(fd_folder), "the main thread to end")
    assert marked_local_pids(MARK) == [process.pid]


def test_a_process_says_where_it_is(marked: tuple[subprocess.Popen[str], ProcessId]) -> None:
    process, process_id = marked

    def is_asleep() -> bool:  # it is not while it writes its stacks
        said = describe_local_process(process_id)
        return said.startswith("state S (sleeping)") and "in where_it_sleeps" in said

    wait_until(is_asleep, "it to say where it sleeps")
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(process.pid) == "T", "its stop")
    said = describe_local_process(process_id)
    assert said.startswith("state T (stopped)") and "it wrote no stacks" in said
    process.kill()
    process.wait()
    assert describe_local_process(process_id) == "it is gone"


def test_a_process_that_ends_while_it_is_looked_for_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(processes, "marked_local_pids", lambda engine_id: [gone.pid])
    end_marked_local_processes(MARK)
