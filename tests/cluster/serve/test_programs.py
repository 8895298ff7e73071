"""Serving from the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from cluster.ranks.cores import usable_cores
from cluster.serve import run as serve_run
from configs.paths import SOURCE_ROOT
from configs.serve import ServeConfig
from scheduler.errors import ConfigError
from tests.cluster.conftest import SmallModel
from tests.cluster.processes import command_of, cores_of_computing_threads, family, wait_until
from tests.cluster.serve.served import LONG, Program, free_port
from tests.test_launch import Run, invoke

pytestmark = [pytest.mark.engine, pytest.mark.programs]


@pytest.fixture
def own_folder() -> Iterator[str]:
    """A folder for temporary files, whose path is short because sockets are among them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def test_replicas_divide_the_cores_and_more_than_one_signal_ends_them_within_five_seconds(
    start: Callable[..., Program], own_folder: str
) -> None:
    size = ("--kv-cache-bytes", str(2**26), "--replicas", "2", "--spares", "off")
    program = start(*size, "--ray-address", "local", TMPDIR=own_folder)
    program.wait_until_ready()
    here = family(program.process.pid)
    ranks = [pid for pid in here if (command_of(pid) or "").startswith("ray::RankActor")]
    if len(cores := usable_cores()) > 1:
        half = len(cores) // 2
        wait_until(
            lambda: (
                {frozenset(c) for p in ranks for c in cores_of_computing_threads(p)}
                == {frozenset(cores[:half]), frozenset(cores[half : 2 * half])}
            ),
            "each to have half of the cores",
        )
    with httpx.stream(
        "POST", f"{program.url}/v1/completions", json=LONG | {"stream": True}, timeout=60
    ) as got:
        assert next(got.iter_lines()).startswith("data: ")
        program.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 5
        while program.process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
            program.process.send_signal(signal.SIGINT)  # of somebody impatient
        assert program.process.poll() == 130
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "8", "--replicas", "2"], "does not have the resources for 2 replicas"),
        (["--tp", "1"], "an application named 'eagleray' runs in this Ray cluster already"),
    ],
)
@pytest.mark.usefixtures("restored")
def test_a_cluster_that_is_joined_is_looked_at_first(
    served: tuple[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    import ray

    def start(*_: object, **__: object) -> None:
        raise AssertionError("the application would have been started")

    monkeypatch.setattr(serve_run, "_start", start)
    where = ["--ray-address", ray.get_runtime_context().gcs_address, "--port", free_port()]
    invoke("serve", *where, "--device", "cpu", *arguments).check_one_message(message)


@pytest.mark.usefixtures("restored")
def test_two_engines_are_started_listed_asked_and_ended_apart(
    served: tuple[str, Any], small_model: SmallModel
) -> None:
    """The commands that change the cluster run as programs, those that do not in this process."""
    import ray
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    url, _ = served
    address = ray.get_runtime_context().gcs_address
    small = ["--model", str(small_model.path), "--device", "cpu", "--spares", "off"]
    other = ["--name", "other", "--tp", "2", *small]

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "launch.py", *arguments, "--ray-address", address]
        return subprocess.run(
            command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    def launch_here(*arguments: str) -> Run:
        return invoke(*arguments, "--ray-address", address)

    taken = launch_here("serve", *other, "--port", url.rpartition(":")[2], "--detach")
    taken.check_refused('Failed to deploy application "other". Choose another --route-prefix\n')
    started = launch("serve", *other, "--route-prefix", "/other", "--detach")
    assert started.returncode == 0, started.stderr
    listed = launch_here("status")
    rows = [line.split() for line in listed.stdout.splitlines() if "RUNNING" in line]
    assert [row[1] for row in rows] == ["eagleray", "eagleray", "other"], listed.stdout
    assert "tiny" in rows[0] and small_model.path.name in rows[2] and "serving" in rows[2]
    asked = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/other/v1/completions", json=asked, timeout=20)
    assert answer.status_code == 200, answer.text
    assert httpx.get(f"{url}/other/v1/models").json()["data"][0]["id"] == small_model.path.name
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    names_of_placed = [
        group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"
    ]
    assert any(name.startswith("SERVE_REPLICA::other#engine#") for name in names_of_placed)
    more = placement_group([{"CPU": 1.0}] * 1000, name="SERVE_REPLICA::other#engine#more")
    waiting = launch_here("status").stdout.splitlines()[-1]
    remove_placement_group(more)
    assert waiting.startswith("other: there is no room yet for tensor_parallel_size 1000: needed")
    assert "there is no room" not in launch_here("status").stdout
    launch_here("down", "another").check_refused("running: eagleray, other")
    assert launch("down", "other").returncode == 0
    assert "other" not in launch_here("status").stdout
    assert httpx.get(f"{url}/health").status_code == 200


def test_the_file_for_serve_deploy_builds_the_application_it_says() -> None:
    file = yaml.safe_load((SOURCE_ROOT / "configs" / "serve.yaml").read_text())
    [application] = file["applications"]
    assert application["import_path"] == "cluster.serve.application:build"
    config = ServeConfig.from_dict(application["args"])
    assert config.engine.tensor_parallel_size == 2 and config.model_name == "default_model"
    with pytest.raises(ConfigError, match="unknown serving option 'tensor_parallel_size'"):
        ServeConfig.from_dict({"tensor_parallel_size": 2})
