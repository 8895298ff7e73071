"""Served engines whose driver, replica or more is lost: who replaces it, and what clients see."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.cluster.processes import command_of, family, wait_until
from tests.cluster.serve.served import LONG, Program

pytestmark = [pytest.mark.engine, pytest.mark.programs]
SMALL = ("--kv-cache-bytes", str(2**26), "--ray-address", "local", "--device", "cpu")
NUM_STREAMS, NUM_TOKENS = 8, 300
# Longer than Ray Serve waits for a replica that says it is unhealthy.
LOAD_S = 20.0


def named(program: Program, name: str) -> set[int]:
    """The processes of a server whose command line begins with `name`."""
    return {pid for pid in family(program.process.pid) if (command_of(pid) or "").startswith(name)}


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]


class Streams:
    """Texts that are streamed over HTTP at the same time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_tokens = [0] * NUM_STREAMS
        self.ends = [""] * NUM_STREAMS
        self._threads = ThreadPoolExecutor(NUM_STREAMS)
        self._running = [self._threads.submit(self._follow, each) for each in range(NUM_STREAMS)]

    def _follow(self, number: int) -> None:
        asked = LONG | {"max_tokens": NUM_TOKENS, "stream": True, "temperature": 1.0, "seed": number}
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


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_streams_outlive_a_driver_whose_model_takes_long_to_load_again(
    start: Callable[..., Program], tmp_path: Path, fault: str
) -> None:
    program = start(*SMALL, "--stuck-after-s", "5", EAGLERAY_FAULTS=str(tmp_path))
    program.wait_until_ready()
    replicas = named(program, "ray::ServeReplica")
    [driver] = named(program, "ray::Driver")
    streams = Streams(program.url)
    wait_until(streams.all_run, "streaming", 30)
    (tmp_path / "load.0").write_text("stop")  # the next rank, while it loads
    os.kill(driver, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    wait_until((tmp_path / "load.0.fired").exists, "the next load", 30)
    had = sum(streams.num_tokens)
    time.sleep(LOAD_S)
    assert sum(streams.num_tokens) == had, "it loads"
    assert httpx.get(f"{program.url}/live", timeout=5).status_code == 200
    assert httpx.get(f"{program.url}/health", timeout=5).status_code == 503
    for rank in named(program, "ray::RankActor"):
        if state_of(rank) == "T":
            os.kill(rank, signal.SIGCONT)
    streams.wait(60)
    assert streams.num_tokens == [NUM_TOKENS] * NUM_STREAMS
    assert streams.ends == ["length"] * NUM_STREAMS
    assert named(program, "ray::ServeReplica") == replicas
