"""Content-Encoding of requests and responses: gzip and deflate, with bounds against decompression bombs."""

from __future__ import annotations

import zlib
from functools import lru_cache

from modelserver.core.large_buffers import joined
from modelserver.core.numerals import parse_float
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, UnsupportedError

SUPPORTED = "gzip, deflate"

# What zlib calls the container: gzip, zlib ("deflate" as the standard means it), none ("deflate" as some send it).
_WINDOW_GZIP, _WINDOW_ZLIB, _WINDOW_RAW = 31, 15, -15
_LEVEL = 1  # tensors seldom shrink much; latency counts more
_CHUNK = 1 << 18
# A gzip body may have this many members, and one more for each kilobyte: an empty member costs as much as a long one.
_FREE_MEMBERS = 1024
_MIN_MEMBER_BYTES = 1024
# A shorter body would not fit fewer packets, and hardly shrinks.
MIN_COMPRESSED_BYTES = 128


def decompress(body: Buffer, encoding: str, max_bytes: int) -> Buffer:
    """The body as it was before `Content-Encoding: encoding`.

    Raises UnsupportedError for an unknown encoding, InvalidArgumentError for broken data, and
    PayloadTooLargeError as soon as more than `max_bytes` came out.
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip":
            return _inflate(body, _WINDOW_GZIP, encoding, max_bytes)
        case "deflate":
            return _inflate(body, _WINDOW_ZLIB if _has_zlib_header(body) else _WINDOW_RAW, encoding, max_bytes)
    raise UnsupportedError(f"Content-Encoding '{encoding:.40}' is not supported, use one of: {SUPPORTED}, identity")


def compress(buffers: tuple[Buffer, ...], encoding: str) -> bytes:
    """All of `buffers` as one gzip or deflate body."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_GZIP if encoding == "gzip" else _WINDOW_ZLIB)
    parts = [compressor.compress(buffer) for buffer in buffers]
    parts.append(compressor.flush())
    return b"".join(parts)


@lru_cache(maxsize=64)
def choose_encoding(accept_encoding: str) -> str | None:
    """The encoding for a response: the highest q-value of gzip, deflate and identity; None for identity.

    An encoding that is not listed is not used, except identity, which then comes last. Ties go to gzip, then deflate.
    """
    weights = {"identity": 0.0}
    for item in accept_encoding.split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip().lower()] = _weight(parameters)
    best = max(("gzip", "deflate", "identity"), key=lambda name: weights.get(name, 0.0))
    return best if best != "identity" and weights.get(best, 0.0) > 0 else None


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return parse_float(value)
            except ValueError:
                return 0.0
    return 1.0


def _has_zlib_header(body: Buffer) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0


def _inflate(body: Buffer, window: int, encoding: str, max_bytes: int) -> Buffer:
    parts: list[bytes] = []
    left = max_bytes
    inflater = zlib.decompressobj(window)
    view = memoryview(body)
    start, size = 0, _CHUNK
    members_left = _FREE_MEMBERS + len(view) // _MIN_MEMBER_BYTES
    try:
        while start < len(view):
            if inflater.eof:
                if window != _WINDOW_GZIP:  # only gzip members may follow one another
                    raise InvalidArgumentError(f"unexpected bytes after the {encoding} request body")
                members_left -= 1
                if members_left < 0:
                    raise InvalidArgumentError(
                        "the gzip request body has too many members; compress it as one, as gzip does"
                    )
                inflater = zlib.decompressobj(window)
                size = _MIN_MEMBER_BYTES
            chunk = view[start : start + size]
            # No more at a time: a chunk may unpack to a thousand times its size, in one call and in one piece.
            part = inflater.decompress(chunk, min(left + 1, _CHUNK))
            left -= len(part)
            if left < 0:
                raise _too_large(max_bytes)
            parts.append(part)
            # zlib copies the unused rest of a chunk: the first chunk of a further member is short, as the member may
            # be.
            start += len(chunk) - len(inflater.unused_data or inflater.unconsumed_tail)
            size = min(2 * size, _CHUNK)
        if not inflater.eof:  # zlib has read all of the body, and may hold back the last bytes of its own output
            parts.append(inflater.flush())
            if len(parts[-1]) > left:
                raise _too_large(max_bytes)
    except zlib.error as error:
        raise InvalidArgumentError(f"the request body is not valid {encoding}: {error}") from error
    if not inflater.eof:
        raise InvalidArgumentError(f"the {encoding} request body ends too early")
    return joined(parts)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"Decompressed data size exceeds the maximum allowed value of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
