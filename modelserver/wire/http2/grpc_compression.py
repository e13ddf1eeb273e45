"""Compression of gRPC messages, each by itself, bounded against decompression bombs."""

from __future__ import annotations

import zlib
from typing import Final

from modelserver.core.large_buffers import joined
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import Parts, RpcError
from modelserver.protocol.grpc_status import Status

IDENTITY: Final = b"identity"
GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"

# The encodings that we understand, in the form of `grpc-accept-encoding`.
ACCEPT_ENCODING: Final = b"identity,deflate,gzip"
# What zlib calls the container; gRPC's deflate is the zlib format (RFC 1950).
_WINDOWS: Final = {GZIP: 31, DEFLATE: 15}
# zlib's level for each name in the options.
LEVELS: Final = {"low": 1, "medium": 6, "high": 9}

# More bytes than this are compressed and decompressed off the event loop: 16 KiB take it about half a millisecond.
_MAX_ON_LOOP_BYTES: Final = 16 * 1024
# The most bytes that decompression on the event loop may produce: a millisecond at worst.
_MAX_INFLATED_ON_LOOP_BYTES: Final = 256 * 1024
# Bytes that are decompressed at a time, and the most that come out at a time.
_CHUNK: Final = 256 * 1024


def belongs_off_loop(num_bytes: int) -> bool:
    """Whether to compress or decompress that many bytes in another thread."""
    return num_bytes > _MAX_ON_LOOP_BYTES


def choose_encoding(accepted: tuple[bytes, ...]) -> bytes | None:
    """How to compress answers for a client that accepts these; None: not at all."""
    if GZIP in accepted:
        return GZIP
    return DEFLATE if DEFLATE in accepted else None


def compress(parts: Parts, encoding: bytes, level: str) -> bytes:
    """The message made of `parts`, compressed."""
    compressor = zlib.compressobj(LEVELS[level], zlib.DEFLATED, _WINDOWS[encoding])
    pieces = [compressor.compress(part) for part in parts]
    pieces.append(compressor.flush())
    return b"".join(pieces)


def check_encoding(encoding: bytes) -> None:
    """Raises RpcError for the encoding (b"" for none) of a message whose compressed flag is set, if it is not ours."""
    if not encoding or encoding == IDENTITY:
        raise RpcError(Status.INTERNAL, "a message is marked as compressed, but the call has no grpc-encoding")
    if encoding not in _WINDOWS:
        name = encoding[:40].decode("ascii", "replace")
        raise RpcError(
            Status.UNIMPLEMENTED, f"grpc-encoding '{name}' is not supported, use one of: identity, deflate, gzip"
        )


def decompress(message: Buffer, encoding: bytes, max_bytes: int) -> Buffer:
    """The message that was compressed by `encoding`.

    Raises RpcError: UNIMPLEMENTED for an unknown encoding, INTERNAL for broken data and for an encoding that does
    not compress, RESOURCE_EXHAUSTED as soon as more than `max_bytes` came out.
    """
    inflated = _inflate(message, encoding, max_bytes)
    if inflated is None:
        raise RpcError(
            Status.RESOURCE_EXHAUSTED, f"received a message that is larger than {max_bytes} bytes when decompressed"
        )
    return inflated


def decompress_on_loop(message: Buffer, encoding: bytes, max_bytes: int) -> Buffer | None:
    """As `decompress`, but None for a message that would block the event loop: use `decompress` in a thread then."""
    if max_bytes <= _MAX_INFLATED_ON_LOOP_BYTES:
        return decompress(message, encoding, max_bytes)
    if belongs_off_loop(len(message)):
        check_encoding(encoding)
        return None
    return _inflate(message, encoding, _MAX_INFLATED_ON_LOOP_BYTES)


def _inflate(message: Buffer, encoding: bytes, max_bytes: int) -> Buffer | None:
    """The decompressed message, or None if it has more than `max_bytes`."""
    check_encoding(encoding)
    inflater = zlib.decompressobj(_WINDOWS[encoding])
    pieces: list[bytes] = []
    left = max_bytes
    view = memoryview(message)
    try:
        # In chunks, because zlib copies the input that it has no room for.
        for start in range(0, len(view), _CHUNK):
            data: Buffer = view[start : start + _CHUNK]
            while data:
                if inflater.eof:
                    raise RpcError(
                        Status.INTERNAL, f"the {encoding.decode()} data of a message has bytes after its end"
                    )
                piece = inflater.decompress(data, min(left + 1, _CHUNK))
                left -= len(piece)
                if left < 0:
                    return None
                pieces.append(piece)
                data = inflater.unused_data or inflater.unconsumed_tail
        pieces.append(inflater.flush())
    except zlib.error as error:
        raise RpcError(Status.INTERNAL, f"a message is not valid {encoding.decode()}: {error}") from None
    if not inflater.eof:
        raise RpcError(Status.INTERNAL, f"the {encoding.decode()} data of a message ends too early")
    return joined(pieces)
