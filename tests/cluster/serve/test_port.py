"""Several processes at one port: who gets a connection, and what happens if one hangs or dies. The
processes, sockets and HTTP are real; only the tokens are scripted.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from cluster.serve.port import SharedPortMember, SharedPortOwner
from configs.paths import SOURCE_ROOT
from scheduler.errors import ConfigError, EngineError
from tests.cluster.processes import connections, wait_until
from tests.cluster.serve.port_process import NUM_TOKENS
from tests.cluster.serve.served import free_port

STREAM = {"prompt": "a", "max_tokens": 2 * NUM_TOKENS, "stream": True}
MAX_OPEN = 8


@dataclass
class Processes:
    """Processes at one port."""

    port: int
    running: list[subprocess.Popen[str]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> list[int]:
        """How many connections each has."""
        return [len(connections(process.pid, self.port)) for process in self.running]

    def place_of(self, response: httpx.Response) -> int:
        """Which process has the connection of a response."""
        _, client_port = response.extensions["network_stream"].get_extra_info("client_addr")
        taken = [connections(process.pid, self.port) for process in self.running]
        return next(place for place, ports in enumerate(taken) if client_port in ports)

    def send_signal(self, place: int, number: signal.Signals) -> None:
        self.running[place].send_signal(number)


Start = Callable[[int], Processes]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts so many processes at one port."""
    with contextlib.ExitStack() as stack:

        def start(num_processes: int) -> Processes:
            shared_port = SharedPortOwner("127.0.0.1", port := free_port(), num_processes)
            stack.callback(shared_port.close)
            command = [sys.executable, "-m", "tests.cluster.serve.port_process", shared_port.path]
            running = []
            for _ in range(num_processes):
                process = subprocess.Popen(
                    [*command, str(MAX_OPEN)], cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                running.append(process)
            for process in running:
                assert process.stdout is not None and process.stdout.readline()
            return Processes(port, running)

        yield start


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def test_each_of_several_processes_gets_about_as_many_connections(start: Start) -> None:
    processes = start(3)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connect(processes.port))
        wait_until(lambda: sum(processes.counts()) == 60, "all to be taken")
        assert min(processes.counts()) >= 14, processes.counts()


def test_a_process_that_hangs_gets_no_connection(start: Start) -> None:
    processes = start(2)
    processes.send_signal(0, signal.SIGSTOP)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(httpx.Client(timeout=5))
            assert client.get(f"{processes.url}/health").status_code == 200
    assert time.monotonic() - began_s < 10
    processes.send_signal(0, signal.SIGCONT)


def test_connections_that_wait_when_a_process_is_killed_are_taken_by_another(start: Start) -> None:
    processes = start(2)
    for place in range(2):
        processes.send_signal(place, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as threads:
        url = f"{processes.url}/health"
        waiting = [threads.submit(httpx.get, url, timeout=30) for _ in range(8)]
        time.sleep(0.5)
        processes.send_signal(0, signal.SIGKILL)
        processes.send_signal(1, signal.SIGCONT)
        assert [answer.result().status_code for answer in waiting] == [200] * 8


class Streams:
    """Streams from processes at one port."""

    def __init__(self, processes: Processes, number: int, max_tokens: int = 2 * NUM_TOKENS) -> None:
        self._url = f"{processes.url}/v1/completions"
        self._body = STREAM | {"max_tokens": max_tokens}
        self.num_events = [0] * number
        self._threads = ThreadPoolExecutor(number)
        self.ends: list[Future[str]] = [
            self._threads.submit(self._follow, place) for place in range(number)
        ]

    def _follow(self, place: int) -> str:
        last_line = ""
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", self._url, json=self._body, timeout=30) as answer,
        ):
            for line in answer.iter_lines():
                self.num_events[place] += line.startswith("data: {")
                last_line = line or last_line
        return last_line

    def wait_until_all_run(self) -> None:
        wait_until(lambda: min(self.num_events) > 3, "streaming", 20)


def test_streams_of_a_killed_process_end_and_those_of_the_others_go_on(start: Start) -> None:
    processes = start(2)
    streams = Streams(processes, 8, max_tokens=NUM_TOKENS // 2)
    streams.wait_until_all_run()
    lost, others = processes.counts()
    assert lost >= 2 <= others
    processes.send_signal(0, signal.SIGKILL)
    ends = [end.result(30) for end in streams.ends]
    assert ends.count("data: [DONE]") == others
    assert httpx.get(f"{processes.url}/health").status_code == 200


def test_the_limit_of_open_outputs_is_one_for_all_processes(start: Start) -> None:
    processes = start(2)
    streams = Streams(processes, MAX_OPEN)
    streams.wait_until_all_run()
    asked: set[int] = set()
    with contextlib.ExitStack() as stack:
        while asked != {0, 1}:
            client = stack.enter_context(httpx.Client(timeout=10))
            refused = client.post(f"{processes.url}/v1/completions", json=STREAM)
            assert refused.status_code == 503
            assert f"{MAX_OPEN} outputs are running or waiting, of {MAX_OPEN}" in refused.text
            asked.add(processes.place_of(refused))


def test_what_a_killed_process_had_open_counts_no_longer(start: Start) -> None:
    processes = start(2)
    streams = Streams(processes, MAX_OPEN)
    streams.wait_until_all_run()
    processes.send_signal(0, signal.SIGKILL)
    processes.running[0].wait(10)
    wait_until(lambda: _is_taken(processes), "room for another", 1.0)
    assert not all(end.done() for end in streams.ends), "those of the other process run"


def _is_taken(processes: Processes) -> bool:
    answer = httpx.post(f"{processes.url}/v1/completions", json=STREAM | {"max_tokens": 1})
    return answer.status_code == 200


def test_nothing_is_taken_before_the_first_process_has_joined() -> None:
    shared_port = SharedPortOwner("127.0.0.1", port := free_port(), 2)
    try:
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        share = SharedPortMember(shared_port.path)
        connect(port).close()
        assert len(share.listeners) == 1
    finally:
        shared_port.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            SharedPortOwner("127.0.0.1", port, 2)


def test_a_process_without_the_command_says_so() -> None:
    shared_port = SharedPortOwner("127.0.0.1", free_port(), 2)
    shared_port.close()
    with pytest.raises(EngineError, match="the port could not be shared"):
        SharedPortMember(shared_port.path)
