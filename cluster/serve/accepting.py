"""Takes connections from a port that several processes share, so that all have about as many.

The system wakes every process for each connection, and the first one takes it. One that has clearly
more connections than another waits for a moment before it takes the next, so that the others can;
if none does, because they are busy or hang, it takes it after all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from cluster.serve.port import SharedPortMember

ACCEPT_DELAY_S = 0.003  # longer than an idle process takes to wake up
NO_DESCRIPTORS_PAUSE_S = 1.0  # as asyncio, when there are no more descriptors

logger = logging.getLogger("eagleray")


class Acceptor:
    """Takes connections on the running event loop, one at a time."""

    def __init__(
        self,
        port_member: SharedPortMember,
        make_protocol: Callable[[], asyncio.Protocol],
        count_connections: Callable[[], int],
    ) -> None:
        """`count_connections`: those that this process has."""
        self._loop = asyncio.get_running_loop()
        self._port_member = port_member
        self._make_protocol = make_protocol
        self._count_connections = count_connections
        self._opening_tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False
        for listener in port_member.listeners:
            self._listen(listener)

    def close(self) -> None:
        """Leave new connections to the other processes."""
        self._is_closed = True
        for listener in self._port_member.listeners:
            self._loop.remove_reader(listener)

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener, self._handle_waiting, listener)

    def _handle_waiting(self, listener: socket.socket) -> None:
        """A connection waits, unless another process has taken it by now."""
        if self._port_member.is_ahead(self._count_connections() + len(self._opening_tasks)):
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_DELAY_S, self._accept_if_left, listener)
        else:
            self._accept(listener)

    def _accept_if_left(self, listener: socket.socket) -> None:
        self._listen(listener)
        if not self._is_closed:
            self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process has it, or the client has left
        except OSError as error:
            logger.error("no connection can be taken at the moment: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(NO_DESCRIPTORS_PAUSE_S, self._listen, listener)
            return
        connection.setblocking(False)
        opening_task = self._loop.create_task(self._open(connection))
        self._opening_tasks.add(opening_task)
        opening_task.add_done_callback(self._opening_tasks.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            logger.debug("a connection was lost at once: %s", error)
            connection.close()
