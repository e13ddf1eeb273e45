"""HTTP/2 frames made and read by hand, also those that no well-behaved peer would send (RFC 9113, 4 and 6)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
# What every endpoint may send before it knows the peer's settings.
DEFAULT_FRAME_BYTES = 1 << 14
DEFAULT_WINDOW_BYTES = (1 << 16) - 1
MAX_WINDOW_BYTES = (1 << 31) - 1

Fields = Iterable[tuple[str | bytes, str | bytes]]


class FrameType(enum.IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(enum.IntFlag):
    """ACK and END_STREAM are the same bit, of different frames."""

    END_STREAM = 0x01
    ACK = 0x01
    END_HEADERS = 0x04
    PADDED = 0x08
    PRIORITY = 0x20


class Setting(enum.IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(enum.IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `length` is announced in place of the payload's own where a test lies about it."""

    type: int
    flags: int = 0
    stream_id: int = 0
    payload: bytes = b""
    length: int | None = None

    def encode(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        return length.to_bytes(3, "big") + struct.pack(">BBI", self.type, self.flags, self.stream_id) + self.payload

    @property
    def is_ack(self) -> bool:
        return bool(self.flags & Flag.ACK)

    @property
    def ends_stream(self) -> bool:
        return self.type in (FrameType.DATA, FrameType.HEADERS) and bool(self.flags & Flag.END_STREAM)

    def number(self, at: int = 0) -> int:
        """The four bytes of the payload at `at`, without the reserved bit."""
        return int.from_bytes(self.payload[at : at + 4], "big") & MAX_WINDOW_BYTES

    def __str__(self) -> str:
        name = FrameType(self.type).name if self.type in FrameType.__members__.values() else f"type {self.type:#x}"
        shown = self.payload if len(self.payload) <= 24 else self.payload[:24] + b"..."
        return f"{name}(stream {self.stream_id}, flags {self.flags:#x}, {len(self.payload)} bytes {shown!r})"


def settings_of(payload: bytes) -> dict[int, int]:
    """What a SETTINGS frame says; of equal identifiers the last counts."""
    return dict(struct.iter_unpack(">HI", payload))


def encode(frames: Iterable[Frame]) -> bytes:
    return b"".join(frame.encode() for frame in frames)


def block(fields: Fields) -> bytes:
    """A header block that leaves the dynamic table alone: literals that are never indexed, no Huffman code."""
    never_indexed = [hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields]
    return hpack.Encoder().encode(never_indexed, huffman=False)


def data(stream_id: int, payload: bytes = b"", *, end: bool = False, padding: int | None = None) -> Frame:
    return _padded(FrameType.DATA, Flag.END_STREAM if end else 0, stream_id, payload, padding)


def headers(
    stream_id: int,
    fields: Fields | bytes,
    *,
    end: bool = True,
    end_headers: bool = True,
    padding: int | None = None,
    depends_on: int | None = None,
) -> Frame:
    """`fields`, or their block as it is; `depends_on` adds the priority fields (RFC 7540, 5.3)."""
    payload = fields if isinstance(fields, bytes) else block(fields)
    flags = (Flag.END_STREAM if end else 0) | (Flag.END_HEADERS if end_headers else 0)
    if depends_on is not None:
        flags |= Flag.PRIORITY
        payload = struct.pack(">IB", depends_on, 15) + payload
    return _padded(FrameType.HEADERS, flags, stream_id, payload, padding)


def continuation(stream_id: int, payload: bytes = b"", *, end_headers: bool = True) -> Frame:
    return Frame(FrameType.CONTINUATION, Flag.END_HEADERS if end_headers else 0, stream_id, payload)


def priority(stream_id: int, depends_on: int = 0, *, weight: int = 16) -> Frame:
    return Frame(FrameType.PRIORITY, 0, stream_id, struct.pack(">IB", depends_on, weight - 1))


def rst_stream(stream_id: int, code: int = ErrorCode.CANCEL) -> Frame:
    return Frame(FrameType.RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def settings(values: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> Frame:
    pairs = values.items() if isinstance(values, Mapping) else values
    return Frame(FrameType.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def settings_ack() -> Frame:
    return Frame(FrameType.SETTINGS, Flag.ACK)


def push_promise(stream_id: int, promised_id: int, fields: Fields) -> Frame:
    return Frame(FrameType.PUSH_PROMISE, Flag.END_HEADERS, stream_id, promised_id.to_bytes(4, "big") + block(fields))


def ping(payload: bytes = b"8 bytes!", *, ack: bool = False) -> Frame:
    return Frame(FrameType.PING, Flag.ACK if ack else 0, 0, payload)


def goaway(last_stream_id: int = 0, code: int = ErrorCode.NO_ERROR, debug: bytes = b"") -> Frame:
    return Frame(FrameType.GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + debug)


def window_update(stream_id: int, increment: int) -> Frame:
    return Frame(FrameType.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def _padded(kind: int, flags: int, stream_id: int, payload: bytes, padding: int | None) -> Frame:
    if padding is None:
        return Frame(kind, flags, stream_id, payload)
    return Frame(kind, flags | Flag.PADDED, stream_id, bytes((padding,)) + payload + bytes(padding))
