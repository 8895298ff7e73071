"""Why a process ended: real processes that crash, exit or are killed, seen by another process than
their parent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from cluster.error_kinds import reason_of
from cluster.ranks import causes
from cluster.ranks.causes import (
    DeathWatch,
    Ending,
    EndingKind,
    enable_crash_report,
    may_have_corrupted_memory,
)
from cluster.ranks.processes import ProcessId, _start_ticks, end_local_processes, mark_this_process
from configs.paths import SOURCE_ROOT
from scheduler.errors import StepTimeoutError, WorkerError
from tests.cluster.processes import open_files, wait_until

KILLED, EXITED, CRASHED = EndingKind.KILLED, EndingKind.EXITED, EndingKind.CRASHED
LIMIT_S = 20.0
KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])
TELLING_KERNEL = pytest.mark.skipif(
    KERNEL < (6, 15), reason="this kernel tells the status of a process only to its parent"
)

UNKNOWN_REQUEST = causes.PIDFD_GET_INFO | 0x70

# Starts a child for each line, and waits for it. The child does what the line says when SIGUSR1
# arrives.
PARENT = """
import ctypes, json, mmap, os, signal, sys, threading, time
from cluster.ranks.causes import enable_crash_report
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
libc = ctypes.CDLL(None)
def overflow_stack():
    sys.setrecursionlimit(10**9)
    kind = ctypes.CFUNCTYPE(None)
    callback = kind(lambda: callback())
    callback()
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # the parent must not wait for ever for a child that a test left behind
        mark_fd = os.memfd_create("eagleray-test")
        if order["speaks"]:
            enable_crash_report(mark_fd)
        print(os.getpid(), mark_fd, flush=True)
        signal.sigwait([signal.SIGUSR1])
        exec(order["deed"])
        os._exit(0)
    if order["is_waited_for"]:
        os.waitpid(pid, 0)
"""

NULL = "ctypes.string_at(0)"
SLEEP = "time.sleep(60)"
CRASHES = {
    "null": (NULL, "SIGSEGV", "Segmentation fault"),
    "abort": ("libc.abort()", "SIGABRT", "Aborted"),
    "heap check": (
        "libc.malloc.restype = ctypes.c_void_p; block = ctypes.c_void_p(libc.malloc(64))\n"
        "libc.free(block); libc.free(block)",
        "SIGABRT",
        "Aborted",
    ),
    "C++ exception": (
        "ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()",
        "SIGABRT",
        "Aborted",
    ),
    "stack": ("overflow_stack()", "SIGSEGV", "Segmentation fault"),
    "file": (
        "file = os.memfd_create('cut'); os.truncate(file, 4096)\n"
        "memory = mmap.mmap(file, 4096); os.truncate(file, 0); memory[0]",
        "SIGBUS",
        "Bus error",
    ),
}
EXITS = {
    "os._exit(3)": 3,
    "sys.exit()": 0,
    "raise ValueError('that nobody catches')": 1,
}


@dataclass
class Children:
    """What starts them, and is their parent."""

    parent: subprocess.Popen[str]

    def start(
        self, deed: str, *, speaks: bool = True, is_waited_for: bool = True
    ) -> tuple[ProcessId, DeathWatch]:
        assert self.parent.stdin is not None and self.parent.stdout is not None
        order = {"deed": deed, "speaks": speaks, "is_waited_for": is_waited_for}
        self.parent.stdin.write(json.dumps(order) + "\n")
        self.parent.stdin.flush()
        pid, mark_fd = map(int, self.parent.stdout.readline().split())
        process = ProcessId(node_id="here", pid=pid, start_ticks=_start_ticks(pid), mark_fd=mark_fd)
        return process, DeathWatch(process)

    def ending(self, deed: str, *signals: signal.Signals, speaks: bool = True) -> Ending:
        """How a child ends that does this, and then gets these signals."""
        process, watch = self.start(deed, speaks=speaks)
        for number in (signal.SIGUSR1, *signals):
            os.kill(process.pid, number)
        try:
            return watch.ending(LIMIT_S)
        finally:
            watch.close()


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=SOURCE_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        yield Children(parent)
        parent.kill()


@pytest.fixture
def older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers as one that has never heard of the question."""
    monkeypatch.setattr(causes, "PIDFD_GET_INFO", UNKNOWN_REQUEST)


@TELLING_KERNEL
@pytest.mark.parametrize("name", CRASHES)
def test_the_kernel_tells_a_crash(children: Children, name: str) -> None:
    deed, number, _ = CRASHES[name]
    ending = children.ending(deed, speaks=False)
    assert (ending.kind, ending.text) == (CRASHED, number)
    assert ending.may_have_written_anywhere


@pytest.mark.usefixtures("older_kernel")
@pytest.mark.parametrize("name", CRASHES)
def test_a_process_says_that_it_crashes(children: Children, name: str) -> None:
    deed, _, words = CRASHES[name]
    ending = children.ending(deed)
    assert (ending.kind, ending.text) == (CRASHED, words)
    assert ending.may_have_written_anywhere
    assert "Current thread" in ending.crash_report and "<string>" in ending.crash_report


@TELLING_KERNEL
def test_kernel_and_words_together_make_the_text(children: Children) -> None:
    assert children.ending(NULL).text == "Segmentation fault, SIGSEGV"


@TELLING_KERNEL
def test_the_kernel_tells_the_silent_crash_of_a_thread_whose_stack_overflows(
    children: Children,
) -> None:
    ending = children.ending("threading.Thread(target=overflow_stack).start(); time.sleep(60)")
    assert (ending.kind, ending.text, ending.crash_report) == (CRASHED, "SIGSEGV", "")


@TELLING_KERNEL
@pytest.mark.parametrize(
    "number", ["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGALRM"]
)
def test_any_signal_but_those_of_a_fence_or_of_a_user_is_a_crash(
    children: Children, number: str
) -> None:
    ending = children.ending(SLEEP, signal.Signals[number], speaks=False)
    assert (ending.kind, ending.text) == (CRASHED, number)


@pytest.mark.usefixtures("older_kernel")
@pytest.mark.parametrize("number", ["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"])
def test_a_process_says_which_signal_made_it_crash(children: Children, number: str) -> None:
    ending = children.ending(SLEEP, signal.Signals[number])
    assert ending.kind is CRASHED and ending.text


@TELLING_KERNEL
@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("signals", [["SIGKILL"], ["SIGTERM"], ["SIGSTOP", "SIGKILL"]])
def test_what_was_killed_from_outside_wrote_nothing_wrong(
    children: Children, signals: list[str], speaks: bool
) -> None:
    sent = [signal.Signals[name] for name in signals]
    ending = children.ending(SLEEP, *sent, speaks=speaks)
    assert (ending.kind, ending.text) == (KILLED, signals[-1])
    assert not ending.may_have_written_anywhere


@TELLING_KERNEL
@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("deed", EXITS)
def test_what_exits_wrote_nothing_wrong(children: Children, deed: str, speaks: bool) -> None:
    ending = children.ending(deed, speaks=speaks)
    assert (ending.kind, ending.text) == (EXITED, f"exit code {EXITS[deed]}")
    assert not ending.may_have_written_anywhere


@pytest.mark.usefixtures("older_kernel")
@pytest.mark.parametrize("deed", [SLEEP, *EXITS])
def test_what_promised_to_speak_and_died_in_silence_did_not_crash(
    children: Children, deed: str
) -> None:
    ending = children.ending(deed, *[signal.SIGKILL][: deed == SLEEP])
    assert ending.kind is KILLED and not ending.may_have_written_anywhere


@pytest.mark.usefixtures("older_kernel")
def test_silence_without_a_promise_is_not_trusted(children: Children) -> None:
    ending = children.ending(SLEEP, signal.SIGKILL, speaks=False)
    assert ending.kind is EndingKind.UNKNOWN and ending.may_have_written_anywhere


def test_a_crash_that_hangs_and_is_killed_is_a_crash(children: Children) -> None:
    hangs = "signal.signal(signal.SIGSEGV, lambda *_: None); enable_crash_report(mark_fd); " + NULL
    process, watch = children.start(hangs, speaks=False)
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: bool(watch._crash_report()), "its words")
    assert watch.ending(0.1).text == "it did not end within 0.1 s"
    os.kill(process.pid, signal.SIGKILL)
    ending = watch.ending(LIMIT_S)
    watch.close()
    assert ending.kind is CRASHED and ending.text.startswith("Segmentation fault")


def test_stacks_that_were_asked_for_are_no_last_words(children: Children) -> None:
    asked = "faulthandler.register(signal.SIGUSR2, file=mark_fd); os.kill(os.getpid(), 12)"
    ending = children.ending(f"import faulthandler; {asked}; os.kill(os.getpid(), 9)")
    assert ending.kind is KILLED and ending.crash_report == ""


def test_what_still_lives_is_not_trusted(children: Children) -> None:
    process, watch = children.start(SLEEP)
    assert watch.ending(0.05).may_have_written_anywhere
    os.kill(process.pid, signal.SIGKILL)
    assert not watch.ending(LIMIT_S).may_have_written_anywhere
    watch.close()
    assert watch.ending(LIMIT_S).may_have_written_anywhere, "closed"


def test_the_words_count_if_the_parent_does_not_look(children: Children) -> None:
    process, watch = children.start(NULL, is_waited_for=False)
    os.kill(process.pid, signal.SIGUSR1)
    watch._wait(select.POLLIN, time.monotonic() + LIMIT_S)
    assert watch.ending(0.05).text == "Segmentation fault"
    watch.close()


def test_a_process_that_is_gone_or_whose_number_is_used_again_is_not_trusted(
    children: Children,
) -> None:
    process, watch = children.start(SLEEP)
    stranger = DeathWatch(dataclasses.replace(process, start_ticks=process.start_ticks - 1))
    os.kill(process.pid, signal.SIGKILL)
    watch.ending(LIMIT_S)
    watch.close()
    for late in (stranger, DeathWatch(process)):
        ending = late.ending(0.05)
        assert ending.text == "it was not watched when it ended"
        assert ending.may_have_written_anywhere


def test_a_watch_leaves_no_open_files(children: Children) -> None:
    before = open_files()
    children.ending(SLEEP, signal.SIGKILL)
    assert not open_files() - before


# -- actors: with Ray's own handlers of signals, and the raylet as the parent ----------------------


class Rank:
    """Does what a rank does at its start, and then what it is told."""

    def __init__(self) -> None:
        self._process = mark_this_process("of-a-test-of-causes")
        enable_crash_report(self._process.mark_fd)

    def process(self) -> ProcessId:
        return self._process

    def do(self, deed: str) -> None:
        import ctypes

        exec(deed, {"ctypes": ctypes, "os": os, "libc": ctypes.CDLL(None)})


# What a wild write can do to the heap: from then on, no allocation of this process succeeds.
DESTROY_HEAP = """
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line)
ctypes.memset(int(heap.split("-")[0], 16) + 16, 0x41, 0x280)
while True:
    libc.malloc(40)
"""


DEEDS = {
    "segmentation fault": (NULL, CRASHED),
    "abort": ("libc.abort()", CRASHED),
    "destroyed heap": (DESTROY_HEAP, CRASHED),
    "SIGKILL": ("os.kill(os.getpid(), 9)", KILLED),
    "SIGTERM": ("os.kill(os.getpid(), 15)", EXITED),
    "exit": ("os._exit(3)", EXITED),
}


@pytest.fixture(scope="module")
def ranks(users_ray: None) -> dict[str, Any]:
    """An actor for each deed. They start at the same time."""
    return {name: ray.remote(num_cpus=0)(Rank).remote() for name in DEEDS}


@pytest.mark.engine
@pytest.mark.parametrize("name", DEEDS)
def test_the_ending_of_an_actor(
    ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    deed, kind = DEEDS[name]
    rank = ranks[name]
    process = ray.get(rank.process.remote(), timeout=60)
    watch = DeathWatch(process)
    assert Path(f"/proc/{process.pid}/task/{process.thread_id}").exists()
    assert process.thread_id != process.pid, "the kernel tells its end only with that of the others"
    rank.do.remote(deed)
    ending = watch.ending(LIMIT_S)
    monkeypatch.setattr(causes, "PIDFD_GET_INFO", UNKNOWN_REQUEST)
    ending_by_words = watch.ending(LIMIT_S)
    watch.close()
    end_local_processes([(process.pid, process.start_ticks)])  # in case it hangs
    assert ending.kind is (kind if KERNEL >= (6, 15) else ending_by_words.kind), ending
    assert ending_by_words.kind is (CRASHED if kind is CRASHED else KILLED), ending_by_words


# -- errors of living ranks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        WorkerError("rank 0: step 7: AcceleratorError: CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)"),
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Call to cuMemcpyDtoH results in CUDA_ERROR_ILLEGAL_ADDRESS",
        SystemError("error return without exception set"),
        WorkerError("rank 1: all_reduce failed: rank 0 runs another operation, or one of another"),
    ],
    ids=str,
)
def test_an_error_of_the_device_or_of_the_interpreter_spoils_the_memory(
    error: Exception | str,
) -> None:
    assert may_have_corrupted_memory(error if isinstance(error, str) else reason_of(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        StepTimeoutError("rank 0: step 7 of epoch 0 did not run in 60 s"),
        WorkerError("rank 1: all_reduce failed: rank 0 (process 17) has died"),
        "NCCL error: remote process exited or there was a network error\nncclRemoteError: A call",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits",
    ],
    ids=str,
)
def test_other_errors_leave_the_memory_as_it_was(error: Exception | str) -> None:
    assert not may_have_corrupted_memory(error if isinstance(error, str) else reason_of(error))
