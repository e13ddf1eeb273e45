"""The sending side of an HTTP/2 client: preface, heads of requests, and data within the server's windows (RFC 9113)."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence

from modelserver.wire.http2.frame import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_31_BITS,
    PREFACE,
    SETTINGS,
    frame,
    window_update,
)
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.hpack_tables import STATIC_TABLE, Field
from modelserver.wire.http2.settings import ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE

# Above this, buffers are written one by one instead of being joined.
JOIN_BYTES = 65536


class Outgoing:
    """Frames, and parts of frames, in order. Set `has_large` with each buffer above `JOIN_BYTES` in `parts`."""

    __slots__ = ("has_large", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.has_large = False

    def flush(self, transport: asyncio.WriteTransport) -> None:
        """Write what there is."""
        parts = self.parts
        if not parts:
            return
        self.parts = []
        if self.has_large:
            self.has_large = False
            transport.writelines(parts)
        else:
            transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class _Upload:
    """The unsent data of one stream."""

    __slots__ = ("ends", "parts", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.parts: deque[memoryview] = deque()
        self.ends = False


class Uploads:
    """The windows of a connection, and the streams that have more to send.

    Data that ends its stream and fits all windows needs no upload: its sender takes it off `window` itself.
    """

    __slots__ = ("_outgoing", "_uploads", "initial_window", "max_frame", "window")

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._uploads: dict[int, _Upload] = {}
        self.window = DEFAULT_WINDOW_BYTES
        self.initial_window = DEFAULT_WINDOW_BYTES
        self.max_frame = DEFAULT_FRAME_BYTES

    def begin(self, stream_id: int, data: bytes, *, ends: bool) -> None:
        """The first data of a stream."""
        self._uploads[stream_id] = _Upload(self.initial_window)
        self.add(stream_id, data, ends=ends)

    def add(self, stream_id: int, data: bytes, *, ends: bool) -> None:
        """More data of a stream that was begun without `ends`."""
        upload = self._uploads[stream_id]
        upload.parts.append(memoryview(data))
        upload.ends = ends
        self._pump(stream_id, upload)

    def drop(self, stream_id: int) -> None:
        """The stream is over."""
        self._uploads.pop(stream_id, None)

    def end_all(self) -> None:
        """End the streams of which nothing waits."""
        for stream_id in [stream_id for stream_id, upload in self._uploads.items() if not upload.parts]:
            self._outgoing.parts.append(frame(DATA, END_STREAM, stream_id, b""))
            del self._uploads[stream_id]

    def clear(self) -> None:
        """All streams are over."""
        self._uploads.clear()

    def apply(self, settings: Sequence[tuple[int, int]]) -> None:
        """Apply the peer's SETTINGS of windows and frames; another initial window moves those of all streams."""
        for key, value in settings:
            if key == MAX_FRAME_SIZE:
                self.max_frame = value
            elif key == INITIAL_WINDOW_SIZE:
                for upload in self._uploads.values():
                    upload.window += value - self.initial_window
                self.initial_window = value
        self._pump_all()

    def widen(self, stream_id: int, increment: int) -> None:
        """The peer accepts `increment` more bytes, on a stream or on the connection (stream 0)."""
        if not stream_id:
            self.window += increment
            self._pump_all()
        elif (upload := self._uploads.get(stream_id)) is not None:
            upload.window += increment
            self._pump(stream_id, upload)

    def _pump_all(self) -> None:
        for stream_id, upload in list(self._uploads.items()):
            if self.window <= 0:
                return
            self._pump(stream_id, upload)

    def _pump(self, stream_id: int, upload: _Upload) -> None:
        """Send what the windows allow."""
        raw_id = stream_id.to_bytes(4, "big")
        outgoing = self._outgoing
        while upload.parts:
            part = upload.parts[0]
            size = min(len(part), self.max_frame, self.window, upload.window)
            if size <= 0 and len(part):
                return
            self.window -= size
            upload.window -= size
            if size == len(part):
                upload.parts.popleft()
            else:
                upload.parts[0] = part[size:]
            outgoing.has_large = outgoing.has_large or size >= JOIN_BYTES
            is_end = upload.ends and not upload.parts
            outgoing.parts += ((size << 16 | (END_STREAM if is_end else 0)).to_bytes(5, "big") + raw_id, part[:size])
            if is_end:
                del self._uploads[stream_id]


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
        self.first_start = head_start(self.first)
        self.again = b"".join(again)
        self.again_start = head_start(self.again)


def head_start(block: bytes) -> bytes:
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


def greeting(frame_bytes: int, window_bytes: int = MAX_31_BITS) -> bytes:
    """The preface, and settings that let the server send `window_bytes` on a stream, in frames of `frame_bytes`."""
    settings = ((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, window_bytes), (MAX_FRAME_SIZE, frame_bytes))
    payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
    return PREFACE + frame(SETTINGS, 0, 0, payload) + window_update(0, MAX_31_BITS - DEFAULT_WINDOW_BYTES)
