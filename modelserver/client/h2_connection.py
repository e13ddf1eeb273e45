"""HTTP/2 (RFC 9113) as a gRPC client under load needs it: frames, flow control, streams that come and go.

Knows nothing of gRPC but that a stream ends with fields. Heads that came before are not decoded again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from typing import cast

from modelserver.client.address import Address
from modelserver.client.h2_incoming import Head, HeadReader, Stream, Unprocessed, code_name, unpadded
from modelserver.client.h2_outgoing import (
    DEFAULT_TABLE_BYTES,
    JOIN_BYTES,
    Outgoing,
    RequestHead,
    Uploads,
    greeting,
    head_start,
)
from modelserver.errors import UnavailableError
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    MAX_31_BITS,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    frame,
    protocol_fault,
    unpack_head,
)
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.http2.settings import (
    HEADER_TABLE_SIZE,
    MAX_CONCURRENT_STREAMS,
    read_settings,
)

# Of one SETTINGS frame.
MAX_SETTINGS = 256
# The bytes that we read of a window before the peer gets them back.
WINDOW_STEP = 2**28
RECONNECT_DELAY_S = 0.05
SETTINGS_TIMEOUT_S = 10.0
FINISH_POLL_S = 0.005

NO_STATUS = "the stream ended without a gRPC status"


class H2Connection(asyncio.Protocol):
    """A connection with many streams that opens itself again when the server closes it."""

    def __init__(
        self,
        address: Address,
        fields: Sequence[Field],
        *,
        frame_bytes: int = DEFAULT_FRAME_BYTES,
        window_bytes: int = MAX_31_BITS,
    ) -> None:
        """`fields` is the head of every request; `frame_bytes` the largest frame that we announce to accept.

        With smaller `window_bytes`, what a stream may be sent before it acknowledges, its owner can hold a server back.
        """
        self._address = address
        self._fields = fields
        self._frame_bytes = frame_bytes
        self._window_bytes = window_bytes
        self._transport: asyncio.Transport | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Stream, bytes, bool]] = deque()
        self._is_reading = False
        self._is_closed = False
        self._is_lost = asyncio.Event()
        self._is_lost.set()
        self._begin()

    def _begin(self) -> None:
        """The state of a new connection."""
        self._is_ready = asyncio.Event()
        self._is_open = False
        self._heads = HeadReader(Head)
        self._streams: dict[int, Stream] = {}
        self._out = Outgoing()
        self._uploads = Uploads(self._out)
        self._next_id = 1
        self._rest = b""
        self._unacknowledged = 0
        self._max_streams = MAX_31_BITS
        self._table_bytes = DEFAULT_TABLE_BYTES
        self._request: RequestHead | None = None
        self._is_first = True

    async def connect(self) -> None:
        """Open the connection and wait for the server's settings. Raises UnavailableError."""
        await self._address.connect(lambda: self, "h2")
        await self.greet(SETTINGS_TIMEOUT_S)

    async def greet(self, timeout_s: float) -> None:
        """Wait for the settings of the server to which a connection was opened. Raises UnavailableError."""
        try:
            async with asyncio.timeout(timeout_s):
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
        self._uploads.end_all()
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
        """Drop the connection and its streams, without notifying their owners."""
        self._is_closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def lose(self, reason: str) -> None:
        """Give the connection up: its streams end with `reason`."""
        self._break(reason)

    @property
    def max_streams(self) -> int:
        """How many streams the server allows at once; known once connected."""
        return self._max_streams

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def has_room(self) -> bool:
        """Whether another stream could start at once."""
        return self._is_open and len(self._streams) < self._max_streams

    @property
    def is_open(self) -> bool:
        """Whether new streams may start, now or when others have ended."""
        return self._is_open

    # Sending

    def open(self, stream: Stream, data: bytes, *, ends: bool = True) -> int:
        """Start a stream with its first data; its id, or 0 if it has to wait for the connection.

        `stream` receives everything that arrives on it. Without `ends` more can be sent with `send`. While `has_room`,
        `open_with` starts a stream with a head of its own.
        """
        if not self._is_open or len(self._streams) >= self._max_streams:
            self._waiting.append((stream, data, ends))
            if not self._is_open:
                self._reopen()
            return 0
        stream_id = self._next_id
        self._next_id = stream_id + 2
        self._streams[stream_id] = stream
        request = self._request
        assert request is not None, "an open connection has settings"
        if self._is_first:
            self._is_first = False
            start, head = request.first_start, request.first
        else:
            start, head = request.again_start, request.again
        self._start(stream_id, start, head, data, ends=ends)
        return stream_id

    def open_with(self, stream: Stream, data: bytes, *, block: bytes = b"", more: bytes = b"") -> int:
        """Start a stream that ends with its data, while there is room: with the head `block`, or the usual and `more`.

        Both are blocks of literals that change no table.
        """
        stream_id = self._next_id
        self._next_id = stream_id + 2
        self._streams[stream_id] = stream
        request = self._request
        assert request is not None, "an open connection has settings"
        if not block:
            block = (request.first if self._is_first else request.again) + more
            self._is_first = False
        self._start(stream_id, head_start(block), block, data, ends=True)
        return stream_id

    def _start(self, stream_id: int, start: bytes, head: bytes, data: bytes, *, ends: bool) -> None:
        raw_id, size = stream_id.to_bytes(4, "big"), len(data)
        out, uploads = self._out, self._uploads
        if ends and size <= uploads.max_frame and size <= uploads.window and size <= uploads.initial_window:
            uploads.window -= size
            # A frame of data that ends its stream: length, type 0, flag 1.
            data_start = (size << 16 | END_STREAM).to_bytes(5, "big")
            if size < JOIN_BYTES:
                out.parts.append(b"".join((start, raw_id, head, data_start, raw_id, data)))
            else:
                out.parts += (b"".join((start, raw_id, head, data_start, raw_id)), data)
                out.has_large = True
        else:
            out.parts.append(b"".join((start, raw_id, head)))
            uploads.begin(stream_id, data, ends=ends)
        if self._next_id > MAX_31_BITS:
            self._is_open = False
        if not self._is_reading:
            self._flush()

    def send(self, stream_id: int, data: bytes) -> None:
        """More data of a stream that was opened without `ends`."""
        self._uploads.add(stream_id, data, ends=False)
        if not self._is_reading:
            self._flush()

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """Let the server send `num_bytes` more on a stream that stays open for long."""
        self._frame(WINDOW_UPDATE, 0, stream_id, num_bytes.to_bytes(4, "big"))
        if not self._is_reading:
            self._flush()

    def cancel(self, stream_id: int) -> None:
        """End a stream whose answer is not wanted any more; its owner is not called again."""
        if self._streams.pop(stream_id, None) is not None:
            self._uploads.drop(stream_id)
            self._frame(RST_STREAM, 0, stream_id, int(ErrorCode.CANCEL).to_bytes(4, "big"))
            if not self._is_reading:
                self._flush()

    def _flush(self) -> None:
        if self._transport is not None:
            self._out.flush(self._transport)

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
        self._begin()
        self._out.parts.append(greeting(self._frame_bytes, self._window_bytes))
        self._flush()

    def data_received(self, data: bytes) -> None:  # noqa: C901
        """One function: this is the cost of a request."""
        now_ns = monotonic_ns()
        buffer = self._rest + data if self._rest else data
        size = len(buffer)
        offset = 0
        streams = self._streams
        heads = self._heads.known
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
                        stream.on_end(None, now_ns, NO_STATUS)
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

    def _end(self, stream_id: int, head: Head | None, now_ns: int, problem: str | None) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.on_end(head, now_ns, problem)

    def _end_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        self._uploads.clear()
        if self._is_closed:
            return
        for stream in streams.values():
            stream.on_end(None, monotonic_ns(), reason)

    # Less common cases

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self._out.parts.append(frame(kind, flags, stream_id, payload))

    def _read_head(self, block: bytes) -> Head | None:
        try:
            return self._heads.read(block)
        except ConnectionFault as fault:
            self._break(fault.text)
            return None

    def _break(self, reason: str) -> None:
        """The connection cannot be read any further."""
        transport, self._transport = self._transport, None
        self._is_open = False
        if transport is not None:
            transport.abort()
        self._end_all(reason)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> bool:
        """Any other frame. False when the connection cannot go on."""
        try:
            self._take_uncommon(kind, flags, stream_id, payload, now_ns)
        except ConnectionFault as fault:
            self._break(fault.text)
            return False
        return True

    def _take_uncommon(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> None:
        """Raises ConnectionFault when the connection cannot be read any further."""
        if kind == SETTINGS and not flags & ACK:
            self._apply_settings(read_settings(payload, MAX_SETTINGS))
            self._frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            self._uploads.widen(stream_id, int.from_bytes(payload, "big") & MAX_31_BITS)
        elif kind == RST_STREAM:
            self._uploads.drop(stream_id)
            reason = f"the server reset the stream: {code_name(payload)}"
            is_refused = int.from_bytes(payload, "big") == ErrorCode.REFUSED_STREAM
            self._end(stream_id, None, now_ns, Unprocessed(reason) if is_refused else reason)
        elif kind == GOAWAY:
            self._go_away(payload, now_ns)
        elif kind == DATA:
            self._take_padded(flags, stream_id, payload, now_ns)
        elif kind in (HEADERS, CONTINUATION):
            self._take_part(kind, flags, stream_id, payload, now_ns)
        elif kind == PUSH_PROMISE:
            raise protocol_fault("the server pushes, which it was told not to do")

    def _take_part(self, kind: int, flags: int, stream_id: int, payload: bytes, now_ns: int) -> None:
        """A head in several frames, or with padding."""
        complete = self._heads.read_part(kind, flags, stream_id, payload)
        if complete is None:
            return
        head, ends = complete
        if ends:
            self._end(stream_id, head, now_ns, None)
        elif stream_id in self._streams:
            self._streams[stream_id].on_head(head, now_ns)

    def _take_padded(self, flags: int, stream_id: int, payload: bytes, now_ns: int) -> None:
        self._unacknowledged += len(payload)
        data = unpadded(flags, payload)
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.on_data(data, 0, len(data), now_ns)
        if flags & END_STREAM:
            self._end(stream_id, None, now_ns, NO_STATUS)

    def _apply_settings(self, settings: list[tuple[int, int]]) -> None:
        is_new_table = not self._is_ready.is_set()
        for key, value in settings:
            if key == HEADER_TABLE_SIZE:
                self._table_bytes = min(self._table_bytes, value)
                is_new_table = True
            elif key == MAX_CONCURRENT_STREAMS:
                self._max_streams = value
        self._uploads.apply(settings)
        if is_new_table:
            self._request, self._is_first = RequestHead(self._fields, table_bytes=self._table_bytes), True
        if not self._is_ready.is_set():
            self._is_open = True
            self._is_ready.set()

    def _go_away(self, payload: bytes, now_ns: int) -> None:
        """No new streams here; those that the server has not taken fail, the others are finished."""
        self._is_open = False
        last_id = int.from_bytes(payload[:4], "big") & MAX_31_BITS
        text = payload[8:108].decode(errors="replace")
        reason = Unprocessed(f"the server is going away, {code_name(payload[4:8])}: {text}")
        for stream_id in [stream_id for stream_id in self._streams if stream_id > last_id]:
            self._uploads.drop(stream_id)
            self._end(stream_id, None, now_ns, reason)
        if self._waiting:
            self._reopen()
