"""A local Ray of our own starts only what engines use; the methods that are replaced for that are
restored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray._private.node import Node

from cluster.resources import local_ray
from cluster.resources.local_ray import IDLE_PROCESS_STARTERS, LOCAL_RAY_SETTINGS, minimal_local_ray
from configs.paths import SOURCE_ROOT
from tests.cluster.processes import wait_until

PROGRAM = """
import os, ray
from cluster.resources.session import SESSION
from tests.cluster.processes import command_of, descendants

lease = SESSION.connect("local", 1)
print(ray.get(ray.remote(lambda: "it works").remote()))
for pid in descendants(os.getpid()):
    print(command_of(pid))
SESSION.release(lease)
"""


@pytest.mark.engine
def test_a_local_ray_starts_no_process_that_engines_do_not_use() -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RAY_AUTH_MODE": ""},
    )
    assert program.returncode == 0, program.stderr
    assert program.stdout.startswith("it works\n")
    assert "gcs_server" in program.stdout and "raylet" in program.stdout
    for name in ("dashboard.py", "monitor.py"):  # the monitors of the autoscaler and of the logs
        assert name not in program.stdout


OF_A_THREAD = """
import os, signal, sys, threading, time
from cluster import LLM, SamplingParams
from scheduler.errors import EngineError

made = []
thread = threading.Thread(target=lambda: made.append(LLM(spares="off")))
thread.start()
thread.join()
[llm] = made


def say_why_not(use):
    try:
        use()
    except EngineError as error:
        print("child:", error, flush=True)


time.sleep(1.0)  # the system would end Ray with the thread
with llm:
    if (child := os.fork()) == 0:
        signal.alarm(20)
        say_why_not(lambda: llm.generate(["2 + 2"]))
        say_why_not(lambda: LLM(spares="off"))
        llm.shutdown()
        os._exit(0)
    print("child ended", os.waitpid(child, 0)[1], flush=True)
    print("tokens", len(llm.generate(["2 + 2"], SamplingParams(max_tokens=4))[0].token_ids))
"""


@pytest.mark.engine
@pytest.mark.programs
def test_an_engine_outlives_its_thread_and_is_not_that_of_a_forked_process() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", OF_A_THREAD],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RAY_AUTH_MODE": "", "RAY_ADDRESS": "local"},
    )
    said, _ = program.communicate(timeout=120)
    assert program.returncode == 0
    lines = said.splitlines()
    assert len(lines) == 4 and all("was forked from one that has an engine" in x for x in lines[:2])
    assert lines[2:] == ["child ended 0", "tokens 4"]
    wait_until(lambda: not in_session(program.pid), "the end of all processes", 10.0)


FORKS = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.005)
"""


def test_whoever_starts_processes_while_it_is_ended_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill = os.kill

    def kill_late(pid: int, number: int) -> None:
        """Another process gets the processor first."""
        if number == signal.SIGKILL:
            time.sleep(0.05)
        kill(pid, number)

    program = subprocess.Popen([sys.executable, "-S", "-c", FORKS], start_new_session=True)
    wait_until(lambda: len(in_session(program.pid)) > 1, "the first fork")
    monkeypatch.setattr(os, "kill", kill_late)
    local_ray._kill_with_descendants(program.pid)
    program.wait()
    # They are in its session, whoever their parent is now.
    wait_until(lambda: not in_session(program.pid), "the end of all processes", 2.0)


def in_session(session: int) -> list[int]:
    """The living processes of a session."""
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its_session = path.read_text().rsplit(") ", 1)[1].split()[:4]
            if int(its_session) == session and state not in "ZX":
                living.append(int(path.parent.name))
    return living


# Ray ends a program like this one, without a word, when it leaves a raylet that is dead.
ORPHAN = """
import os, signal, time, ray
from cluster.resources.local_ray import check_local_ray_alive
from cluster.resources.session import SESSION
from scheduler.errors import EngineError

deadline_s = time.monotonic() + 10
while os.getppid() != 1 and time.monotonic() < deadline_s:
    time.sleep(0.01)
if os.getppid() != 1:
    raise SystemExit("its parent is not process 1")
lease = SESSION.connect("local", 1)
for name, process in ray._private.worker._global_node.live_processes():
    if name == "raylet":
        os.kill(process.pid, signal.SIGKILL)
while True:
    try:
        check_local_ray_alive()
    except EngineError as error:
        reason = error
        break
    time.sleep(0.01)
SESSION.release(lease)
print(reason)
"""


@pytest.mark.engine
def test_a_program_below_process_1_can_say_that_its_ray_has_died(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["sh", "-c", '"$@" &', "sh", sys.executable, "-c", ORPHAN],
            cwd=SOURCE_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert shell.wait() == 0
    wait_until(lambda: not in_session(shell.pid), "the end of all processes", 120.0)
    said = output.read_text()
    if "its parent is not process 1" in said:
        pytest.skip("something else than process 1 takes orphans here")
    assert "a process of Ray has died: raylet" in said, said


def test_the_environment_and_the_class_of_ray_are_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "7")
    methods = {name: getattr(Node, name) for name in IDLE_PROCESS_STARTERS}
    before = dict(os.environ)
    with pytest.raises(KeyError), minimal_local_ray():
        assert dict(os.environ)["RAY_worker_niceness"] == "7"
        assert LOCAL_RAY_SETTINGS.keys() <= os.environ.keys()
        assert not any(getattr(Node, name) is method for name, method in methods.items())
        raise KeyError
    assert dict(os.environ) == before
    assert {name: getattr(Node, name) for name in IDLE_PROCESS_STARTERS} == methods


def test_a_ray_without_such_a_method_is_not_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "IDLE_PROCESS_STARTERS", ("start_something_else",))
    with minimal_local_ray():
        assert not hasattr(Node, "start_something_else")
