"""Messages to and from helper processes, over a socket: pickled, after their length in 8 bytes."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

# What receiving raises when the peer is lost, or what it sent is not a message.
_LOST_PEER_ERRORS = (
    *(OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError),
    *(IndexError, KeyError, TypeError, ValueError),
)
_CHUNK_BYTES = 256 * 1024
MAX_MESSAGE_BYTES = 256 * 2**20


class PipeError(Exception):
    """The peer is gone, or what came is not a message."""


class Pipe:
    """One end of a socket, which it owns. One thread sends and receives; any may `close`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._receive_buffer = bytearray()

    def send(self, message: Any, limit_s: float | None = None) -> None:
        """Raises `PipeError`, and `TimeoutError` if the peer does not read."""
        data = pickle.dumps(message, protocol=5)
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(struct.pack("<Q", len(data)) + data)
        except TimeoutError:
            raise
        except OSError as error:
            raise PipeError(str(error)) from None

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message. Raises `PipeError`, and `TimeoutError`: it may be called again then."""
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        try:
            self._fill(8, deadline_s)
            [length] = struct.unpack_from("<Q", self._receive_buffer)
            if length > MAX_MESSAGE_BYTES:
                raise PipeError(f"a message of {length} bytes")
            self._fill(8 + length, deadline_s)
            data = bytes(self._receive_buffer[8 : 8 + length])
            del self._receive_buffer[: 8 + length]
            return pickle.loads(data)
        except TimeoutError:
            raise
        except _LOST_PEER_ERRORS as error:
            raise PipeError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _fill(self, num_bytes: int, deadline_s: float | None) -> None:
        """Receive until so many bytes are there."""
        while len(self._receive_buffer) < num_bytes:
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining_s)
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise EOFError("the peer has closed its end")
            self._receive_buffer += data
