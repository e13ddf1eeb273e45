"""An answer whose body is sent piece by piece: chunks, or bytes up to the close for HTTP/1.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from modelserver.core.tensor import Buffer

_EVENT_STREAM = "text/event-stream"
_COMMENT = b": ping\n\n"
_COMMENT_CHUNK = (b"%x\r\n" % len(_COMMENT), _COMMENT, b"\r\n")
_LAST_CHUNK = b"0\r\n\r\n"


class PieceSink(Protocol):
    """The connection, as the writer of pieces sees it."""

    __slots__ = ()

    @property
    def has_room(self) -> bool:
        """Whether the client has read enough for more to be sent."""

    async def room(self) -> None:
        """Wait until the client has read enough for more to be sent, or has left."""

    def send_piece(self, buffers: Sequence[Buffer]) -> bool:
        """Send these buffers soon; as `has_room` afterwards."""

    def end_pieces(self) -> None:
        """The answer is complete."""

    def abort(self) -> None:
        """Close now: the answer will not be complete."""


class PieceWriter:
    """Made when the head was sent. A client that has left ends it by `lost`.

    `is_silent` for the answer to HEAD: it has no body.
    """

    __slots__ = ("_connection", "_ends_event", "_is_chunked", "_is_event_stream", "_is_silent", "_silent_since_s")

    def __init__(
        self, connection: PieceSink, headers: list[tuple[str, str]], *, is_chunked: bool, is_silent: bool
    ) -> None:
        self._connection: PieceSink | None = connection
        self._is_chunked = is_chunked
        self._is_silent = is_silent
        self._is_event_stream = any(
            name.lower() == "content-type" and value.startswith(_EVENT_STREAM) for name, value in headers
        )
        self._ends_event = True  # a comment may stand here
        self._silent_since_s: float | None = None  # as found by `keep_open`

    def send(self, data: Buffer) -> bool:
        """Send a piece; whether there is room for more. Raises ConnectionResetError when the client has left."""
        connection = self._connection
        if connection is None:
            raise ConnectionResetError("the client has left")
        self._silent_since_s = None
        if len(data) and not self._is_silent:
            if self._is_event_stream:
                self._ends_event = bytes(data[-2:]) == b"\n\n"
            return connection.send_piece((b"%x\r\n" % len(data), data, b"\r\n") if self._is_chunked else (data,))
        return connection.has_room

    async def wait_for_room(self) -> None:
        """Wait until there is room for more. Raises ConnectionResetError when the client has left."""
        if self._connection is not None:
            await self._connection.room()
        if self._connection is None:
            raise ConnectionResetError("the client has left")

    async def write(self, data: Buffer) -> None:
        """Send a piece; returns when there is room for more. Raises ConnectionResetError when the client has left."""
        if not self.send(data):
            await self.wait_for_room()

    async def close(self) -> None:
        """End the body."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._is_chunked and not self._is_silent:
            connection.send_piece((_LAST_CHUNK,))
        connection.end_pieces()

    def abort(self) -> None:
        """Break the answer off: its missing end tells the client."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def keep_open(self, now_s: float, interval_s: float) -> None:
        """Send a comment when a stream of events has been silent for `interval_s`: proxies close silent ones."""
        if not self._is_event_stream or self._is_silent or not self._ends_event:
            return
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        elif now_s - self._silent_since_s >= interval_s and self._connection is not None:
            self._silent_since_s = now_s
            self._connection.send_piece(_COMMENT_CHUNK if self._is_chunked else (_COMMENT,))

    def lost(self) -> None:
        """The client has left before the end."""
        self._connection = None
