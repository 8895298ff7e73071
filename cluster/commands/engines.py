"""`launch.py status` and `launch.py down NAME`: the served engines of a running Ray cluster.

An engine that should outlive the program that starts it is a Ray Serve application: Serve keeps it
running, and starts it again when its node is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from rich.console import Console
from rich.table import Table

from cluster.resources.session import SESSION, find_address
from cluster.serve.engine import DEPLOYMENT_NAME, EngineStatus
from cluster.serve.lifetime import (
    RunningApplication,
    has_no_running_replica,
    reported_reason,
    shortage_of_application,
)
from scheduler.errors import ConfigError

ANSWER_TIMEOUT_S = 5.0


def run_status(address: str | None) -> None:
    """Print a line per engine, or per application of which none answers; then what applications
    wait for, and what Serve says of them. Raises `ConfigError` without a cluster.
    """
    with _cluster_connection(address):
        table = Table("NAME", "STATUS", "MODEL", "TP", "DEVICE", "NODES", "RANKS", "RUN", "WAIT")
        remarks = []
        for name, application in sorted(_applications().items()):
            lacks_running_replica = any(
                map(has_no_running_replica, application.deployments.values())
            )
            engines = [] if lacks_running_replica else _engine_statuses(name)
            for engine in engines:
                hosts = ", ".join(sorted(set(engine.hosts)))
                num_ranks, counts = len(engine.hosts), (engine.num_running, engine.num_waiting)
                cells = (engine.model, num_ranks, engine.device, hosts, engine.state, *counts)
                table.add_row(name, application.status, *map(str, cells))
            if not engines:
                table.add_row(name, application.status)
            reasons = [shortage_of_application(name)]
            if application.status != ApplicationStatus.RUNNING:
                reasons.append(reported_reason(application, default=""))
            remarks += [f"{name}: {reason}" for reason in reasons if reason]
        console = Console(width=max(120, Console().width))
        console.print(table)
        for remark in remarks:
            console.print(remark, markup=False, highlight=False, soft_wrap=True)


def run_down(name: str, address: str | None) -> None:
    """End one application with its engines, after their running requests have finished. Raises
    `ConfigError` if there is none, `EngineError` if it does not end in time, or Serve not answer.
    """
    with _cluster_connection(address):
        applications = _applications()
        if name not in applications:
            running_names = ", ".join(sorted(applications)) or "none"
            raise ConfigError(
                f"no engine named {name!r} runs in this cluster; running: {running_names}"
            )
        RunningApplication(name).finish()


@contextmanager
def _cluster_connection(address: str | None) -> Iterator[None]:
    """A connection to the Ray cluster for the block. Raises `ConfigError` without a cluster."""
    cluster_address = find_address(address)
    if cluster_address == "local":
        raise ConfigError(
            "no Ray cluster runs on this machine; name one with --ray-address or RAY_ADDRESS"
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    session_lease = SESSION.connect(cluster_address, 1)
    try:
        yield
    finally:
        SESSION.release(session_lease)


def _applications() -> dict[str, ApplicationStatusOverview]:
    """The applications of Serve that have engines, by name."""
    applications = serve.status().applications.items()
    return {name: app for name, app in applications if DEPLOYMENT_NAME in app.deployments}


def _engine_statuses(name: str) -> list[EngineStatus]:
    """The engines of an application that answer; none if it does not answer in time itself."""
    try:
        handle = serve.get_app_handle(name)
        call = handle.engine_statuses.remote()
        statuses: list[EngineStatus] = call.result(timeout_s=ANSWER_TIMEOUT_S)
    except Exception as error:  # a replica that hangs or has died
        logging.getLogger("eagleray").warning("%s does not answer: %s", name, error)
        return []
    return statuses
