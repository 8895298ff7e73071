"""File descriptors for other processes of this machine and user. Files of a driver cannot be opened
anew through /proc, as memory files can: a process that has them open hands them over.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress

_AT_ONCE = 200  # descriptors in a message, of at most 253
_TIMEOUT_S = 10.0  # for whoever takes them
_PAUSE_S = 0.1  # after an error


class DescriptorServer:
    """Hands over copies of descriptors to whoever asks at `address`, while this object lives.
    Raises `OSError`.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        # A name that is no file, so nothing is left of it.
        self.address = f"\0eagleray-{os.getpid()}-{secrets.token_hex(8)}"
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(self.address)
            listener.listen()
            copies: list[int] = []  # whoever has the descriptors may close them
            undo.callback(close_all, copies)
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))
            is_shut = threading.Event()
            thread = threading.Thread(
                target=_serve, args=(listener, copies, is_shut), name="descriptors", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads are allowed
                raise OSError(str(error)) from error
            undo.pop_all()
        weakref.finalize(self, _shut, listener, is_shut)


def take_descriptors(address: str, count: int) -> list[int]:
    """Copies of all descriptors that are served there. Raises `OSError` if the process is gone, or
    does not serve so many.
    """
    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(address)
            while True:
                message, received, _, _ = socket.recv_fds(connection, 1, _AT_ONCE)
                for descriptor in received:
                    os.set_inheritable(descriptor, False)
                descriptors += received
                if not message:
                    break
            if len(descriptors) != count:
                raise OSError(f"{len(descriptors)} descriptors were handed over, not {count}")
        except OSError:
            close_all(descriptors)
            raise
    return descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def _serve(listener: socket.socket, descriptors: list[int], is_shut: threading.Event) -> None:
    with listener:
        while not is_shut.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # shut, or this process has too many files open
                is_shut.wait(_PAUSE_S)
                continue
            with connection, suppress(OSError):  # who asks may be gone
                connection.settimeout(_TIMEOUT_S)
                if _user_of(connection) == os.getuid():
                    for start in range(0, len(descriptors), _AT_ONCE):
                        batch = descriptors[start : start + _AT_ONCE]
                        socket.send_fds(connection, [b"."], batch)
    close_all(descriptors)


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end (struct ucred)."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, user_id, _ = struct.unpack("3i", credentials)
    return int(user_id)


def _shut(listener: socket.socket, is_shut: threading.Event) -> None:
    is_shut.set()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
