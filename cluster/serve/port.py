"""One listening socket for several processes of the API on this machine.

`launch.py serve` makes the socket, and every process takes connections from it. So the system gives
each connection to a process that is ready to take it: one that hangs or has died gets none, and
what waits when a process dies is taken by the others (docs/decisions/0032-shared-port.md). The
processes are not children of the command, so the socket reaches them through a Unix socket. With it
goes the memory in which they count their connections and open outputs, each at a place of its own.

    SharedPortOwner (in the command) ──sockets, memory, place──▶ SharedPortMember (in each process)
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from cluster.api.admission import OpenOutputCounts
from cluster.resources.addresses import bound_sockets
from scheduler.errors import EngineError

LISTEN_BACKLOG = 2048  # connections that wait until a process takes them; as many as uvicorn's
# A process that is lost keeps its place until it is dead, beside the one that replaces it.
NUM_SPARE_PLACES = 16
JOIN_TIMEOUT_S = 10.0
# By how many connections a process may have more than another before it lets others take the next
# one: a share of the mean, and at least so many.
MARGIN_SHARE, MIN_MARGIN = 0.125, 2
VACANT_PLACE_COUNT = -1  # instead of a number of connections: nobody has this place
_MAX_SOCKETS = 16  # a host name has few addresses
_PLACE_FORMAT = struct.Struct("=I")

logger = logging.getLogger("eagleray")


class SharedPortOwner:
    """The command's side. Runs on threads of its own until it is closed.

    path: of the Unix socket at which processes join; only this user can reach it.
    """

    def __init__(self, host: str, port: int, num_processes: int) -> None:
        """Raises `ConfigError` if it cannot listen. Refuses clients until a process has joined."""
        with ExitStack() as undo_stack:
            self._listeners = bound_sockets(host, port)
            for listener in self._listeners:
                undo_stack.enter_context(listener)
            folder = undo_stack.enter_context(tempfile.TemporaryDirectory(prefix="eagleray-"))
            self.path = str(Path(folder) / "port")
            num_places = num_processes + NUM_SPARE_PLACES
            file = undo_stack.enter_context(tempfile.TemporaryFile())
            file.truncate(2 * 8 * num_places)
            self._memory_fd = file.fileno()
            counts = memoryview(mmap.mmap(self._memory_fd, 0)).cast("q")
            self._open_output_counts = counts[:num_places]
            self._connection_counts = counts[num_places:]
            for place in range(num_places):
                self._connection_counts[place] = VACANT_PLACE_COUNT
            self._free_places = deque(range(num_places))
            self._join_socket = undo_stack.enter_context(socket.socket(socket.AF_UNIX))
            self._join_socket.bind(self.path)
            self._join_socket.listen()
            self._undo_stack = undo_stack.pop_all()
        threading.Thread(target=self._accept_processes, name="eagleray-port", daemon=True).start()

    def close(self) -> None:
        """Stop listening, as far as this process goes."""
        with suppress(OSError):  # some systems shut down connections only
            self._join_socket.shutdown(socket.SHUT_RDWR)  # `close` alone would not end `accept`
        self._undo_stack.close()

    def _accept_processes(self) -> None:
        while True:
            try:
                process_socket, _ = self._join_socket.accept()
            except OSError:  # it was closed
                return
            threading.Thread(target=self._serve_member, args=(process_socket,), daemon=True).start()

    def _serve_member(self, process_socket: socket.socket) -> None:
        """Share the port with a process until it ends, and with it its connection to here."""
        with process_socket:
            try:
                place = self._free_places.pop()
            except IndexError:
                logger.warning("a process finds no place at the port; too many have not ended yet")
                return
            try:
                self._send_sockets(process_socket, place)
                process_socket.recv(1)
            except OSError as error:
                logger.debug("a process has left the port: %s", error)
            finally:
                self._open_output_counts[place] = 0
                self._connection_counts[place] = VACANT_PLACE_COUNT
                self._free_places.append(place)

    def _send_sockets(self, process_socket: socket.socket, place: int) -> None:
        for listener in self._listeners:
            listener.listen(LISTEN_BACKLOG)
        self._connection_counts[place] = 0
        fds = [*(listener.fileno() for listener in self._listeners), self._memory_fd]
        socket.send_fds(process_socket, [_PLACE_FORMAT.pack(place)], fds)


class SharedPortMember:
    """One process's side.

    listeners: sockets that do not block. open_output_counts: of all processes.
    """

    def __init__(self, path: str) -> None:
        """Raises `EngineError` if the command does not share its port."""
        # The command notices by its end that this process has ended.
        self._command_socket = socket.socket(socket.AF_UNIX)
        self._command_socket.settimeout(JOIN_TIMEOUT_S)
        try:
            self._command_socket.connect(path)
            data, fds, _, _ = socket.recv_fds(
                self._command_socket, _PLACE_FORMAT.size, _MAX_SOCKETS + 1
            )
        except OSError as error:
            raise EngineError(f"the port could not be shared: {error}") from error
        if not data:
            raise EngineError("the port is shared with too many processes")
        *listener_fds, memory_fd = fds
        self.listeners = [socket.socket(fileno=fd) for fd in listener_fds]
        for listener in self.listeners:
            listener.setblocking(False)
        counts = memoryview(mmap.mmap(memory_fd, 0)).cast("q")
        os.close(memory_fd)
        [self._place] = _PLACE_FORMAT.unpack(data)
        num_places = len(counts) // 2
        self.open_output_counts = OpenOutputCounts(counts[:num_places], self._place)
        self._connection_counts = counts[num_places:]

    def is_ahead(self, num_connections: int) -> bool:
        """Note how many connections this process has; whether it has clearly more than another."""
        self._connection_counts[self._place] = num_connections
        counts_present = [
            number for number in self._connection_counts if number != VACANT_PLACE_COUNT
        ]
        margin = max(MIN_MARGIN, MARGIN_SHARE * sum(counts_present) / len(counts_present))
        return num_connections > min(counts_present) + margin
