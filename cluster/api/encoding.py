"""Bodies that clients send compressed, decoded within the bound of bodies."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import zstandard

from cluster.api.errors import HttpError
from scheduler.bounds import MIB
from scheduler.errors import RequestError

POSSIBLE = "gzip, deflate, zstd"
MAX_WINDOW_BYTES = 8 * MIB  # of zstd; as much as RFC 9659 asks for


def encoding_of(headers: Mapping[bytes, bytes]) -> str:
    """The encoding of a body; empty if there is none. Raises `HttpError` 415 for one that cannot be
    decoded.
    """
    given = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    name = {"x-gzip": "gzip", "identity": ""}.get(given, given)
    if name and name not in POSSIBLE.split(", "):
        raise HttpError(
            415,
            f"the body cannot be decoded from {given[:100]!r}; possible are {POSSIBLE}, one at a"
            " time",
            headers={"accept-encoding": POSSIBLE},
        )
    return name


def decode(body: bytes, encoding: str, most: int) -> bytes:
    """The decoded body, or the first `most + 1` bytes of a longer one: no more memory is used.
    Raises `RequestError` for what is not encoded so.
    """
    try:
        if encoding != "zstd":
            return _inflated(body, encoding, most)
        return _unpacked(body, most)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body cannot be decoded as {encoding}: {error}") from None


def _unpacked(body: bytes, most: int) -> bytes:
    """The reader bounds what comes out of a body, but does not say whether it is complete."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    decoded = unpacker.stream_reader(body).read(most + 1)
    if len(decoded) > most:
        return decoded
    frame = unpacker.decompressobj()
    frame.decompress(body)
    if not frame.eof or frame.unused_data:
        raise zstandard.ZstdError(_incomplete(is_ended=frame.eof))
    return decoded


def _incomplete(*, is_ended: bool) -> str:
    return "more follows its end" if is_ended else "it is cut off"


def _inflated(body: bytes, encoding: str, most: int) -> bytes:
    """Some clients send `deflate` without the head of its format, by which that begins with 8."""
    has_head = body[:1] and body[0] & 15 == zlib.DEFLATED
    bits = 16 + zlib.MAX_WBITS if encoding == "gzip" else zlib.MAX_WBITS * (1 if has_head else -1)
    inflater = zlib.decompressobj(bits)
    decoded = inflater.decompress(body, most + 1)
    if len(decoded) <= most and not (inflater.eof and not inflater.unused_data):
        raise zlib.error(_incomplete(is_ended=inflater.eof))
    return decoded
