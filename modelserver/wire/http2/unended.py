"""Streams that we have answered while the client was still sending."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from modelserver.wire.http2.frame import ErrorCode, rst_stream

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection

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
