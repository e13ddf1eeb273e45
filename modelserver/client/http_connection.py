"""A connection to a server over HTTP/1.1: kept alive, one request at a time, the answer handed on as it arrives."""

from __future__ import annotations

import abc
import asyncio
import socket
from contextlib import suppress
from typing import Final

from modelserver.client.heads import END_OF_HEAD, AnswerHead, AnswerHeads, ChunkedBody, MalformedAnswerError
from modelserver.core.tensor import Buffer
from modelserver.wire.context import Arena
from modelserver.wire.sockets.transport import SocketTransport

# After the end of a connection without an answer: until the peer's system would have refused our request.
_REFUSAL_WAIT_S: Final = 0.03
# TCP_CLOSE of Linux: the peer has reset the connection.
_TCP_CLOSED: Final = 7
_MAX_HEAD_BYTES: Final = 64 * 1024
# Up to this size a body is sent in one piece with its head.
_MAX_JOINED_BYTES: Final = 32 * 1024


class Asking(abc.ABC):
    """A request that waits for a server's answer, as its connection sees it."""

    __slots__ = ()

    # HEAD: the answer has a length and no body.
    is_bodyless: bool

    @abc.abstractmethod
    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer arrived at once."""

    @abc.abstractmethod
    def begun(self, head: AnswerHead) -> None:
        """The head of an answer arrived whose body follows: `more` until `ended`, or `lost`."""

    @abc.abstractmethod
    def more(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def ended(self) -> None: ...

    @abc.abstractmethod
    def lost(self, reason: str, *, is_refused: bool) -> None:
        """The connection broke before the end of the answer.

        `is_refused`: the server's process never read the whole request, so it may be sent again.
        """

    def has_room(self) -> None:
        """More of the request's body can be sent again."""


class ConnectionOwner(abc.ABC):
    """The place of a connection between its requests."""

    __slots__ = ()

    def give_back(self, connection: HttpConnection) -> None:
        """The connection is idle."""

    @abc.abstractmethod
    def forget(self, connection: HttpConnection) -> None:
        """The connection takes no more requests. May be called again."""


class HttpConnection(asyncio.BufferedProtocol):
    """One connection. Event loop thread only."""

    __slots__ = (
        "_arena",
        "_asking",
        "_chunks",
        "_head",
        "_heads",
        "_is_paused",
        "_is_whole",
        "_left",
        "_owner",
        "_rest",
        "idle_since_s",
        "is_full",
        "is_lost",
        "transport",
    )

    def __init__(self, owner: ConnectionOwner, heads: AnswerHeads, arena: Arena) -> None:
        self._owner = owner
        self._heads = heads
        self._arena = arena.view
        self.transport: asyncio.Transport
        self._asking: Asking | None = None
        # Of the answer that is being received: its head, the bytes to come of a body of known length, its chunks.
        self._head: AnswerHead | None = None
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._rest = b""
        # Whether the whole request was handed to the transport.
        self._is_whole = True
        self._is_paused = False
        self.idle_since_s = 0.0
        self.is_full = False
        self.is_lost = False

    # Called by the request.

    def ask(self, asking: Asking, head: bytes, body: Buffer, *, is_whole: bool = True) -> None:
        """Send a request; with `is_whole` False, more of its body follows by `send`."""
        self._asking = asking
        self._is_whole = is_whole
        if len(body) <= _MAX_JOINED_BYTES:
            self.transport.write(head + body if body else head)
        else:
            self.transport.writelines((head, body))

    def send(self, data: Buffer, *, is_whole: bool = False) -> None:
        """Send more of the request's body; the caller minds `is_full`."""
        self._is_whole = is_whole
        if data:
            self.transport.write(data)

    def abandon(self) -> None:
        """Close: an answer in flight is no longer wanted, which the server learns by the end of the connection."""
        self._asking = None
        self.transport.abort()

    def pause(self) -> None:
        """Receive nothing until `resume`."""
        self._is_paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.is_lost:
            self._is_paused = False
            self.transport.resume_reading()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._arena

    def buffer_updated(self, nbytes: int) -> None:
        data = self._arena[:nbytes].tobytes()
        try:
            self._receive(data)
        except MalformedAnswerError as error:
            self._break(f"the answer cannot be read: {error}")

    def eof_received(self) -> bool:
        """The server sends no more. Without an answer, find out whether its system refuses the request."""
        if self._asking is None or self._head is not None or self._rest:
            return False
        asyncio.get_running_loop().call_later(_REFUSAL_WAIT_S, self._judge)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._owner.forget(self)
        if isinstance(error, ConnectionResetError | BrokenPipeError) and isinstance(self.transport, SocketTransport):
            self._receive_last()
        asking, self._asking = self._asking, None
        if asking is None:
            return
        head = self._head
        if head is not None and error is None and head.length is None and not head.is_chunked:
            asking.ended()
            return
        has_answer = head is not None or bool(self._rest)
        is_reset = isinstance(error, ConnectionResetError | BrokenPipeError)
        is_refused = not has_answer and (is_reset or not self._is_whole)
        what = "the connection broke" if error else "the server closed the connection"
        where = "within its answer" if has_answer else "without an answer"
        asking.lost(f"{what} {where}" + (f": {error}" if error else ""), is_refused=is_refused)

    def _receive_last(self) -> None:
        """The answer of a peer that closed without reading the whole request may still lie in the system."""
        opened = self.transport.get_extra_info("socket")
        with suppress(OSError):
            while self._asking is not None and (nbytes := opened.recv_into(self._arena)):
                self.buffer_updated(nbytes)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._asking is not None:
            self._asking.has_room()

    # The answer.

    def _receive(self, data: bytes) -> None:
        if self._head is not None:
            self._read_body(data)
            return
        asking = self._asking
        if asking is None:
            raise MalformedAnswerError("an answer without a request")
        if self._rest:
            data, self._rest = self._rest + data, b""
        head, end = None, 0
        while head is None or head.status < 200:
            start, end = end, data.find(END_OF_HEAD, end)
            if end < 0:
                self._rest = data[start:]
                if len(self._rest) > _MAX_HEAD_BYTES:
                    raise MalformedAnswerError(f"a head of over {_MAX_HEAD_BYTES} bytes")
                return
            end += len(END_OF_HEAD)
            head = self._heads.read(data[start:end])
        length = 0 if asking.is_bodyless else head.length
        if length is not None and len(data) - end >= length:
            if len(data) - end > length:
                raise _surplus(len(data) - end - length, length)
            self._finish(head)
            asking.answered(head, data[end:])
            return
        self._head = head
        self._left = length or 0
        self._chunks = ChunkedBody() if head.is_chunked else None
        asking.begun(head)
        if end < len(data) and self._asking is asking:
            self._read_body(data[end:])

    def _read_body(self, data: bytes) -> None:
        head, asking = self._head, self._asking
        if asking is None or head is None:
            return  # it was abandoned
        if self._chunks is not None:
            piece = self._chunks.feed(data)
            is_done = self._chunks.is_done
        else:
            piece = data
            if head.length is not None and len(data) > self._left:
                raise _surplus(len(data) - self._left, head.length)
            self._left -= len(data)
            is_done = head.length is not None and not self._left
        if piece:
            asking.more(piece)
        if is_done and self._asking is asking:
            self._finish(head)
            asking.ended()

    def _finish(self, head: AnswerHead) -> None:
        """The answer is complete: the connection is free, unless it must close."""
        self._asking = self._head = self._chunks = None
        if head.is_last or not self._is_whole or self.is_lost:
            self._owner.forget(self)
            self.transport.abort()
        else:
            if self._is_paused:
                self.resume()  # its last reader was slow
            self._owner.give_back(self)

    def _judge(self) -> None:
        if self.is_lost:
            return
        refused: Exception | None = None
        opened = self.transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):
            if opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSED:
                refused = ConnectionResetError("the request was not read")
        self.connection_lost(refused)
        self.transport.abort()

    def _break(self, reason: str) -> None:
        asking, self._asking = self._asking, None
        self._owner.forget(self)
        self.transport.abort()
        if asking is not None:
            asking.lost(reason, is_refused=False)


def _surplus(num_bytes: int, length: int) -> MalformedAnswerError:
    return MalformedAnswerError(f"{num_bytes} bytes follow the {length} that Content-Length announced")
