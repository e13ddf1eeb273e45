"""Custom metadata of gRPC calls: header fields as handlers see them, and back.

Keys that end in `-bin` have arbitrary bytes, in base64 on the wire; others have text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

# Custom metadata of gRPC calls: header fields as handlers see them, and back.
#
# Keys that end in `-bin` have arbitrary bytes, in base64 on the wire; others have text.

Field = tuple[bytes, bytes]

_BINARY_SUFFIX = b"-bin"
# Fields of the protocol itself.
_RESERVED = frozenset({b"content-type", b"te"})
_RESERVED_PREFIXES = (b":", b"grpc-")


def is_custom(name: bytes) -> bool:
    """Whether the header field belongs to the metadata that handlers see."""
    return not name.startswith(_RESERVED_PREFIXES) and name not in _RESERVED


def is_binary(name: bytes) -> bool:
    """Whether the values of `name` are bytes."""
    return name.endswith(_BINARY_SUFFIX)


def decode(fields: Iterable[Field]) -> dict[str, str | bytes]:
    """The custom metadata among `fields`; of equal keys the last value counts.

    Raises ValueError when a binary value is not base64.
    """
    metadata: dict[str, str | bytes] = {}
    for name, value in fields:
        if is_custom(name):
            metadata[name.decode("ascii")] = decode_binary(value)[-1] if is_binary(name) else _text(value)
    return metadata


def decode_binary(value: bytes) -> list[bytes]:
    """The values of a `-bin` field: base64 with or without padding, several separated by commas.

    Raises ValueError when one of them is not base64.
    """
    return [_from_base64(item.strip(b" \t")) for item in value.split(b",")]


def encode(metadata: Iterable[tuple[str, str | bytes]]) -> list[Field]:
    """Header fields for `metadata`.

    Raises ValueError for a key that is not lower case or is the protocol's, for text under a `-bin` key and the
    reverse, and for text that is not printable ASCII.
    """
    return [_field(key, value) for key, value in metadata]


def _field(key: str, value: str | bytes) -> Field:
    name = key.encode()
    if not name or name.translate(None, _KEY_CHARACTERS) or not is_custom(name):
        raise ValueError(f"{key!r} is not a valid metadata key: use digits, lower-case letters, '-', '_' and '.'")
    if is_binary(name) != isinstance(value, bytes):
        raise ValueError(f"the value of {key!r} must be {'bytes' if is_binary(name) else 'a string'}")
    if isinstance(value, bytes):
        return name, base64.b64encode(value).rstrip(b"=")
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"the value of {key!r} must be printable ASCII; other text needs a key that ends in '-bin'")
    return name, value.strip(" ").encode()


_KEY_CHARACTERS = b"0123456789abcdefghijklmnopqrstuvwxyz_-."


def _from_base64(item: bytes) -> bytes:
    bare = item.rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the binary value {item[:40]!r} is not base64: {error}") from None


def _text(value: bytes) -> str:
    # Text should be ASCII; most clients send other text as UTF-8, some in other encodings.
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


# The `grpc-timeout` header: how long the client waits (gRPC's PROTOCOL-HTTP2, "Requests").

_UNIT_NS: Final = {
    ord("n"): 1,
    ord("u"): 1_000,
    ord("m"): 1_000_000,
    ord("S"): 1_000_000_000,
    ord("M"): 60 * 1_000_000_000,
    ord("H"): 3600 * 1_000_000_000,
}
# Longer waits (146 years) are as good as none, and this still fits 64 bits when added to a clock.
MAX_TIMEOUT_NS: Final = 1 << 62
# The specification has 8 digits; some clients send nanoseconds with more.
_MAX_DIGITS: Final = 20


def parse_timeout(value: bytes) -> int:
    """Nanoseconds, at most MAX_TIMEOUT_NS; 0 means that the wait has already ended.

    Raises ValueError for anything but digits and one of the units H M S m u n.
    """
    digits = value[:-1]
    unit_ns = _UNIT_NS.get(value[-1]) if value else None
    if unit_ns is None or not digits.isdigit():
        raise ValueError(f"grpc-timeout {value[:40]!r} is not a number followed by one of H M S m u n")
    if len(digits) > _MAX_DIGITS:
        return MAX_TIMEOUT_NS
    return min(int(digits) * unit_ns, MAX_TIMEOUT_NS)
