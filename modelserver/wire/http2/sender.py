"""The sending side of a connection: frames in order, flow control, and a fair turn for every stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from modelserver.core.tensor import Buffer
from modelserver.wire.http2.frame import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_31_BITS,
    ConnectionFault,
    ErrorCode,
    frame,
    pack_head,
)
from modelserver.wire.http2.hpack import TABLE_SIZE_UPDATE
from modelserver.wire.sockets.transport import gathers


class Outgoing:
    """The unsent data of one stream: parts of a body, by reference, and the block that ends the stream.

    `ending` is None while more may follow, and b"" where the last DATA frame ends the stream. `room` is the
    future of a handler that waits for the queue to become short.
    """

    __slots__ = ("ending", "is_ready", "num_bytes", "offset", "parts", "room", "stuck_since_s")

    def __init__(self) -> None:
        self.parts: deque[Buffer] = deque()
        # How much of the first part was already sent.
        self.offset = 0
        self.num_bytes = 0
        self.ending: bytes | None = None
        # Whether the stream is in the sender's queue; a stream whose window is used up is not.
        self.is_ready = False
        self.room: asyncio.Future[None] | None = None
        # Since the sweep first saw that nothing moves.
        self.stuck_since_s: float | None = None

    def add(self, parts: Sequence[Buffer]) -> int:
        """More of the body; returns its size."""
        before = self.num_bytes
        for part in parts:
            if part:
                self.parts.append(part)
                self.num_bytes += len(part)
        return self.num_bytes - before

    def frame(self, frames: list[Buffer], stream_id: int, size: int, max_frame: int) -> None:
        """Append DATA frames for the next `size` bytes to `frames`; nothing is copied."""
        self.num_bytes -= size
        self.stuck_since_s = None
        ends_stream = not self.num_bytes and self.ending == b""
        # Full frames of a run share one head.
        full_head = pack_head(max_frame >> 8, max_frame & 0xFF, DATA, 0, stream_id)
        while size > 0:
            length = min(size, max_frame)
            size -= length
            is_last = ends_stream and not size
            if length == max_frame and not is_last:
                frames.append(full_head)
            else:
                flags = END_STREAM if is_last else 0
                frames.append(pack_head(length >> 8, length & 0xFF, DATA, flags, stream_id))
            self._slice(frames, length)

    def wake(self) -> None:
        """There is room again, or nothing more will be sent."""
        room, self.room = self.room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _slice(self, frames: list[Buffer], length: int) -> None:
        parts = self.parts
        while length:
            part, offset = parts[0], self.offset
            available = len(part) - offset
            if available <= length:
                frames.append(memoryview(part)[offset:] if offset else part)
                parts.popleft()
                self.offset = 0
                length -= available
            else:
                frames.append(memoryview(part)[offset : offset + length])
                self.offset = offset + length
                length = 0


class SendingStream:
    """A stream as the sender sees it: how many bytes the peer lets it send, and its unsent data."""

    if not TYPE_CHECKING:  # mypy would take these for the only slots
        __slots__ = ()

    id: int
    send_window: int
    outgoing: Outgoing | None


# Bytes that one stream may send before it is the next one's turn.
_TURN_BYTES: Final = 256 * 1024
# An answer up to this size is copied into one piece with its frames' heads; a larger one is sent without copying.
INLINE_BYTES: Final = 16 * 1024
# Pieces below this size are joined before they are written.
_MAX_JOINED_BYTES: Final = 64 * 1024


class Sender:
    """The sending half of a connection. Event loop thread only.

    `frames` are the next bytes to write, in this order: an acknowledgement of SETTINGS must not overtake frames that
    were made before them. `window` is the connection's. `inline_bytes` is the size up to which a stream may put an
    answer into `frames` by itself, and 0 while answers must queue. `finished` are the ids of the streams whose answers
    were framed to their end; the connection takes them after each flush.
    """

    __slots__ = (
        "_block_prefix",
        "_is_shut",
        "_joins_all",
        "_max_frame",
        "_max_pumped_bytes",
        "_ready",
        "_transport",
        "finished",
        "frames",
        "initial_window",
        "inline_bytes",
        "is_paused",
        "num_blocks",
        "num_granted",
        "num_queued_bytes",
        "num_turns",
        "window",
    )

    def __init__(self, transport: asyncio.Transport, write_buffer_bytes: int) -> None:
        """`write_buffer_bytes` is the limit beyond which the transport says that it is full."""
        self._transport = transport
        self._joins_all = not gathers(transport)
        # At most this much is turned into frames at once: the transport says only afterwards that it is full.
        self._max_pumped_bytes = 2 * write_buffer_bytes
        self._is_shut = False
        self._block_prefix = b""
        self._max_frame = DEFAULT_FRAME_BYTES
        self._ready: deque[SendingStream] = deque()
        self.frames: list[Buffer] = []
        self.finished: list[int] = []
        self.initial_window = DEFAULT_WINDOW_BYTES
        self.window = DEFAULT_WINDOW_BYTES
        self.inline_bytes = INLINE_BYTES
        self.is_paused = False
        self.num_queued_bytes = 0
        # How often a stream has sent from its queue, how many blocks were sent, how many bytes of DATA ever allowed.
        self.num_turns = 0
        self.num_blocks = 0
        self.num_granted = DEFAULT_WINDOW_BYTES

    # Blocks and bodies of streams.

    def send_block(self, stream_id: int, block: bytes, flags: int = 0) -> None:
        """HEADERS, in several frames if the block needs them."""
        self.num_blocks += 1
        if self._block_prefix:
            block = self._block_prefix + block
            self._block_prefix = b""
            self._update_inline()
        size = self._max_frame
        if len(block) <= size:
            self.frames.append(frame(HEADERS, flags | END_HEADERS, stream_id, block))
            return
        self.frames.append(frame(HEADERS, flags, stream_id, block[:size]))
        for start in range(size, len(block), size):
            last = END_HEADERS if start + size >= len(block) else 0
            self.frames.append(frame(CONTINUATION, last, stream_id, block[start : start + size]))

    def queue(self, stream: SendingStream, parts: Sequence[Buffer], ending: bytes | None = None) -> None:
        """Send the parts as the windows allow, and then `ending`, which may be given once."""
        outgoing = stream.outgoing
        if outgoing is None:
            outgoing = stream.outgoing = Outgoing()
        self.num_queued_bytes += outgoing.add(parts)
        outgoing.ending = ending
        self._make_ready(stream, outgoing)
        self._update_inline()

    def send_data(self, stream: SendingStream, parts: Sequence[Buffer]) -> bool:
        """Send a small message at once; False, and nothing sent, if it must be queued."""
        size = sum(map(len, parts))
        if size > self.inline_bytes or size > self.window or size > stream.send_window or stream.outgoing is not None:
            return False
        self.num_turns += 1
        self.window -= size
        stream.send_window -= size
        self.frames.append(b"".join((pack_head(size >> 8, size & 0xFF, DATA, 0, stream.id), *parts)))
        return True

    def drop(self, stream: SendingStream) -> int:
        """Forget the waiting data of a stream that is gone; returns its size."""
        outgoing = stream.outgoing
        if outgoing is None:
            return 0
        stream.outgoing = None
        self.num_queued_bytes -= outgoing.num_bytes
        if outgoing.is_ready:
            self._ready.remove(stream)
        self._update_inline()
        outgoing.wake()
        return outgoing.num_bytes

    def send_whole(self, stream: SendingStream, block: bytes, data: Buffer) -> None:
        """HEADERS, and the DATA that ends the stream: in one piece where it is small."""
        size, num_block = len(data), len(block)
        if size > self.inline_bytes or size > self.window or size > stream.send_window or num_block > INLINE_BYTES:
            self.send_block(stream.id, block)
            self.queue(stream, (data,), b"")
            return
        self.num_blocks += 1
        self.num_turns += 1
        self.window -= size
        stream.send_window -= size
        block_head = pack_head(num_block >> 8, num_block & 0xFF, HEADERS, END_HEADERS, stream.id)
        data_head = pack_head(size >> 8, size & 0xFF, DATA, END_STREAM, stream.id)
        self.frames.append(b"".join((block_head, block, data_head, data)))

    # The peer's flow control.

    def set_initial_window(self, num_bytes: int, streams: Iterable[SendingStream]) -> None:
        """The peer's setting, which moves the window of every open stream. Raises ConnectionFault on overflow."""
        change = num_bytes - self.initial_window
        self.initial_window = num_bytes
        for stream in streams:
            stream.send_window += change
            if stream.send_window > MAX_31_BITS:
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS moved the window of stream {stream.id} over 2^31-1 bytes"
                )
            if stream.outgoing is not None:
                self._make_ready(stream, stream.outgoing)

    def set_max_frame(self, num_bytes: int) -> None:
        self._max_frame = num_bytes

    def forget_table(self) -> None:
        """The peer's header table is smaller than the default: our next block must begin with a size update."""
        self._block_prefix = TABLE_SIZE_UPDATE
        self._update_inline()

    def add_connection_window(self, num_bytes: int) -> None:
        """The peer lets us send more on all streams together. Raises ConnectionFault on overflow."""
        self.window += num_bytes
        self.num_granted += num_bytes
        if self.window > MAX_31_BITS:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is over 2^31-1 bytes")

    def add_window(self, stream: SendingStream) -> None:
        """The stream's window has grown."""
        if stream.outgoing is not None:
            self._make_ready(stream, stream.outgoing)

    def set_paused(self, is_paused: bool) -> None:
        """The transport is full, or has room again."""
        self.is_paused = is_paused
        self._update_inline()

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever HEADERS or DATA are sent."""
        return self.num_blocks, self.num_granted - self.window

    @property
    def has_ready(self) -> bool:
        """Whether a stream has something to send that its own window allows."""
        return bool(self._ready)

    def holds_more_than(self, num_bytes: int) -> bool:
        """Whether the peer leaves that much unread, in the transport and here."""
        return self.is_paused and self._transport.get_write_buffer_size() + self.num_queued_bytes > num_bytes

    # Writing.

    def shut(self) -> None:
        """Nothing more is sent."""
        self._is_shut = True

    def flush(self) -> bool:
        """Write the pending data in one call; returns whether there is more to write in the next turn of the loop."""
        if self._is_shut or self._transport.is_closing():
            self.frames.clear()
            return False
        num_bytes = self._pump() if self._ready and not self.is_paused else 0
        pieces = self.frames
        if pieces:
            self.frames = []
            if len(pieces) == 1:
                self._transport.write(pieces[0])
            elif self._joins_all or num_bytes <= _MAX_JOINED_BYTES:
                self._transport.write(b"".join(pieces))
            else:
                self._transport.writelines(pieces)
        return num_bytes >= self._max_pumped_bytes and bool(self._ready)

    def _make_ready(self, stream: SendingStream, outgoing: Outgoing) -> None:
        has_something = outgoing.num_bytes or outgoing.ending is not None
        can_move = stream.send_window > 0 or not outgoing.num_bytes
        if has_something and can_move and not outgoing.is_ready:
            outgoing.is_ready = True
            self._ready.append(stream)

    def _update_inline(self) -> None:
        must_queue = self._ready or self.is_paused or self._block_prefix
        self.inline_bytes = 0 if must_queue else INLINE_BYTES

    def _pump(self) -> int:
        """Turn as much data as the windows allow into frames, stream by stream; returns the number of bytes."""
        ready = self._ready
        pumped = 0
        while ready and pumped < self._max_pumped_bytes:
            stream = ready.popleft()
            outgoing = stream.outgoing
            assert outgoing is not None, "a stream without an answer is not ready"
            size = min(outgoing.num_bytes, self.window, stream.send_window, _TURN_BYTES)
            if size > 0:
                self._frame_data(stream, outgoing, size)
                pumped += size
            elif outgoing.num_bytes and stream.send_window > 0:
                ready.appendleft(stream)  # it is the connection's window that is used up
                break
            elif outgoing.ending == b"" and not outgoing.num_bytes:
                self.frames.append(frame(DATA, END_STREAM, stream.id))
            self._go_on(stream, outgoing)
        self._update_inline()
        return pumped

    def _go_on(self, stream: SendingStream, outgoing: Outgoing) -> None:
        """After a turn of the stream: the next one, a pause, or its end."""
        if outgoing.room is not None and outgoing.num_bytes < INLINE_BYTES:
            outgoing.wake()
        if not outgoing.num_bytes and outgoing.ending is not None:
            if outgoing.ending:
                self.send_block(stream.id, outgoing.ending, END_STREAM)
            stream.outgoing = None
            self.finished.append(stream.id)
        elif outgoing.num_bytes and stream.send_window > 0:
            self._ready.append(stream)
        else:
            outgoing.is_ready = False

    def _frame_data(self, stream: SendingStream, outgoing: Outgoing, size: int) -> None:
        """DATA frames for the next `size` bytes of the stream."""
        self.num_turns += 1
        self.window -= size
        stream.send_window -= size
        self.num_queued_bytes -= size
        outgoing.frame(self.frames, stream.id, size, self._max_frame)
