"""HTTP/2 (RFC 9113) as a gRPC client under load needs it: frames, flow control, streams that come and go.

Knows nothing of gRPC but that a stream ends with fields. Heads that came before are not decoded again.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import cast

from modelserver.bench.address import Address
from modelserver.bench.h2_stream import Head, Stream, Upload, code_name
from modelserver.bench.request_head import DEFAULT_TABLE_BYTES, RequestHead
from modelserver.errors import UnavailableError
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    MAX_31_BITS,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    unpack_head,
)
from modelserver.wire.http2.hpack import Decoder, HeaderListTooLargeError, HpackError
from modelserver.wire.http2.static_table import Field

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5

# What we have read of a window before the peer gets it back.
WINDOW_STEP = 2**28
# Of an answer's head, uncompressed.
MAX_HEAD_BYTES = 2**20
MAX_REMEMBERED_HEADS = 256
# Above this, buffers are written one by one instead of being joined.
JOIN_BYTES = 65536
RECONNECT_DELAY_S = 0.05
SETTINGS_TIMEOUT_S = 10.0
FINISH_POLL_S = 0.005


class H2Connection(asyncio.Protocol):
    """A connection with many streams that opens itself again when the server closes it."""

    def __init__(self, address: Address, fields: Sequence[Field], *, frame_bytes: int = DEFAULT_FRAME_BYTES) -> None:
        """`fields` is the head of every request; `frame_bytes` the largest frame that we announce to accept."""
        self._address = address
        self._fields = fields
        self._frame_bytes = frame_bytes
        self._transport: asyncio.Transport | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Stream, bytes, bool]] = deque()
        self._out: list[bytes | memoryview] = []
        self._has_large = False
        self._is_reading = False
        self._is_closed = False
        self._is_lost = asyncio.Event()
        self._is_lost.set()
        self._begin()

    def _begin(self) -> None:
        """The state of a new connection."""
        self._is_ready = asyncio.Event()
        self._is_open = False
        self._decoder = Decoder(MAX_HEAD_BYTES)
        self._heads: dict[bytes, Head] = {}
        self._generation = 0
        self._streams: dict[int, Stream] = {}
        self._uploads: dict[int, Upload] = {}
        self._next_id = 1
        self._rest = b""
        self._fragment: tuple[int, int, bytes] | None = None
        self._unacknowledged = 0
        self._window = DEFAULT_WINDOW_BYTES
        self._initial_window = DEFAULT_WINDOW_BYTES
        self._max_frame = DEFAULT_FRAME_BYTES
        self._max_streams = MAX_31_BITS
        self._table_bytes = DEFAULT_TABLE_BYTES
        self._request_start = b""
        self._request_head = b""
        self._first_head: bytes | None = None

    async def connect(self) -> None:
        """Open the connection and wait for the server's settings. Raises UnavailableError."""
        await self._address.connect(lambda: self, "h2")
        try:
            async with asyncio.timeout(SETTINGS_TIMEOUT_S):
                await self._is_ready.wait()
        except TimeoutError:
            self._break("no settings")
            raise UnavailableError(f"{self._address} does not speak HTTP/2: is it the HTTP port?") from None
        if not self._is_open:
            raise UnavailableError(f"{self._address} closed the connection: does it speak gRPC?")

    async def finish(self, timeout_s: float) -> None:
        """End the streams that are open and let the server end them too, then close; at most `timeout_s`.

        A server may do badly when many streams vanish at once: a bench that has what it wants leaves politely.
        """
        for stream_id in [stream_id for stream_id, upload in self._uploads.items() if not upload.parts]:
            self._frame(DATA, END_STREAM, stream_id, b"")
            del self._uploads[stream_id]
        self._flush()
        ends_s = monotonic_ns() / 1e9 + timeout_s
        # Polled, once per run: an event would cost every stream a look at it.
        while self._streams and self._transport is not None and monotonic_ns() / 1e9 < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(FINISH_POLL_S)
        if self._transport is not None and not self._streams:
            self._frame(GOAWAY, 0, 0, bytes(8))
            self._flush()
            self._is_closed = True
            self._transport.close()
            return
        self.close()

    def close(self) -> None:
        """Drop the connection and what is on it; nobody is told."""
        self._is_closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    @property
    def max_streams(self) -> int:
        """How many streams the server allows at once; known once connected."""
        return self._max_streams

    # Sending

    def open(self, stream: Stream, data: bytes, *, ends: bool = True) -> int:
        """Start a stream with its first data; its id, or 0 if it has to wait for the connection.

        `stream` is told of everything that comes on it. Without `ends` more can be sent with `send`.
        """
        if not self._is_open or len(self._streams) >= self._max_streams:
            self._waiting.append((stream, data, ends))
            if not self._is_open:
                self._reopen()
            return 0
        stream_id = self._next_id
        self._next_id = stream_id + 2
        self._streams[stream_id] = stream
        raw_id = stream_id.to_bytes(4, "big")
        size = len(data)
        if self._first_head is not None:
            start, head, self._first_head = self._frame_start(self._first_head), self._first_head, None
        else:
            start, head = self._request_start, self._request_head
        if ends and size <= self._max_frame and size <= self._window and size <= self._initial_window:
            self._window -= size
            # A frame of data that ends its stream: length, type 0, flag 1.
            data_start = (size << 16 | END_STREAM).to_bytes(5, "big")
            if size < JOIN_BYTES:
                self._out.append(b"".join((start, raw_id, head, data_start, raw_id, data)))
            else:
                self._out += (b"".join((start, raw_id, head, data_start, raw_id)), data)
                self._has_large = True
        else:
            self._out.append(b"".join((start, raw_id, head)))
            self._uploads[stream_id] = Upload(self._initial_window)
            self._push(stream_id, data, ends=ends)
        if self._next_id > MAX_31_BITS:
            self._is_open = False
        if not self._is_reading:
            self._flush()
        return stream_id

    def send(self, stream_id: int, data: bytes) -> None:
        """More data of a stream that was opened without `ends`."""
        self._push(stream_id, data, ends=False)
        if not self._is_reading:
            self._flush()

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """Let the server send `num_bytes` more on a stream that stays open for long."""
        self._frame(WINDOW_UPDATE, 0, stream_id, num_bytes.to_bytes(4, "big"))

    @staticmethod
    def _frame_start(head: bytes) -> bytes:
        return (len(head) << 16 | HEADERS << 8 | END_HEADERS).to_bytes(5, "big")

    def _push(self, stream_id: int, data: bytes, *, ends: bool) -> None:
        upload = self._uploads[stream_id]
        upload.parts.append(memoryview(data))
        upload.ends = ends
        self._pump(stream_id, upload)

    def _pump(self, stream_id: int, upload: Upload) -> None:
        """Send as much as the windows allow."""
        raw_id = stream_id.to_bytes(4, "big")
        while upload.parts:
            part = upload.parts[0]
            size = min(len(part), self._max_frame, self._window, upload.window)
            if size <= 0 and len(part):
                return
            self._window -= size
            upload.window -= size
            if size == len(part):
                upload.parts.popleft()
            else:
                upload.parts[0] = part[size:]
            self._has_large = self._has_large or size >= JOIN_BYTES
            is_end = upload.ends and not upload.parts
            self._out += ((size << 16 | (END_STREAM if is_end else 0)).to_bytes(5, "big") + raw_id, part[:size])
            if is_end:
                del self._uploads[stream_id]

    def _pump_all(self) -> None:
        for stream_id, upload in list(self._uploads.items()):
            if self._window <= 0:
                return
            self._pump(stream_id, upload)

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None:
            return
        self._out = []
        if self._has_large:
            self._has_large = False
            self._transport.writelines(out)
        else:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _reopen(self) -> None:
        """Connect again for what waits, when the last stream of the old connection is over."""
        if self._is_closed or self._streams or (self._reconnecting is not None and not self._reconnecting.done()):
            return
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        await self._is_lost.wait()
        try:
            await self.connect()
        except UnavailableError as error:
            await asyncio.sleep(RECONNECT_DELAY_S)
            waiting, self._waiting = self._waiting, deque()
            # The owners send again at once, and so may start the next attempt.
            self._reconnecting = None
            for stream, _, _ in waiting:
                stream.on_end(None, monotonic_ns(), error.message)

    def _send_waiting(self) -> None:
        while self._waiting and self._is_open and len(self._streams) < self._max_streams:
            stream, data, ends = self._waiting.popleft()
            stream_id = self.open(stream, data, ends=ends)
            if stream_id:
                stream.on_open(stream_id)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._is_lost.clear()
        self._out.clear()
        self._begin()
        settings = ((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, MAX_31_BITS), (MAX_FRAME_SIZE, self._frame_bytes))
        payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
        self._frame(SETTINGS, 0, 0, payload)
        self._frame(WINDOW_UPDATE, 0, 0, (MAX_31_BITS - DEFAULT_WINDOW_BYTES).to_bytes(4, "big"))
        self._out.insert(0, PREFACE)
        self._flush()

    def data_received(self, data: bytes) -> None:  # noqa: C901
        """One function: this is the cost of a request."""
        now_ns = monotonic_ns()
        buffer = self._rest + data if self._rest else data
        size = len(buffer)
        offset = 0
        streams = self._streams
        heads = self._heads
        unpack = unpack_head
        self._is_reading = True
        while size - offset >= 9:
            high, low, kind, flags, stream_id = unpack(buffer, offset)
            start = offset + 9
            end = start + (high << 8 | low)
            if end > size:
                break
            offset = end
            if kind == DATA and not flags & PADDED:
                self._unacknowledged += end - start
                stream = streams.get(stream_id)
                if stream is not None:
                    stream.on_data(buffer, start, end, now_ns)
                    if flags & END_STREAM:
                        del streams[stream_id]
                        stream.on_end(None, now_ns, "the stream ended without a gRPC status")
            elif kind == HEADERS and flags & END_HEADERS and not flags & (PADDED | HAS_PRIORITY):
                head = heads.get(buffer[start:end]) or self._read_head(buffer[start:end])
                if head is None:
                    break
                if flags & END_STREAM:
                    stream = streams.pop(stream_id, None)
                    if stream is not None:
                        stream.on_end(head, now_ns, None)
                elif stream_id in streams:
                    streams[stream_id].on_head(head, now_ns)
            elif not self._take(kind, flags, stream_id, buffer[start:end], now_ns):
                break
        self._is_reading = False
        if self._transport is None:
            return
        self._rest = buffer[offset:] if offset < size else b""
        if self._unacknowledged >= WINDOW_STEP:
            self._frame(WINDOW_UPDATE, 0, 0, self._unacknowledged.to_bytes(4, "big"))
            self._unacknowledged = 0
        if self._waiting:
            if self._is_open:
                self._send_waiting()
            else:
                self._reopen()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost.set()
        self._is_open = False
        self._is_ready.set()
        self._transport = None
        reason = "the server closed the connection" + (f": {exc}" if exc else "")
        self._end_all(reason)
        if self._waiting:
            self._reopen()

    def _end_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._uploads.clear()
        if self._is_closed:
            return
        for stream in streams.values():
            stream.on_end(None, monotonic_ns(), reason)

    # What is not the common case

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self._out.append(frame(kind, flags, stream_id, payload))

    def _read_head(self, block: bytes) -> Head | None:
        try:
            head = Head(self._decoder.decode(block))
        except (HpackError, HeaderListTooLargeError) as error:
            self._break(str(error))
            return None
        if self._decoder.generation != self._generation or len(self._heads) >= MAX_REMEMBERED_HEADS:
            self._generation = self._decoder.generation
            self._heads.clear()
        else:
            self._heads[block] = head
        return head

    def _break(self, reason: str) -> None:
        """The connection cannot be read any further."""
        transport, self._transport = self._transport, None
        self._is_open = False
        if transport is not None:
            transport.abort()
        self._end_all(reason)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> bool:
        """Any other frame. False when the connection cannot go on."""
        if kind == SETTINGS and not flags & ACK:
            self._apply_settings(payload)
            self._frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            self._widen(stream_id, int.from_bytes(payload, "big") & MAX_31_BITS)
        elif kind == RST_STREAM:
            self._uploads.pop(stream_id, None)
            stream = self._streams.pop(stream_id, None)
            if stream is not None:
                stream.on_end(None, now_ns, f"the server reset the stream: {code_name(payload)}")
        elif kind == GOAWAY:
            self._go_away(payload, now_ns)
        elif kind in (DATA, HEADERS, CONTINUATION):
            return self._take_uncommon(kind, flags, stream_id, payload, now_ns)
        elif kind == PUSH_PROMISE:
            self._break("the server pushes, which it was told not to do")
            return False
        return True

    def _take_uncommon(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> bool:
        """Padded frames, and heads in several frames."""
        size = len(payload)
        if kind == DATA:
            self._unacknowledged += size
        if flags & PADDED and kind != CONTINUATION:
            payload = payload[1 : size - payload[0]]
        if kind == DATA:
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.on_data(payload, 0, len(payload), now_ns)
            is_end = bool(flags & END_STREAM)
            if is_end and (stream := self._streams.pop(stream_id, None)) is not None:
                stream.on_end(None, now_ns, "the stream ended without a gRPC status")
            return True
        if kind == HEADERS:
            block = payload[5:] if flags & HAS_PRIORITY else payload
            self._fragment = (stream_id, flags & END_STREAM, block)
        elif self._fragment is None or self._fragment[0] != stream_id:
            self._break("a CONTINUATION frame that continues nothing")
            return False
        else:
            self._fragment = (stream_id, self._fragment[1], self._fragment[2] + payload)
        if not flags & END_HEADERS:
            return True
        _, ends, block = self._fragment
        self._fragment = None
        head = self._read_head(block)
        if head is None:
            return False
        if ends and (stream := self._streams.pop(stream_id, None)) is not None:
            stream.on_end(head, now_ns, None)
        elif not ends and stream_id in self._streams:
            self._streams[stream_id].on_head(head, now_ns)
        return True

    def _apply_settings(self, payload: bytes) -> None:
        is_new_table = not self._is_ready.is_set()
        for key, value in struct.iter_unpack(">HI", payload):
            if key == HEADER_TABLE_SIZE:
                self._table_bytes = min(self._table_bytes, value)
                is_new_table = True
            elif key == MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif key == INITIAL_WINDOW_SIZE:
                for upload in self._uploads.values():
                    upload.window += value - self._initial_window
                self._initial_window = value
            elif key == MAX_FRAME_SIZE:
                self._max_frame = value
        self._pump_all()
        if is_new_table:
            head = RequestHead(self._fields, table_bytes=self._table_bytes)
            self._first_head, self._request_head = head.first, head.again
            self._request_start = self._frame_start(head.again)
        if not self._is_ready.is_set():
            self._is_open = True
            self._is_ready.set()

    def _widen(self, stream_id: int, increment: int) -> None:
        if not stream_id:
            self._window += increment
            self._pump_all()
        elif (upload := self._uploads.get(stream_id)) is not None:
            upload.window += increment
            self._pump(stream_id, upload)

    def _go_away(self, payload: bytes, now_ns: int) -> None:
        """No new streams here; those that the server has not taken fail, the others are finished."""
        self._is_open = False
        last_id = int.from_bytes(payload[:4], "big") & MAX_31_BITS
        code = payload[4:8]
        for stream_id in [stream_id for stream_id in self._streams if stream_id > last_id]:
            self._uploads.pop(stream_id, None)
            reason = f"the server is going away, {code_name(code)}"
            self._streams.pop(stream_id).on_end(None, now_ns, f"{reason}: {payload[8:108].decode(errors='replace')}")
        if self._waiting:
            self._reopen()
