"""Bodies that clients send compressed, decoded within the bound of bodies."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import zstandard

from cluster.api.errors import HttpError
from scheduler.bounds import MIB
from scheduler.errors import RequestError

POSSIBLE = "gzip, deflate, zstd"
MAX_WINDOW_BYTES = 8 * MIB  # of zstd; as much as RFC 9659 asks for


def encoding_of(headers: Mapping[str, str]) -> str:
    """The encoding of a body; empty if there is none. Raises `HttpError` 415 for one that cannot be
    decoded.
    """
    given = headers.get("content-encoding", "").lower()
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
        is_zstd = encoding == "zstd"
        decoded, decoder = _unpack(body, most) if is_zstd else _inflate(body, encoding, most)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body cannot be decoded as {encoding}: {error}") from None
    if len(decoded) <= most and (decoder.unused_data or not decoder.eof):
        reason = "more follows its end" if decoder.eof else "it is cut off"
        raise RequestError(f"the body cannot be decoded as {encoding}: {reason}")
    return decoded


def _unpack(body: bytes, most: int) -> tuple[bytes, Any]:
    """(the decoded body, a decoder that knows how it ended). Only the reader bounds what comes out,
    and only the other knows whether that is complete.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    decoded = decompressor.stream_reader(body).read(most + 1)
    decoder = decompressor.decompressobj()
    if len(decoded) <= most:
        decoder.decompress(body)
    return decoded, decoder


def _inflate(body: bytes, encoding: str, most: int) -> tuple[bytes, Any]:
    """Some clients send `deflate` without the head of its format, by which that begins with 8."""
    has_head = body[:1] and body[0] & 15 == zlib.DEFLATED
    bits = 16 + zlib.MAX_WBITS if encoding == "gzip" else zlib.MAX_WBITS * (1 if has_head else -1)
    decoder = zlib.decompressobj(bits)
    return decoder.decompress(body, most + 1), decoder
