"""Bodies that clients send compressed, decoded within the bound of bodies."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import zstandard

from cluster.api.errors import HttpError
from scheduler.bounds import MIB
from scheduler.errors import RequestError

SUPPORTED_ENCODINGS = "gzip, deflate, zstd"
MAX_WINDOW_BYTES = 8 * MIB  # of zstd; as much as RFC 9659 asks for


def encoding_of(headers: Mapping[str, str]) -> str:
    """The encoding of a body; empty for none. Raises `HttpError` 415 for one not supported."""
    content_encoding = headers.get("content-encoding", "").lower()
    name = {"x-gzip": "gzip", "identity": ""}.get(content_encoding, content_encoding)
    if name and name not in SUPPORTED_ENCODINGS.split(", "):
        raise HttpError(
            415,
            f"the body cannot be decoded from {content_encoding[:100]!r}; possible are"
            f" {SUPPORTED_ENCODINGS}, one at a time",
            headers={"accept-encoding": SUPPORTED_ENCODINGS},
        )
    return name


def decode(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The decoded body, or the first `max_bytes + 1` bytes of a longer one: no more memory is used.
    Raises `RequestError` for what is not encoded so.
    """
    try:
        is_zstd = encoding == "zstd"
        decoded, decoder = (
            _decode_zstd(body, max_bytes) if is_zstd else _inflate(body, encoding, max_bytes)
        )
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(f"the body cannot be decoded as {encoding}: {error}") from None
    if len(decoded) <= max_bytes and (decoder.unused_data or not decoder.eof):
        reason = "more follows its end" if decoder.eof else "it is cut off"
        raise RequestError(f"the body cannot be decoded as {encoding}: {reason}")
    return decoded


def _decode_zstd(body: bytes, max_bytes: int) -> tuple[bytes, Any]:
    """(the decoded body, a decoder that knows how it ended). Only the reader bounds what comes out,
    and only the other knows whether that is complete.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    decoded = decompressor.stream_reader(body).read(max_bytes + 1)
    decoder = decompressor.decompressobj()
    if len(decoded) <= max_bytes:
        decoder.decompress(body)
    return decoded, decoder


def _inflate(body: bytes, encoding: str, max_bytes: int) -> tuple[bytes, Any]:
    """Some clients send `deflate` without a zlib header, whose first byte ends in hex digit 8."""
    has_zlib_header = body[:1] and body[0] & 15 == zlib.DEFLATED
    window_bits = zlib.MAX_WBITS if has_zlib_header else -zlib.MAX_WBITS
    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS if encoding == "gzip" else window_bits)
    return decoder.decompress(body, max_bytes + 1), decoder
