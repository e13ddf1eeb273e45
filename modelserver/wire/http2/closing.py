"""How a connection ends: in two steps so that no request is lost, or at once (RFC 9113, 6.8)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from modelserver.wire.http2.frame import MAX_31_BITS, ErrorCode, goaway, ping, rst_stream

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection

# The ping whose answer shows that the client has seen the first GOAWAY.
_MARKER: Final = b"leaving!"
# For a client that does not answer it.
_MARKER_TIMEOUT_S: Final = 5.0
# The most bytes that are read and dropped after the last frame.
_MAX_DISCARDED_BYTES: Final = 1024 * 1024


class _Step(enum.Enum):
    OPEN = "open"
    ANNOUNCED = "announced"  # the client knows that it should open no further streams
    FINAL = "final"  # newer streams are ignored
    HUNG_UP = "hung up"  # nothing is sent any more


class Closing:
    """The end of one connection.

    Gracefully: a GOAWAY that allows all streams and a PING; when that is answered, a GOAWAY with the last stream;
    when all streams are done, the end of the sending side; and when the client closes, or after a while, the end.
    """

    __slots__ = ("_connection", "_num_discarded", "_step", "_timers")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._step = _Step.OPEN
        self._timers: list[asyncio.TimerHandle] = []
        self._num_discarded = 0

    @property
    def is_due(self) -> bool:
        """Whether the connection closes as soon as its streams are done."""
        return self._step is _Step.FINAL

    @property
    def has_begun(self) -> bool:
        return self._step is not _Step.OPEN

    @property
    def has_hung_up(self) -> bool:
        return self._step is _Step.HUNG_UP

    def announce(self, grace_s: float | None = None) -> None:
        """Begin the graceful end; after `grace_s` it becomes abrupt. Safe to repeat."""
        if self._step is not _Step.OPEN:
            return
        self._step = _Step.ANNOUNCED
        connection = self._connection
        connection.sender.frames += (goaway(MAX_31_BITS, ErrorCode.NO_ERROR), ping(_MARKER))
        connection.schedule_flush()
        self._later(_MARKER_TIMEOUT_S, self.refuse)
        if grace_s is not None:
            self._later(grace_s, connection.abort)

    def ping_answered(self, payload: bytes) -> None:
        """Our PING was acknowledged."""
        if payload == _MARKER:
            self.refuse()

    def close_if_done(self) -> None:
        """Hang up if all streams are done and their answers are handed to the transport."""
        connection = self._connection
        if self.is_due and not connection.streams and not connection.sender.has_ready:
            self.hang_up(then=connection.transport.close)

    def hang_up(self, *, then: Callable[[], None]) -> None:
        """Send the pending data as the last, read nothing more, and close by `then` unless the client does so soon.

        Closing at once, with unread data, would reset the connection, and the reset can overtake the last answers.
        """
        if self._step is _Step.HUNG_UP:
            return
        self._step = _Step.HUNG_UP
        connection, transport = self._connection, self._connection.transport
        connection.leave_streams()
        connection.receiver.discard()
        connection.sender.flush()
        connection.sender.shut()
        if transport.is_closing():
            return
        transport.write_eof()
        self._later(connection.context.limits.times.linger_s, then)

    def count_discarded(self, num_bytes: int) -> None:
        """Data arrived after our last frame."""
        self._num_discarded += num_bytes
        if self._num_discarded > _MAX_DISCARDED_BYTES:
            self._connection.abort()

    def cancel_timers(self) -> None:
        """The connection is lost."""
        self._step = _Step.HUNG_UP
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def refuse(self) -> None:
        """The client knows, or had time to learn: streams that it opens from now on violate the GOAWAY."""
        if self._step is not _Step.ANNOUNCED:
            return
        self._step = _Step.FINAL
        connection = self._connection
        connection.last_admissible_id = connection.last_stream_id
        connection.sender.frames.append(goaway(connection.last_stream_id, ErrorCode.NO_ERROR))
        connection.schedule_flush()

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers.append(self._connection.context.loop.call_later(delay_s, act))


# Streams beyond this number are not waited for.
_MAX_WAITED_FOR: Final = 100


class UnendedStreams:
    """Asks the client to stop (RFC 9113, 8.1) if it sends more, or has not ended its side within `linger_s`.

    Not at once: most are about to end, and HAProxy discards the buffered part of an answer when the stream is reset
    after it.
    """

    __slots__ = ("_connection", "_due_s", "_timer")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        # Until when each is waited for, the oldest first.
        self._due_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream_id: int) -> None:
        """Our side has ended, and the client's has not."""
        loop, linger_s = self._connection.context.loop, self._connection.context.limits.times.linger_s
        self._due_s[stream_id] = loop.time() + linger_s
        if len(self._due_s) > _MAX_WAITED_FOR:
            self._stop(next(iter(self._due_s)))
        if self._timer is None:
            self._timer = loop.call_later(linger_s, self._look)

    def go_on(self, stream_id: int) -> None:
        """The client sends more on a stream that was closed."""
        if stream_id in self._due_s:
            self._stop(stream_id)

    def end(self, stream_id: int) -> bool:
        """The client has ended its side, or reset it; returns whether it was waited for."""
        return self._due_s.pop(stream_id, None) is not None

    def close(self) -> None:
        """The connection ends."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = self._connection.context.loop
        now_s = loop.time()
        self._timer = None
        for stream_id, due_s in list(self._due_s.items()):
            if due_s > now_s:
                self._timer = loop.call_at(due_s, self._look)
                break
            self._stop(stream_id)

    def _stop(self, stream_id: int) -> None:
        del self._due_s[stream_id]
        self._connection.sender.frames.append(rst_stream(stream_id, ErrorCode.NO_ERROR))
        self._connection.schedule_flush()
