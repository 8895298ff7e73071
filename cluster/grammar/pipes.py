"""Messages between a process and its helper: pickled, each after its length in 8 bytes."""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any


def read_message(stream: IO[bytes]) -> Any:
    """The next message. Raises `EOFError` at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    [length] = struct.unpack("<Q", header)
    return pickle.loads(stream.read(length))


def write_message(stream: IO[bytes], message: Any) -> None:
    """Raises `OSError` if nobody reads any more."""
    data = pickle.dumps(message, protocol=5)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()
