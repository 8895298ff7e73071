"""`launch.py status` and `launch.py down NAME`: the served engines of a running Ray cluster.

An engine that should outlive the program that started it is a Ray Serve application: Serve keeps it
running, and starts it again when its node is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.serve.schema import ApplicationStatusOverview
from rich.console import Console
from rich.table import Table

from cluster.resources.session import SESSION, find_address
from cluster.serve.engine import NAME, EngineStatus
from cluster.serve.lifetime import Application
from scheduler.errors import ConfigError

ANSWER_TIMEOUT_S = 5.0


def run_status(address: str | None) -> None:
    """Print one line per replica. Raises `ConfigError` without a cluster."""
    with _joined(address):
        table = Table("NAME", "STATUS", "MODEL", "TP", "DEVICE", "NODES", "RANKS", "RUN", "WAIT")
        for name, application in sorted(_engines().items()):
            replicas = _replicas(name)
            for each in replicas:
                nodes = ", ".join(sorted(set(each.hosts)))
                what = (each.model, str(len(each.hosts)), each.device, nodes, each.state)
                work = (str(each.num_running), str(each.num_waiting))
                table.add_row(name, application.status, *what, *work)
            if not replicas:
                table.add_row(name, application.status)
        Console(width=max(120, Console().width)).print(table)


def run_down(name: str, address: str | None) -> None:
    """End one engine, after its running requests have finished. Raises `ConfigError` if there is
    none, `EngineError` if it does not end in time.
    """
    with _joined(address):
        engines = _engines()
        if name not in engines:
            known = ", ".join(sorted(engines)) or "none"
            raise ConfigError(f"no engine named {name!r} runs in this cluster; running: {known}")
        Application(name).finish()


@contextmanager
def _joined(address: str | None) -> Iterator[None]:
    found = find_address(address)
    if found == "local":
        raise ConfigError(
            "no Ray cluster runs on this machine; name one with --ray-address or RAY_ADDRESS"
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    lease = SESSION.connect(found, 1)
    try:
        yield
    finally:
        SESSION.release(lease)


def _engines() -> dict[str, ApplicationStatusOverview]:
    """The applications of Serve that are engines, by name."""
    return {
        name: application
        for name, application in serve.status().applications.items()
        if NAME in application.deployments
    }


def _replicas(name: str) -> list[EngineStatus]:
    """The engines of an application that answer."""
    try:
        handle = serve.get_app_handle(name)
        found: list[EngineStatus] = handle.describe.remote().result(timeout_s=ANSWER_TIMEOUT_S)
    except Exception as error:  # a replica that starts or has died
        logging.getLogger("eagleray").warning("%s does not answer: %s", name, error)
        return []
    return found
