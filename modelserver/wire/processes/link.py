"""The connection between a front and the core: all messages of one turn of the event loop in one datagram.

A socket pair carries it: a ring in shared memory was no faster for a lone message (19 us of CPU there and back, against
18), and for many, which travel together, neither matters much. Nothing here blocks: messages that the peer has no room
for wait in order, and their amount is bounded by what the users of the link may have in flight. Bytes too large for a
datagram are written once into memory that both map, in slices beside the event loop if they are many.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from modelserver.core.long_work import Result, Slices, finish, long_work
from modelserver.core.tensor import MAX_BYTES_IN_TURN, Buffer
from modelserver.execution.process.packing import Payload
from modelserver.execution.process.shared_buffer import Arena, ByteView, Leases, SharedBuffer
from modelserver.wire.processes.messages import Blob, Content, CoreBundle, FrontBundle, Spilled

_logger = logging.getLogger(__name__)

# Below, the copies that go through the socket cost less than a lease.
INLINE_BYTES: Final = 16 << 10
# A datagram must fit the socket's buffer, which by default holds some 200 KiB.
_MAX_DATAGRAM_BYTES: Final = 96 << 10
_BUFFER_BYTES: Final = 4 << 20

# What the thread that copies takes at a time.
_COPIED_BYTES: Final = 256 << 10

_encoder = msgspec.msgpack.Encoder()

Bundle = TypeVar("Bundle", FrontBundle, CoreBundle)


class Joined:
    """Consecutive buffers, as the content of a message."""

    __slots__ = ("_parts", "nbytes")

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = parts
        self.nbytes = sum(map(len, parts))

    def join(self) -> bytes:
        """All of them as one bytes object."""
        return b"".join(self._parts)

    def writing(self, target: ByteView) -> Slices[None]:
        """Copy them into `target`, which has `nbytes`, in slices."""
        at = 0
        for part in self._parts:
            source = np.frombuffer(part, np.uint8)
            for start in range(0, len(source), _COPIED_BYTES):
                piece = source[start : start + _COPIED_BYTES]
                target[at : at + len(piece)] = piece
                at += len(piece)
                yield


class Link(Generic[Bundle]):
    """One end. Everything happens on the event loop thread, only received arrays may be freed elsewhere.

    `receive` gets the messages of one datagram; messages that it sends leave at once. `lost` is called once, when the
    peer is gone; it is not called by `close`. Nothing raises: messages to a peer that is gone are dropped.
    """

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        outgoing: SharedBuffer,
        incoming: SharedBuffer,
        *,
        kind: type[Bundle],
        receive: Callable[[Sequence[Any]], None],
        lost: Callable[[], None],
    ) -> None:
        """`name` is the peer's in the log, `kind` the bundle that comes in."""
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._arena = Arena(outgoing)
        self._leases = Leases(incoming)
        self._decode: Callable[[memoryview], Bundle] = msgspec.msgpack.Decoder(kind).decode
        self._receive = receive
        self._lost = lost
        self._messages: list[Any] = []
        # By call, while the content of one of its messages is copied: how to send its next ones.
        self._held: dict[int, deque[Callable[[], None]]] = {}
        self._backlog: deque[bytes] = deque()
        self._is_reading = False
        self._is_closed = False
        self._buffer = memoryview(bytearray(_MAX_DATAGRAM_BYTES))
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._loop.add_reader(connection, self._read)

    @property
    def is_empty(self) -> bool:
        """Whether all sent messages are on their way."""
        return not self._messages and not self._backlog and not self._held

    def send(self, message: object) -> None:
        """Send with all others of this turn."""
        if self._is_closed:
            return
        if self._held:
            held = self._held.get(getattr(message, "call", -1))
            if held is not None:
                held.append(partial(self.send, message))
                return
        if not self._messages and not self._is_reading:
            self._loop.call_soon(self._flush)
        self._messages.append(message)

    def send_with(
        self, call: int, content: Joined | Payload, message: Callable[[Content], Any], *, at_once: bool = False
    ) -> None:
        """Send the message of `call` that is made of this content, before later ones of that call.

        Large content is copied beside the event loop, unless all messages must follow this one: `at_once`. Raises
        OSError when there is no memory for it.
        """
        nbytes = content.nbytes
        if nbytes <= INLINE_BYTES or self._is_closed:
            self.send(message(content.join()))
        elif call in self._held:
            self._held[call].append(partial(self.send_with, call, content, message))
        else:
            blob = Blob(self._arena.allocate(nbytes), nbytes)
            writing = content.writing(self._arena.buffer.view(blob.offset, nbytes))
            if nbytes <= MAX_BYTES_IN_TURN or at_once:
                finish(writing)
                self.send(message(blob))
            else:
                self._held[call] = deque()
                long_work().start(writing, partial(self._release, call, message, blob))

    def _release(self, call: int, message: Callable[[Content], Any], blob: Blob, written: Result[None]) -> None:
        """Send the message whose content is there now, and those that wait for it."""
        held = self._held.pop(call, ())
        if self._is_closed:
            return
        written()
        self.send(message(blob))
        for send in held:
            send()

    def view(self, content: Content) -> bytes | ByteView:
        """The bytes of a received message: read-only, or an array whose memory goes back when it is dead."""
        return content if isinstance(content, bytes) else self._leases.view(content.offset, content.nbytes)

    def tidy(self) -> None:
        """Send the peer the leases that are no longer used; for a time without messages."""
        if self._leases.has_returned and not self._messages:
            self._loop.call_soon(self._flush)

    def trim(self) -> None:
        """Give memory that a quiet time does not need back to the system."""
        while self._arena.trim():
            pass

    def close(self) -> None:
        """Send nothing more, receive nothing more. Arrays that were received stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        self._messages.clear()
        self._held.clear()
        self._backlog.clear()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        self._arena.buffer.close()
        self._leases.close()

    # Outgoing.

    def _flush(self) -> None:
        if self._is_closed or not (self._messages or self._leases.has_returned):
            return
        messages, self._messages = self._messages, []
        datagram = _encoder.encode((self._leases.take_returned(), messages))
        if len(datagram) > _MAX_DATAGRAM_BYTES:
            blob = Blob(self._arena.allocate(len(datagram)), len(datagram))
            self._arena.buffer.view(blob.offset, blob.nbytes)[:] = np.frombuffer(datagram, np.uint8)
            datagram = _encoder.encode(((), (Spilled(blob.offset, blob.nbytes),)))
        if self._backlog:
            self._backlog.append(datagram)
            return
        try:
            self._connection.send(datagram)
        except BlockingIOError:
            self._backlog.append(datagram)
            self._loop.add_writer(self._connection, self._write_backlog)
        except OSError:
            self._lose()

    def _write_backlog(self) -> None:
        try:
            while self._backlog:
                self._connection.send(self._backlog[0])
                self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        self._loop.remove_writer(self._connection)

    # Incoming.

    def _read(self) -> None:
        try:
            num_bytes = self._connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self._lose()
            return
        self._is_reading = True
        try:
            messages = self._open(self._buffer[:num_bytes])
            if messages and type(messages[0]) is Spilled:
                messages = self._open(self._leases.view(messages[0].offset, messages[0].nbytes).data)
            self._receive(messages)
        except msgspec.MsgspecError:
            _logger.exception("%s sent an invalid message; the connection to it is given up", self._name)
            self._lose()
        except Exception:
            # The messages after it are lost, although a caller waits for each of them.
            _logger.exception("handling a message of %s failed; the connection to it is given up", self._name)
            self._lose()
        finally:
            self._is_reading = False
            if self._messages:
                self._flush()

    def _open(self, datagram: memoryview) -> Sequence[Any]:
        bundle = self._decode(datagram)
        for offset in bundle.released:
            self._arena.free(offset)
        return bundle.messages

    def _lose(self) -> None:
        if not self._is_closed:
            self.close()
            self._lost()


# One piece is a message or a chunk; a reader that keeps up never lets its writer wait.
WINDOW_PIECES: Final = 16


class Window:
    """How much a sender may still send in one direction of a streamed call. Event loop thread only, one sender."""

    def __init__(self) -> None:
        self._room = WINDOW_PIECES
        self._waiter: asyncio.Future[None] | None = None
        # The reader has left.
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether a piece could be sent now."""
        return self._room > 0

    def try_take(self) -> bool:
        """Take room for one piece, if there is some. Raises ConnectionResetError when the reader has left."""
        if self.is_closed:
            raise ConnectionResetError("the reader has left")
        if self._room == 0:
            return False
        self._room -= 1
        return True

    async def wait(self) -> None:
        """Return when there is room for a piece. Raises ConnectionResetError when there will be none."""
        while self._room == 0 and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.is_closed:
            raise ConnectionResetError("the reader has left")

    async def take(self) -> None:
        """Room for one piece; waits for it. Raises ConnectionResetError when there will be none."""
        await self.wait()
        self._room -= 1

    def grant(self, num_pieces: int) -> None:
        """The reader has taken this many pieces."""
        self._room += num_pieces
        self._wake()

    def close(self) -> None:
        """The reader has left."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
