"""The sending side of a connection: answers made together leave in one write, large buffers without being copied."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from modelserver.core.tensor import Buffer
from modelserver.wire.context import TURN_BYTES, BulkTurns, Flushable, Outbox
from modelserver.wire.limits import Progress
from modelserver.wire.sockets.transport import gathers

# Below this one write is cheaper than avoiding a copy.
_MAX_JOINED_BYTES = 32 * 1024
# At most this much is collected, so that the transport notices when the peer does not keep up.
_MAX_COLLECTED_BYTES = 64 * 1024


class Outgoing(Flushable):
    """Collects while `is_collecting`, and otherwise until the outbox flushes at the end of the loop's turn.

    While `is_lone`, an answer is sent at once: one request was read, and no other work is due.
    """

    __slots__ = (
        "_bulk",
        "_gathers",
        "_is_in_outbox",
        "_num_collected",
        "_num_written",
        "_outbox",
        "_parts",
        "_progress",
        "_room",
        "_transport",
        "_turn_ends_at",
        "is_collecting",
        "is_lone",
        "is_paused",
    )

    def __init__(self, transport: asyncio.Transport, outbox: Outbox, bulk: BulkTurns) -> None:
        self.is_collecting = self.is_lone = False
        self.is_paused = False  # the peer does not read, or not fast enough
        self._transport = transport
        self._gathers = gathers(transport)
        self._outbox = outbox
        self._bulk = bulk
        self._parts: list[Buffer] = []
        self._num_collected = 0
        self._num_written = 0
        # After this many bytes, other connections have their turn.
        self._turn_ends_at = TURN_BYTES
        self._is_in_outbox = False
        self._room: asyncio.Future[None] | None = None  # of handlers that wait for the peer to read
        self._progress: Progress | None = None

    def add(self, head: bytes, body: Sequence[Buffer], num_body_bytes: int) -> None:
        """Send `head` and the buffers of `body` soon; they are not changed afterwards."""
        if num_body_bytes <= _MAX_JOINED_BYTES:
            data = b"".join((head, *body))
            if self.is_lone and not self._parts:
                self._num_written += len(data)
                if not self._transport.is_closing():
                    self._transport.write(data)
                return
            self._parts.append(data)
        else:
            self._parts.append(head)
            self._parts += body
        self._num_collected += len(head) + num_body_bytes
        if self.is_lone or self._num_collected > _MAX_COLLECTED_BYTES:
            self.flush()
        elif not self.is_collecting and not self._is_in_outbox:
            self._is_in_outbox = True
            self._outbox.add(self)

    def flush(self) -> None:
        """Send the collected data."""
        self._is_in_outbox = False
        parts = self._parts
        if not parts:
            return
        num_bytes = self._num_collected
        self._num_collected = 0
        self._num_written += num_bytes
        self._parts = []
        if self._transport.is_closing():
            return
        if len(parts) == 1:
            self._transport.write(parts[0])
        elif num_bytes <= _MAX_JOINED_BYTES:
            self._transport.write(b"".join(parts))
        elif self._gathers:
            self._transport.writelines(parts)
        else:
            self._write_each(parts)

    def _write_each(self, parts: list[Buffer]) -> None:
        small: list[Buffer] = []
        num_small_bytes = 0
        for part in parts:
            num_small_bytes += len(part)
            if num_small_bytes <= _MAX_JOINED_BYTES:
                small.append(part)
                continue
            if small:
                self._transport.write(b"".join(small))
                small.clear()
            num_small_bytes = 0
            self._transport.write(part)
        if small:
            self._transport.write(b"".join(small))

    @property
    def has_room(self) -> bool:
        """Whether more may be made and sent at once."""
        return not self.is_paused and self._num_written < self._turn_ends_at

    async def room(self) -> None:
        """Wait until more may be sent: the peer has read enough and it is this connection's turn, or the peer has left.

        Without turns, a handler that never waits for anything else would continue until the system takes no more, which
        for a thousand connections blocks the loop for a second.
        """
        while self.is_paused:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)
        if self._num_written >= self._turn_ends_at:
            self._turn_ends_at = self._num_written + TURN_BYTES
            await self._bulk.wait()

    def pause(self) -> None:
        """The transport is full."""
        self.is_paused = True

    def resume(self) -> None:
        """The transport has room again."""
        self.is_paused = False
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)

    def close(self) -> None:
        """The connection is lost: forget unsent data."""
        self._parts = []
        self._num_collected = 0
        self.resume()

    def stalled_s(self, now_s: float) -> float:
        """For how long the peer has taken none of the waiting data."""
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting == 0:
            self._progress = None
            return 0.0
        if self._progress is None:
            self._progress = Progress()
        return self._progress.paused_s(now_s, self._num_written - num_waiting)
