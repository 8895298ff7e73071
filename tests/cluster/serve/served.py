"""What the tests of served applications share."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from cluster.commands import top
from configs.paths import CHECKOUT
from tests.cluster.processes import command_of, family

# Logprobs make every token an event, whether or not it has text.
LONG = {"prompt": "<|im_start|>user\n", "max_tokens": 900, "ignore_eos": True, "logprobs": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def stats_of(url: str) -> dict[str, float]:
    """The numbers of all engines and of the API, added up."""
    return top.read(url).totals


def num_leases() -> list[int]:
    """How many requests each engine has, as Ray Serve sees it."""
    import ray
    from ray.util import list_named_actors

    replicas = [
        ray.get_actor(each["name"], namespace=each["namespace"])
        for each in list_named_actors(all_namespaces=True)
        if each["name"].startswith("SERVE_REPLICA::eagleray#engine#")
    ]
    found: list[int] = ray.get(
        [replica.get_num_ongoing_requests.remote() for replica in replicas], timeout=10
    )
    return found


def wait_until_idle(url: str, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while True:
        numbers = stats_of(url)
        if numbers["eagleray_num_requests_running"] == numbers["eagleray_http_outputs_open"] == 0:
            assert numbers["eagleray_kv_blocks_free"] == numbers["eagleray_kv_blocks"]
            if not any(num_leases()):
                return
        assert time.monotonic() < until, (num_leases(), numbers)
        time.sleep(0.1)


class Program:
    """`launch.py serve` in a process of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "launch.py", "serve", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill it and whatever it has started, unless it has ended and another process has its
        number by now.
        """
        if self.process.poll() is not None and command_of(self.process.pid) is not None:
            return
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready on"):
                return
        raise AssertionError("it ended")
