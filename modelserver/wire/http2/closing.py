"""How a connection ends: in two steps so that no request is lost, or at once (RFC 9113, 6.8)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Final

from modelserver.wire.http2.frame import MAX_31_BITS, ErrorCode, goaway, ping
from modelserver.wire.http2.stream import Connection

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

    def __init__(self, connection: Connection) -> None:
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
            self._later(grace_s, connection.transport.abort)

    def ping_answered(self, payload: bytes) -> None:
        """Our PING was acknowledged."""
        if payload == _MARKER:
            self.refuse()

    def hang_up(self, *, then: Callable[[], None]) -> None:
        """Send the pending data as the last, read nothing more, and close by `then` unless the client does so soon.

        Closing at once, with unread data, would reset the connection, and the reset can overtake the last answers.
        """
        if self._step is _Step.HUNG_UP:
            return
        self._step = _Step.HUNG_UP
        connection, transport = self._connection, self._connection.transport
        connection.leave_streams()
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
            self._connection.transport.abort()

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
