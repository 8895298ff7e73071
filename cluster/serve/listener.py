"""HTTP on the port of the application, from within an API process.

Serve's proxy would handle each event of a stream as a Ray object, which takes as much of the
processor as a small model does.
"""

from __future__ import annotations

import asyncio
import contextlib

import uvicorn

from cluster.api.app import Api
from cluster.api.connections import server_config
from cluster.resources.addresses import bound_sockets
from cluster.serve.accepting import Acceptor
from cluster.serve.port import SharedPortMember
from configs.serve import ServeConfig


class HttpListener:
    """Serves an API on the running event loop, at a port of its own or at a shared one."""

    def __init__(self, api: Api, config: ServeConfig) -> None:
        """Raises `ConfigError` or `EngineError` if it cannot listen there."""
        port_member = (
            SharedPortMember(config.shared_port_path)
            if config.shared_port_path is not None
            else None
        )
        sockets = [] if config.listen_address is None else bound_sockets(*config.listen_address)
        self._server = uvicorn.Server(server_config(api, log_level="warning"))
        # Ray Serve has signal handlers of its own.
        setattr(self._server, "capture_signals", contextlib.nullcontext)  # noqa: B010
        api.count_unsent = self._count_unsent
        self._serve_task = asyncio.create_task(self._server.serve(sockets=sockets))
        self._acceptor: Acceptor | None = None
        if port_member is not None:
            api.admission.open_output_counts = port_member.open_output_counts
            count_connections = self._server.server_state.connections.__len__
            self._acceptor = Acceptor(port_member, self._make_protocol, count_connections)

    def check(self) -> None:
        """Raise why it has ended, if it has."""
        if self._serve_task.done():
            self._serve_task.result()

    def stop_accepting(self) -> None:
        """Leave new connections to the other processes, if there are any."""
        if self._acceptor is not None:
            self._acceptor.close()

    def _count_unsent(self) -> int:
        connections = self._server.server_state.connections
        return sum(each.transport.get_write_buffer_size() > 0 for each in connections)

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn does for sockets of its own."""
        config = self._server.config
        protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self._server.server_state, app_state={}
        )
        return protocol
