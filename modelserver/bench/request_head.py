"""The head of a request that is sent again and again, compressed by HPACK (RFC 7541)."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.wire.http2.frame import END_HEADERS, HEADERS
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.static_table import STATIC_TABLE, Field

DEFAULT_TABLE_BYTES = 4096
ENTRY_OVERHEAD = 32


class RequestHead:
    """The block of the first request of a connection, and that of all others: a few indexes, as real clients send."""

    def __init__(self, fields: Sequence[Field], *, table_bytes: int = DEFAULT_TABLE_BYTES) -> None:
        """`table_bytes` is what the peer allows; where the fields do not fit, they are sent as literals."""
        allowed = min(table_bytes, DEFAULT_TABLE_BYTES)
        shrink = _number(allowed, 5, 0x20) if allowed < DEFAULT_TABLE_BYTES else b""
        kept = [field for field in fields if field not in STATIC_TABLE]
        is_kept = sum(len(name) + len(value) + ENTRY_OVERHEAD for name, value in kept) <= allowed
        first, again = [], []
        # The newest entry of the dynamic table has the lowest index.
        index = len(STATIC_TABLE) + len(kept)
        for field in fields:
            if field in STATIC_TABLE:
                first.append(_number(STATIC_TABLE.index(field) + 1, 7, 0x80))
                again.append(first[-1])
                continue
            first.append(_kept_literal(*field) if is_kept else literal(*field))
            again.append(_number(index, 7, 0x80) if is_kept else first[-1])
            index -= 1
        self.first = shrink + b"".join(first)
        self.first_start = _frame_start(self.first)
        self.again = b"".join(again)
        self.again_start = _frame_start(self.again)


def _frame_start(block: bytes) -> bytes:
    """A HEADERS frame up to its stream's id."""
    return (len(block) << 16 | HEADERS << 8 | END_HEADERS).to_bytes(5, "big")


def _kept_literal(name: bytes, value: bytes) -> bytes:
    """A literal that the peer adds to its table (6.2.1)."""
    return b"\x40" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    return _number(len(text), 7, 0) + text


def _number(number: int, prefix_bits: int, first: int) -> bytes:
    """An integer (5.1) whose first octet has the bits of `first` above its prefix."""
    limit = (1 << prefix_bits) - 1
    if number < limit:
        return bytes([first | number])
    number -= limit
    octets = [first | limit]
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])
