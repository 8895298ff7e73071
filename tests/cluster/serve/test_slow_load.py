"""Engines whose driver is lost, and whose model takes longer to load again than Ray Serve waits for
a replica that does not answer.

Two applications in one Ray lose a driver at the same time, so that they wait at the same time. The
last test ends one of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from cluster import timeouts
from cluster.serve.application import SHUTDOWN_WAIT_PERIOD_S, application
from cluster.timeouts import HEALTH_PERIOD_S, Timeouts
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from tests.cluster.processes import processes, state_of, wait_until
from tests.cluster.serve.served import NUM_STREAMS, NUM_TOKENS, Streams, free_port, stats_of
from workers import faults

pytestmark = [pytest.mark.engine, pytest.mark.programs]
ENGINE = EngineConfig(device="cpu", kv_cache_bytes=2**26, stuck_after_s=2.0, spares="off")


class SlowLoad:
    """An application with faults of its own, one of whose drivers is lost."""

    def __init__(self, name: str, folder: Path, serve_url: str, num_engines: int) -> None:
        """Start it. One engine listens itself, several answer through Ray Serve's proxy."""
        address = ("127.0.0.1", free_port())
        config = ServeConfig(
            engine=ENGINE,
            replicas=num_engines,
            listen_address=address if num_engines == 1 else None,
        )
        self.url = f"http://127.0.0.1:{address[1]}" if num_engines == 1 else f"{serve_url}/{name}"
        self._titles = f"ray::ServeReplica:{name}"
        self._load = folder / "load.0"
        others = processes("ray::Driver")
        serve.run(application(config), name=name, route_prefix=f"/{name}")
        self._driver = min(processes("ray::Driver") - others)
        self.replicas = self.replicas_now()

    def replicas_now(self) -> set[int]:
        return processes(self._titles)

    def ranks(self) -> set[int]:
        """Those that may run into its faults."""
        variable = f"{faults.FAULTS_VARIABLE}={self._load.parent}".encode()
        return {
            pid
            for pid in processes("ray::RankActor")
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        }

    def lose_driver(self, number: signal.Signals) -> None:
        """Its first rank will stop while it loads the model again."""
        self._load.write_text("stop")
        os.kill(self._driver, number)

    def is_loading(self) -> bool:
        return self._load.with_name(f"{self._load.name}.fired").exists()


class WithStreams(SlowLoad):
    """With one engine, which has streams when it loses its driver."""

    def __init__(self, name: str, folder: Path, serve_url: str) -> None:
        super().__init__(name, folder, serve_url, num_engines=1)
        self.num_tokens = list[int]()  # of all streams: when the load began, and when it went on
        self.statuses: dict[str, int] = {}  # while the model was loaded

    def lose_driver(self, number: signal.Signals) -> None:
        self.streams = Streams(self.url)
        wait_until(self.streams.all_run, "streaming", 30)
        super().lose_driver(number)

    def count_tokens(self) -> None:
        self.num_tokens.append(sum(self.streams.num_tokens))

    def ask_how_it_is(self) -> None:
        for path in ("/live", "/health"):
            self.statuses[path] = httpx.get(f"{self.url}{path}", timeout=5).status_code


@pytest.fixture(scope="module")
def slow_loads(
    served: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SlowLoad]]:
    """Applications that have lost a driver, and whose model has been loaded since, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "MIN_HEALTH_TIMEOUT_S", 1.0)
        patch.setattr(timeouts, "HEALTH_MARGIN_S", 0.5)
        load_s = Timeouts.from_options(ENGINE).replica_silence_s + 2 * HEALTH_PERIOD_S

        def folder(name: str) -> Path:
            path = tmp_path_factory.mktemp(name)
            patch.setenv(faults.FAULTS_VARIABLE, str(path))
            return path

        several = SlowLoad("several", folder("several"), served[0], num_engines=2)
        single = WithStreams("single", folder("single"), served[0])
    loads = {"several": several, "single": single}
    single.lose_driver(signal.SIGSTOP)
    several.lose_driver(signal.SIGKILL)
    for name, load in loads.items():
        wait_until(load.is_loading, f"the next load of {name!r}", 30)
    single.count_tokens()
    time.sleep(load_s)
    single.count_tokens()
    single.ask_how_it_is()
    for rank in processes("ray::RankActor"):
        if state_of(rank) == "T":
            os.kill(rank, signal.SIGCONT)
    yield loads
    with ThreadPoolExecutor(len(loads)) as threads:
        list(threads.map(serve.delete, loads.keys() & serve.status().applications.keys()))


def test_streams_outlive_a_driver_whose_model_takes_long_to_load_again(
    slow_loads: dict[str, SlowLoad],
) -> None:
    load = slow_loads["single"]
    assert isinstance(load, WithStreams)
    assert load.num_tokens[0] == load.num_tokens[1] < NUM_STREAMS * NUM_TOKENS, "it loaded"
    assert load.statuses == {"/live": 200, "/health": 503}
    load.streams.wait(60)
    assert load.streams.num_tokens == [NUM_TOKENS] * NUM_STREAMS
    assert load.streams.ends == ["length"] * NUM_STREAMS
    assert load.replicas_now() == load.replicas


def test_one_of_several_engines_is_not_ended_while_its_model_loads_again(
    slow_loads: dict[str, SlowLoad],
) -> None:
    load = slow_loads["several"]
    wait_until(lambda: stats_of(load.url)["eagleray_ready"] == 2, "both engines", 30)
    assert load.replicas_now() == load.replicas


def test_streams_of_a_replica_that_listens_itself_end_before_ray_serve_ends_it(
    slow_loads: dict[str, SlowLoad],
) -> None:
    """As when another program ends the application, of which this one knows nothing. Ray Serve
    itself sees no request, and would end the replica after `SHUTDOWN_WAIT_PERIOD_S`. The last test
    of this application.
    """
    load = slow_loads["single"]
    streams = Streams(load.url)
    wait_until(streams.all_run, "streaming", 30)
    ranks = load.ranks()
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    ending = threading.Thread(target=serve.delete, args=("single",))
    ending.start()
    time.sleep(15 * SHUTDOWN_WAIT_PERIOD_S)  # less than `stuck_after_s`
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    streams.wait(60)
    ending.join(60)
    assert streams.num_tokens == [NUM_TOKENS] * NUM_STREAMS
    assert "single" not in serve.status().applications
