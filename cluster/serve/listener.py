"""HTTP on the port of the application, from within an API process.

Serve's proxy would handle each event of a stream as a Ray object, which takes as much of the
processor as a small model does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence as Seq

import uvicorn

from cluster.api.app import Api
from cluster.api.connections import server_config
from cluster.resources.addresses import bound_sockets
from cluster.serve.port import QUEUE_LENGTH, PortShare, taken_at_a_time
from configs.serve import ServeConfig


class HttpListener:
    """Serves an API on the running event loop, at a port of this process's own or at one that it
    shares with others.
    """

    def __init__(self, api: Api, config: ServeConfig) -> None:
        """Raises `ConfigError` or `EngineError` if it cannot listen there."""
        sockets: Seq[socket.socket]
        num_taken_at_a_time = QUEUE_LENGTH
        if config.shared_port is not None:
            self._port_share = PortShare(config.shared_port)
            api.admission.open_outputs = self._port_share.open_outputs
            sockets = self._port_share.listeners
            num_taken_at_a_time = taken_at_a_time(asyncio.get_running_loop())
        else:
            assert config.listen is not None
            sockets = bound_sockets(*config.listen)
        options = server_config(api, log_level="warning", backlog=num_taken_at_a_time)
        self._server = uvicorn.Server(options)
        # Ray Serve has signal handlers of its own.
        setattr(self._server, "capture_signals", contextlib.nullcontext)  # noqa: B010
        self._task = asyncio.create_task(self._server.serve(sockets=[*sockets]))

    def check(self) -> None:
        """Raise why it has ended, if it has."""
        if self._task.done():
            self._task.result()

    def take_no_more(self) -> None:
        """Leave new connections to the others; those that there are stay."""
        for server in self._server.servers:
            server.close()
