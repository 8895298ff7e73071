"""Served engines whose driver, replica or more is lost: who replaces it, and what clients see."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from cluster.serve.lifetime import RunningApplication
from configs.paths import DEFAULT_MODEL_DIR
from tests.cluster.processes import OURS, command_of, family, processes, wait_until
from tests.cluster.serve.served import Program
from tests.test_launch import invoke

pytestmark = [pytest.mark.engine, pytest.mark.programs]
SMALL = ("--kv-cache-bytes", str(2**26), "--device", "cpu")
WITHOUT_SPARES = (*SMALL, "--spares", "off")
# How soon a server ends that has lost its engine for good.
END_S = 30.0


def named(program: Program, name: str) -> set[int]:
    """The processes of a server whose command line begins with `name`."""
    return {pid for pid in family(program.process.pid) if (command_of(pid) or "").startswith(name)}


def said_until(program: Program, text: str) -> str:
    """What it has said since it was ready, up to the line with this text."""
    assert program.process.stdout is not None
    said = ""
    for line in program.process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without {text!r}: {said}")


def what_is_left(program: Program) -> str:
    """What it has said since it was ready; it has ended, and so have all its processes."""
    assert program.process.stdout is not None
    said = program.process.stdout.read()
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)
    assert "Traceback" not in said, said
    return said


CANNOT_START = "error: the engine was lost and could not be started again: "


def test_a_server_whose_engine_cannot_start_again_says_why_in_one_line_and_ends(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    model = shutil.copytree(DEFAULT_MODEL_DIR, tmp_path / "model")
    program = start(*SMALL, "--ray-address", "local", "--model", str(model))
    program.wait_until_ready()
    shutil.rmtree(model)
    for pid in named(program, "ray::Driver"):
        os.kill(pid, signal.SIGKILL)
    assert program.process.wait(END_S) == 1
    ours = [line for line in what_is_left(program).splitlines() if "(raylet)" not in line]
    [said] = [line for line in ours if line.strip()]
    assert said.startswith(CANNOT_START)
    assert "has no checkpoint at" in said and str(model) in said


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("lost", ["ray::RankActor", "ray::ServeReplica"])
def test_so_does_the_command_in_a_cluster_whichever_process_was_lost(
    served: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    """The command runs in this process, which is part of the cluster."""
    model = shutil.copytree(DEFAULT_MODEL_DIR, tmp_path / "model")
    others = processes(*OURS, "ray::ServeReplica")
    watch, watches = RunningApplication.watch, threading.Event()

    def watch_and_tell(application: RunningApplication, stop_event: threading.Event) -> None:
        watches.set()
        watch(application, stop_event)

    def lose() -> float:
        """When the process was lost."""
        try:
            assert watches.wait(60)
            for path in model.glob("*.safetensors"):
                path.unlink()
            for pid in processes(lost) - others:
                os.kill(pid, signal.SIGKILL)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)  # otherwise the command would go on
            raise
        return time.monotonic()

    monkeypatch.setattr(RunningApplication, "watch", watch_and_tell)
    where = ("--ray-address", ray.get_runtime_context().gcs_address, "--route-prefix", "/lost")
    with ThreadPoolExecutor(1) as threads:
        losing = threads.submit(lose)
        run = invoke("serve", "--model", model, "--name", "lost", *where, *WITHOUT_SPARES)
        assert time.monotonic() - losing.result() < END_S
    lines = run.stderr.splitlines()
    [place] = [number for number, line in enumerate(lines) if line.startswith("ready on")]
    [said] = lines[place + 1 :]
    assert run.exit_code == 1 and said.startswith(CANNOT_START)
    assert "holds no *.safetensors file" in said and str(model) in said
    wait_until(lambda: processes(*OURS, "ray::ServeReplica") <= others, "the end of it", 5.0)


@pytest.mark.parametrize(
    ("killed", "lost"), [("gcs_server", "gcs_server"), ("ray::RuntimeEnvAgent", "raylet")]
)
def test_a_server_whose_own_ray_loses_a_process_says_so_and_ends(
    start: Callable[..., Program], killed: str, lost: str
) -> None:
    program = start(*WITHOUT_SPARES, "--ray-address", "local")
    program.wait_until_ready()
    for pid in family(program.process.pid):
        if Path((command_of(pid) or "").split(" ")[0]).name == killed:
            os.kill(pid, signal.SIGKILL)
    said, _ = program.process.communicate(timeout=END_S)  # Ray says more than a pipe holds
    assert program.process.returncode == 1
    assert said.rstrip().splitlines()[-1] == f"error: a process of Ray has died: {lost}"
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """A server of which the replica is harmed in one test after another."""
    program = Program(*WITHOUT_SPARES, "--ray-address", "local", "--drain-timeout-s", "1")
    try:
        program.wait_until_ready()
        yield program
    finally:
        program.kill()


def test_a_server_whose_replica_is_killed_again_and_again_goes_on(program: Program) -> None:
    def answers() -> bool:
        try:
            return httpx.get(f"{program.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    for _ in range(2):
        ours = named(program, "ray::ServeReplica")
        for replica in ours:
            os.kill(replica, signal.SIGKILL)
        wait_until(lambda ours=ours: not named(program, "ray::ServeReplica") & ours, "its end")  # type: ignore[misc]
        wait_until(answers, "the next replica", 60)
        assert program.process.poll() is None
        # Until then, the next loss would be part of this one.
        said = said_until(program, "every replica serves again")
        assert said.count("is lost, Ray Serve") == 1 and "Traceback" not in said, said


def test_a_server_whose_controller_is_killed_keeps_its_replica(program: Program) -> None:
    replicas = named(program, "ray::ServeReplica")
    [controller] = named(program, "ray::ServeController")
    os.kill(controller, signal.SIGKILL)
    wait_until(lambda: bool(named(program, "ray::ServeController") - {controller}), "another", 60)
    until = time.monotonic() + 8.0  # in which the next one looks at the replica
    while time.monotonic() < until:
        assert httpx.get(f"{program.url}/health", timeout=5).status_code == 200
        time.sleep(0.1)
    assert named(program, "ray::ServeReplica") == replicas
    assert program.process.poll() is None


def test_a_server_whose_replica_hangs_ends_soon_after_sigterm(program: Program) -> None:
    """The last test of this server."""
    [replica] = named(program, "ray::ServeReplica")
    os.kill(replica, signal.SIGSTOP)
    program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(30) == 0
    assert "not every replica could be drained" in what_is_left(program)
