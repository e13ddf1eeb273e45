"""HTTP/2 frames as bytes, and the error that ends a connection (RFC 9113, 4, 6 and 7)."""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

from modelserver.core import accelerator
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.message import PREFIX_BYTES, unpack_prefix

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9

# Types and flags are plain numbers: the frame loop compares them for every frame.
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

# The top bit of stream ids and increments is reserved: ignored when received.
MAX_31_BITS: Final = (1 << 31) - 1
DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
MAX_FRAME_BYTES: Final = (1 << 24) - 1

# Length (16 + 8 bits), type, flags, stream id.
_HEAD: Final = struct.Struct(">HBBBI")
unpack_head: Final = _HEAD.unpack_from
pack_head: Final = _HEAD.pack
_U32: Final = struct.Struct(">I")
pack_u32: Final = _U32.pack
unpack_u32: Final = _U32.unpack_from


Octets = bytes | bytearray


class ErrorCode(enum.IntEnum):
    """Why a stream is reset or a connection ends."""

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


_VIOLATIONS: Final = {
    ErrorCode.FRAME_SIZE_ERROR: Violation.FRAME_SIZE,
    ErrorCode.FLOW_CONTROL_ERROR: Violation.FLOW_CONTROL,
    ErrorCode.COMPRESSION_ERROR: Violation.COMPRESSION,
}


class ConnectionFault(Exception):
    """The peer broke a rule of the connection: a GOAWAY says so, and the connection closes."""

    def __init__(self, code: ErrorCode, text: str, violation: Violation | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.violation = violation or _VIOLATIONS.get(code, Violation.PROTOCOL)


def protocol_fault(text: str) -> ConnectionFault:
    """The fault that has no code of its own."""
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)


def too_much(violation: Violation) -> ConnectionFault:
    """The peer costs more than is reasonable. Clients parse this debug data, so it is the bare name."""
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, violation.value, violation)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    num_bytes = len(payload)
    return pack_head(num_bytes >> 8, num_bytes & 0xFF, kind, flags, stream_id) + payload


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, pack_u32(increment))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, pack_u32(code))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, pack_u32(last_stream_id) + pack_u32(code) + text.encode())


def ping(payload: bytes) -> bytes:
    return frame(PING, 0, 0, payload)


def ping_ack(payload: bytes) -> bytes:
    return frame(PING, ACK, 0, payload)


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


def read_head(data: Octets, position: int) -> tuple[int, int, int, int]:
    """Length, type, flags and stream id of the frame at `position`."""
    high, low, kind, flags, stream_id = unpack_head(data, position)
    return high << 8 | low, kind, flags, stream_id & MAX_31_BITS


# Longer blocks are not remembered.
MAX_BLOCK_BYTES: Final = 512


def read_in_python(data: Octets, position: int, end: int, max_data: int) -> tuple[int, int, Any, int] | None:
    """The frame at `position`, if it is complete: its kind, its stream, its payload, and where the next one begins.

    DATA that ends a stream, of at most `max_data` bytes, with one message that is not compressed: the message. HEADERS
    in one frame that do not end the stream: the block. WINDOW_UPDATE: the increment. None for anything else.
    """
    if end - position < HEAD_BYTES:
        return None
    high, low, kind, flags, stream_id = unpack_head(data, position)
    length: int = high << 8 | low
    start = position + HEAD_BYTES
    stop = start + length
    if stop > end or stream_id > MAX_31_BITS:
        return None
    if kind == DATA:
        if flags != END_STREAM or not PREFIX_BYTES <= length <= max_data:
            return None
        is_compressed, size = unpack_prefix(data, start)
        if is_compressed or size + PREFIX_BYTES != length:
            return None
        return DATA, stream_id, bytes(data[start + PREFIX_BYTES : stop]), stop
    if kind == HEADERS and flags == END_HEADERS and length <= MAX_BLOCK_BYTES:
        return HEADERS, stream_id, bytes(data[start:stop]), stop
    if kind == WINDOW_UPDATE and length == 4:
        return WINDOW_UPDATE, stream_id, unpack_u32(data, start)[0] & MAX_31_BITS, stop
    return None


read_usual_frame: Final = accelerator.read_frame or read_in_python
