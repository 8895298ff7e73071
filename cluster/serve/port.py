"""One listening socket for several processes of the API on this machine.

`launch.py serve` makes the socket, and every process takes connections from it. So the system gives
each connection to a process that is ready to take it: one that hangs or has died gets none, and
what waits when a process dies is taken by the others (docs/decisions/0031-shared-port.md). The
processes are not children of the command, so the socket reaches them through a Unix socket. With it
goes the memory in which they count their open outputs, each at a place of its own.

    SharedPort (in the command) ──sockets, memory, place──▶ PortShare (in each process)
"""

from __future__ import annotations

import asyncio
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
from typing import Any

from cluster.api.limits import OpenOutputs
from cluster.resources.addresses import bound_sockets
from scheduler.errors import EngineError

QUEUE_LENGTH = 2048  # connections that wait until a process takes them; as many as uvicorn's
# A process that is lost keeps its place until it is dead, beside the one that replaces it.
NUM_SPARE_PLACES = 16
JOIN_TIMEOUT_S = 10.0
_MAX_SOCKETS = 16  # a host name has few addresses
_PLACE = struct.Struct("=I")

logger = logging.getLogger("eagleray")


class SharedPort:
    """The command's side. Runs on threads of its own until it is closed.

    path: of the Unix socket at which processes join; only this user can reach it.
    """

    def __init__(self, host: str, port: int, num_processes: int) -> None:
        """Raises `ConfigError` if nothing can listen there. Connections are refused until the first
        process has joined.
        """
        with ExitStack() as undo_stack:
            self._listeners = bound_sockets(host, port)
            for listener in self._listeners:
                undo_stack.enter_context(listener)
            folder = undo_stack.enter_context(tempfile.TemporaryDirectory(prefix="eagleray-"))
            self.path = str(Path(folder) / "port")
            num_places = num_processes + NUM_SPARE_PLACES
            file = undo_stack.enter_context(tempfile.TemporaryFile())
            file.truncate(8 * num_places)
            self._memory_fd = file.fileno()
            self._counts = memoryview(mmap.mmap(self._memory_fd, 0)).cast("q")
            self._free_places = deque(range(num_places))
            self._joining = undo_stack.enter_context(socket.socket(socket.AF_UNIX))
            self._joining.bind(self.path)
            self._joining.listen()
            self._undo_stack = undo_stack.pop_all()
        threading.Thread(target=self._take_processes, name="eagleray-port", daemon=True).start()

    def close(self) -> None:
        """Stop listening, as far as this process goes."""
        with suppress(OSError):  # some systems shut down connections only
            self._joining.shutdown(socket.SHUT_RDWR)  # `close` alone would not end `accept`
        self._undo_stack.close()

    def _take_processes(self) -> None:
        while True:
            try:
                process, _ = self._joining.accept()
            except OSError:  # it was closed
                return
            threading.Thread(target=self._follow, args=(process,), daemon=True).start()

    def _follow(self, process: socket.socket) -> None:
        """Share the port with a process until it ends, and with it its connection to here."""
        with process:
            try:
                place = self._free_places.pop()
            except IndexError:
                logger.warning("a process finds no place at the port; too many have not ended yet")
                return
            try:
                self._share(process, place)
                process.recv(1)
            except OSError as error:
                logger.debug("a process has left the port: %s", error)
            finally:
                self._counts[place] = 0
                self._free_places.append(place)

    def _share(self, process: socket.socket, place: int) -> None:
        for listener in self._listeners:
            listener.listen(QUEUE_LENGTH)
        fds = [*(listener.fileno() for listener in self._listeners), self._memory_fd]
        socket.send_fds(process, [_PLACE.pack(place)], fds)


class PortShare:
    """One process's side. listeners: to take connections from; open_outputs: of all processes."""

    def __init__(self, path: str) -> None:
        """Raises `EngineError` if the command does not share its port."""
        # The command notices by its end that this process has ended.
        self._membership = socket.socket(socket.AF_UNIX)
        self._membership.settimeout(JOIN_TIMEOUT_S)
        try:
            self._membership.connect(path)
            data, fds, _, _ = socket.recv_fds(self._membership, _PLACE.size, _MAX_SOCKETS + 1)
        except OSError as error:
            raise EngineError(f"the port could not be shared: {error}") from error
        if not data:
            raise EngineError("the port is shared with too many processes")
        *listener_fds, memory_fd = fds
        self.listeners = [_Listener(fileno=fd) for fd in listener_fds]
        counts = memoryview(mmap.mmap(memory_fd, 0)).cast("q")
        os.close(memory_fd)
        [place] = _PLACE.unpack(data)
        self.open_outputs = OpenOutputs(counts, place)


def taken_at_a_time(loop: asyncio.AbstractEventLoop) -> int:
    """The `backlog` with which `loop` serves a `PortShare`.

    For asyncio it is the number of connections taken at a time: with 1, the others of a burst are
    left to processes that are less busy. uvloop sets the length of the queue to it.
    """
    return 1 if isinstance(loop, asyncio.BaseEventLoop) else QUEUE_LENGTH


class _Listener(socket.socket):
    """A socket that listens already, whoever serves it."""

    def listen(self, backlog: Any = None) -> None:
        """asyncio would also set the length of the queue to the `backlog` it is given."""
