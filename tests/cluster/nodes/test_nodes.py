"""Engines on Ray clusters of several nodes. Each cluster belongs to a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from configs.paths import DEFAULT_MODEL_DIR, SOURCE_ROOT
from kernels.cpu.cache import cache_dir
from tests.cluster.nodes import autoscaling
from tests.cluster.nodes.hosts import Host, hosts, why_not
from tests.cluster.nodes.losing_nodes import SOON_DEAD
from tests.cluster.processes import OURS, ray_folder, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.nodes]
NO_HOSTS = why_not()


def run(program: str, limit_s: float) -> str:
    command = [sys.executable, "-m", f"tests.cluster.nodes.{program}"]
    with ray_folder() as variables:
        done = subprocess.run(
            command,
            cwd=SOURCE_ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_engine_over_two_nodes_outlives_the_loss_of_either() -> None:
    assert "the driver's node" in run("losing_nodes", 300.0)


def test_a_model_with_experts_over_two_nodes_gives_the_tokens_of_transformers() -> None:
    assert "of 2 nodes equal" in run("experts", 120.0)


# A host has its own home directory.
ENVIRONMENT = os.environ | {
    "EAGLERAY_CACHE_DIR": str(cache_dir()),
    "PYTHONPATH": str(SOURCE_ROOT),
    "RAY_AUTH_MODE": "disabled",
}


RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def ray_hosts() -> Iterator[list[Host]]:
    """Three hosts that form a Ray cluster, with a CPU each."""
    with hosts(3) as made:
        [head, *others] = made

        def start_ray(host: Host) -> None:
            where = [f"--address={head.address}:6379"]
            if host is head:
                where = ["--head", "--port=6379", "--include-dashboard=false"]
            own = [f"--node-ip-address={host.address}", "--num-cpus=1", "--disable-usage-stats"]
            host.run(RAY, "start", *where, *own, env=ENVIRONMENT | SOON_DEAD)

        start_ray(head)
        with ThreadPoolExecutor() as threads:
            list(threads.map(start_ray, others))
        yield made


def nothing_of_ours_runs(host: Host) -> bool:
    return not any(command.startswith(OURS) for command in host.commands())


@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
def test_a_host_is_cut_off_and_comes_back(ray_hosts: list[Host]) -> None:
    """No connection is closed: the other side only falls silent. When it comes back, the processes
    there must end without disturbing the others.
    """
    head = ray_hosts[0]
    by_address = {host.address: host for host in ray_hosts}
    program = head.start(
        *(sys.executable, "-m", "tests.cluster.nodes.cut_off", head.address),
        cwd=SOURCE_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
    )
    assert program.stdin is not None and program.stdout is not None
    lines = []
    for line in program.stdout:
        lines.append(line)
        match line.split():
            case ["cut", address]:
                assert any("RankActor" in each for each in by_address[address].commands())
                by_address[address].pull_cable()
            case ["plug", address]:
                by_address[address].plug_cable()
            case ["look", "at", address]:
                gone = partial(nothing_of_ours_runs, by_address[address])
                wait_until(gone, "the end of what ran on the host that was cut off", 90.0)
            case _:
                continue
        program.stdin.write("done\n")
        program.stdin.flush()
    assert program.wait(30) == 0, "".join(lines)
    assert "tokens again after" in lines[-1]
    print(lines[-1])


@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
@pytest.mark.parametrize(
    ("program", "cpus_per_node", "said"),
    [("autoscaling", 2, "nodes were made"), ("growing", 1, "none failed")],
)
def test_the_autoscaler_makes_nodes_for_engines(
    program: str, cpus_per_node: int, said: str
) -> None:
    """For an engine that does not fit, and for the second replica of an application under load."""
    config = json.dumps(autoscaling.cluster_config(cpus_per_node))
    with hosts(1) as [host]:
        host.run("sh", "-c", f"echo '{config}' > /tmp/config.json")
        where = [f"--node-ip-address={host.address}", "--port=6379", "--num-cpus=0"]
        where += ["--autoscaling-config=/tmp/config.json", "--disable-usage-stats"]
        where += ["--include-dashboard=false"]
        host.run(RAY, "start", "--head", *where, env=ENVIRONMENT | autoscaling.ENVIRONMENT)
        run_it = [sys.executable, "-m", f"tests.cluster.nodes.{program}", host.address]
        printed = host.run(*run_it, cwd=SOURCE_ROOT, env=ENVIRONMENT, limit_s=280.0)
        assert said in printed
        print(printed.splitlines()[-1])


@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
def test_a_job_that_is_submitted_uses_the_cluster_it_runs_in() -> None:
    """Its working directory is sent without weights, so it names a model."""
    with hosts(1) as [host]:
        where = [f"--node-ip-address={host.address}", "--port=6379", "--num-cpus=2"]
        host.run(RAY, "start", "--head", *where, "--disable-usage-stats", env=ENVIRONMENT)
        job = [sys.executable, "launch.py", "generate", "What is 47 + 38?", "--tp", "2"]
        job += ["--model", str(DEFAULT_MODEL_DIR), "--device", "cpu"]
        submit = [RAY, "job", "submit", "--working-dir", str(SOURCE_ROOT), "--", *job]
        said = host.run(*submit, env=ENVIRONMENT, limit_s=250.0)
        assert "> What is 47 + 38?\n85\n" in said, said
