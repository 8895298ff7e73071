"""A local Ray of our own starts only what engines use; the methods that are replaced for that are
restored.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray._private.node import Node

from cluster.resources import local_ray
from cluster.resources.local_ray import IDLE_PROCESSES, LOCAL_RAY, only_what_engines_use
from configs.paths import CHECKOUT

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
        cwd=CHECKOUT,
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


def test_the_environment_and_the_class_of_ray_are_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "7")
    methods = {name: getattr(Node, name) for name in IDLE_PROCESSES}
    before = dict(os.environ)
    with pytest.raises(KeyError), only_what_engines_use():
        assert dict(os.environ)["RAY_worker_niceness"] == "7"
        assert LOCAL_RAY.keys() <= os.environ.keys()
        assert not any(getattr(Node, name) is method for name, method in methods.items())
        raise KeyError
    assert dict(os.environ) == before
    assert {name: getattr(Node, name) for name in IDLE_PROCESSES} == methods


def test_a_ray_without_such_a_method_is_not_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "IDLE_PROCESSES", ("start_something_else",))
    with only_what_engines_use():
        assert not hasattr(Node, "start_something_else")
