"""Several API processes of one engine, at one port: whichever is asked answers for all, and what
happens when one of them, the driver or the engine's process is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.commands import top
from tests.cluster.processes import command_of, connections, family, wait_until
from tests.cluster.serve.served import LONG, Program

# One process starts the engine for all of them.
pytestmark = [pytest.mark.engine, pytest.mark.programs]
NUM_APIS = 2
NUM_STREAMS, NUM_TOKENS = 8, 600
COUNTED = "eagleray_output_tokens_total"


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    size = ("--kv-cache-bytes", str(2**26), "--ray-address", "local", "--device", "cpu")
    program = Program(
        *size, "--api-replicas", str(NUM_APIS), "--stuck-after-s", "5", "--spares", "off"
    )
    try:
        program.wait_until_ready()
        # What it says later must not fill the pipe.
        threading.Thread(target=program.process.communicate, daemon=True).start()
        yield program
    finally:
        program.kill()


def named(program: Program, name: str) -> set[int]:
    """The processes of a server whose command line begins with `name`."""
    return {pid for pid in family(program.process.pid) if (command_of(pid) or "").startswith(name)}


def apis(program: Program) -> set[int]:
    return named(program, "ray::ServeReplica:eagleray:api")


@contextlib.contextmanager
def stopped(pids: set[int]) -> Iterator[None]:
    """Processes that do not run meanwhile, for less than `--stuck-after-s`."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def client_port(response: httpx.Response) -> int:
    port: int = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    return port


@contextlib.contextmanager
def client_of_each(program: Program) -> Iterator[dict[int, httpx.Client]]:
    """A client that is connected to each API process, by its pid."""
    by_pid: dict[int, httpx.Client] = {}
    # A new connection, which httpx makes after 5 s without use, may go to another process.
    stays_open = httpx.Limits(keepalive_expiry=None)
    with contextlib.ExitStack() as stack:
        while len(by_pid) < NUM_APIS:
            client = stack.enter_context(
                httpx.Client(base_url=program.url, timeout=30, limits=stays_open)
            )
            port = client_port(client.get("/live"))
            for pid in apis(program):
                if port in connections(pid, program.port):
                    by_pid[pid] = client
        yield by_pid


class Streams:
    """Texts that are streamed at the same time, each over a connection of its own."""

    def __init__(self, program: Program) -> None:
        self._url = f"{program.url}/v1/completions"
        self.num_tokens = [0] * NUM_STREAMS
        self.ports = [0] * NUM_STREAMS  # of the clients
        threads = ThreadPoolExecutor(NUM_STREAMS)
        self._ends: list[Future[str]] = [
            threads.submit(self._follow, place) for place in range(NUM_STREAMS)
        ]
        wait_until(lambda: min(self.num_tokens) > 3, "streaming", 30)

    def _follow(self, place: int) -> str:
        body = LONG | {"stream": True, "max_tokens": NUM_TOKENS, "seed": place}
        reason = last = ""
        try:
            with httpx.stream("POST", self._url, json=body, timeout=90) as answer:
                self.ports[place] = client_port(answer)
                for line in filter(None, answer.iter_lines()):
                    last = line
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        [choice] = event["choices"]
                        self.num_tokens[place] += len((choice["logprobs"] or {}).get("tokens", []))
                        reason = choice["finish_reason"] or ""
        except httpx.TransportError:
            return "lost"
        assert last == "data: [DONE]", last
        return reason

    def ends(self) -> list[str]:
        return [end.result(90) for end in self._ends]


def totals_of(client: httpx.Client) -> dict[str, float]:
    return top.read_metrics(str(client.base_url).rstrip("/")).totals


def counters_by(client: httpx.Client) -> dict[str, float]:
    """The counters that a process gives, over the connection to it."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_the_controller_looks_seldom_at_its_applications(program: Program) -> None:
    [controller] = named(program, "ray::ServeController")
    settings = Path(f"/proc/{controller}/environ").read_bytes().split(b"\0")
    assert b"RAY_SERVE_CONTROL_LOOP_INTERVAL_S=0.5" in settings


def test_each_process_answers_for_all_of_them(program: Program) -> None:
    with client_of_each(program) as clients:
        for number, client in enumerate(clients.values(), 1):
            asked: dict[str, Any] = {"prompt": "a", "max_tokens": number, "ignore_eos": True}
            client.post("/v1/completions", json=asked).raise_for_status()
        answered = 'eagleray_http_requests_total{path="/v1/completions",status="200"}'
        for client in clients.values():
            counters = counters_by(client)
            assert counters[answered] == NUM_APIS
            assert counters[COUNTED] == sum(range(1, NUM_APIS + 1))
            assert counters["eagleray_ready"] == 1, "there is one engine"
            assert client.get("/health").json()["state"] == "serving"
            assert client.get("/debug/trace").json()["traceEvents"]


def test_a_process_that_is_killed_takes_only_its_own_streams_with_it(program: Program) -> None:
    engine = named(program, "ray::Driver") | named(program, "ray::RankActor")
    with client_of_each(program) as clients:
        streams = Streams(program)  # after the clients are found, which takes as long as a stream
        with stopped(named(program, "ray::RankActor")):  # so that no stream ends before the kill
            lost, *others = clients
            of_lost = [port in connections(lost, program.port) for port in streams.ports]
            assert 0 < sum(of_lost) < NUM_STREAMS
            reported = counters_by(clients[others[0]])
            os.kill(lost, signal.SIGKILL)
        assert clients[others[0]].get("/health").status_code == 200
        assert counters_by(clients[others[0]])[COUNTED] >= reported[COUNTED] > NUM_STREAMS
        ends = streams.ends()
        assert ends == ["lost" if is_lost else "length" for is_lost in of_lost]
        for is_lost, num_tokens in zip(of_lost, streams.num_tokens, strict=True):
            assert is_lost or num_tokens == NUM_TOKENS
    wait_until(lambda: len(apis(program) - {lost}) == NUM_APIS, "the next process", 60)
    with client_of_each(program) as clients:
        after = [counters_by(client) for client in clients.values()]
        assert after[0][COUNTED] == after[1][COUNTED] >= reported[COUNTED]
    assert engine == named(program, "ray::Driver") | named(program, "ray::RankActor")


@pytest.mark.parametrize("lost", ["ray::Driver", "ray::ServeReplica:eagleray:engine"])
def test_streams_of_all_processes_outlive_what_they_share(program: Program, lost: str) -> None:
    streams = Streams(program)
    processes = apis(program)
    for pid in named(program, lost):
        os.kill(pid, signal.SIGKILL)
    assert streams.ends() == ["length"] * NUM_STREAMS
    assert streams.num_tokens == [NUM_TOKENS] * NUM_STREAMS
    assert apis(program) == processes
    with client_of_each(program) as clients:
        for client in clients.values():
            wait_until(lambda c=client: c.get("/health").status_code == 200, "the engine", 30)  # type: ignore[misc]


def test_streams_of_all_processes_are_finished_after_sigterm(program: Program) -> None:
    """The last test of this module."""
    with client_of_each(program) as clients:
        streams = Streams(program)  # after the clients are found, which takes as long as a stream
        os.killpg(program.process.pid, signal.SIGTERM)  # as `timeout` sends it
        for client in clients.values():
            wait_until(lambda c=client: c.get("/health").status_code == 503, "the drain", 10)  # type: ignore[misc]
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert streams.ends() == ["length"] * NUM_STREAMS
    assert program.process.wait(30) == 0
    wait_until(lambda: not family(program.process.pid), "the end of all its processes", 5.0)
