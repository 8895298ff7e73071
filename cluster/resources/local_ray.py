"""A local Ray of our own, started with what an engine uses and nothing else.

Most of that is said in environment variables. What they cannot turn off is left out by replacing
methods of Ray's own, here and nowhere else: a Ray that is built differently starts what it always
starts, and takes longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private.node import Node

# Settings of a local cluster that we start, unless the environment sets them.
LOCAL_RAY = {
    # Ray runs its workers at nice 15, so any other program would take nearly all of a core that it
    # shares with a rank.
    "RAY_worker_niceness": "0",
    # The raylet retries its first connection after one second; here it retries soon, for the same
    # total time.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # Processes started in advance could not serve our actors, which have a runtime environment.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Serve's controller looks at its applications ten times per second otherwise: with what it asks
    # of Ray, 4% of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}

# Methods of `Node` that start a process which does nothing for a local Ray without a dashboard.
IDLE_PROCESSES = (
    "start_monitor",  # an autoscaler's, and there are no nodes to add
    "start_log_monitor",  # brings the output of actors to a program that has not asked for it
    "start_api_server",  # without a dashboard only usage statistics; `ray.init` waits for it
)


@contextmanager
def only_what_engines_use() -> Iterator[None]:
    """For `ray.init` of a local Ray, without a dashboard: the settings, where the environment does
    not have them already, and none of `IDLE_PROCESSES`.

    Those take 2 s of processor time at the start, which two cores do not have, and 1% of a core
    until Ray ends.
    """
    added = {name: value for name, value in LOCAL_RAY.items() if name not in os.environ}
    usual = {name: getattr(Node, name) for name in IDLE_PROCESSES if hasattr(Node, name)}
    os.environ.update(added)
    for name in usual:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        for name, method in usual.items():
            setattr(Node, name, method)


def _start_nothing(node: Node, **_: Any) -> None:
    """In place of a method of `IDLE_PROCESSES`."""
