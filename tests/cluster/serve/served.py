"""What the tests of served applications share."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import httpx

from cluster.commands import top
from configs.paths import SOURCE_ROOT
from tests.cluster.processes import TEST_PROCESS, command_of, family

# Logprobs make every token an event, whether or not it has text.
LONG = {"prompt": "<|im_start|>user\n", "max_tokens": 900, "ignore_eos": True, "logprobs": 0}
NUM_STREAMS, NUM_TOKENS = 16, 300


_NUM_PORTS = 1000
_FIRST_PORT = 20_000 + _NUM_PORTS * TEST_PROCESS
# Other tests of this machine that run at the same time probably begin elsewhere.
_ports = itertools.islice(
    itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + _NUM_PORTS)), os.getpid() % _NUM_PORTS, None
)


def free_port() -> int:
    """A port that nobody uses, below those that Linux hands out: another process, such as one of
    Ray, could get one of these before it is used.
    """
    for port in itertools.islice(_ports, _NUM_PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"all of {_NUM_PORTS} ports are in use")


def stats_of(url: str) -> dict[str, float]:
    """The numbers of all engines and of the API, added up."""
    return top.read_metrics(url).totals


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


class Streams:
    """Texts that are streamed over HTTP at the same time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_tokens = [0] * NUM_STREAMS
        self.ends = [""] * NUM_STREAMS
        self._threads = ThreadPoolExecutor(NUM_STREAMS)
        self._running = [self._threads.submit(self._follow, each) for each in range(NUM_STREAMS)]

    def _follow(self, number: int) -> None:
        asked = LONG | {
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "temperature": 1.0,
            "seed": number,
        }
        with httpx.stream("POST", f"{self._url}/v1/completions", json=asked, timeout=90) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    [choice] = event["choices"]
                    self.num_tokens[number] += len((choice["logprobs"] or {}).get("tokens", []))
                    self.ends[number] = choice["finish_reason"] or ""

    def all_run(self) -> bool:
        return min(self.num_tokens) > 3

    def wait(self, limit_s: float) -> None:
        done, _ = wait(self._running, limit_s)
        assert len(done) == NUM_STREAMS, self.num_tokens
        for each in done:
            each.result()


class Program:
    """`launch.py serve` in a process of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "launch.py", "serve", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=SOURCE_ROOT,
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
