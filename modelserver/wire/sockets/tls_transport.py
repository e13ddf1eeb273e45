"""TLS of a connection, the server's side, between a protocol and the transport of the socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from modelserver.core.tensor import Buffer
from modelserver.wire.sockets.transport import ENDED, NOBODY, SocketTransport, buffered

# At most this much is received in one go.
_ROOM_BYTES: Final = 128 * 1024
# This much is encrypted in one go: the store of records keeps the memory that it grew to.
_PIECE_BYTES: Final = 128 * 1024
# Of records that the peer made us send, and does not take.
_MAX_UNREAD_BYTES: Final = 64 * 1024
# The first bytes of text; a handshake begins with a byte of another kind (RFC 8446, 5.1).
_CAPITALS: Final = range(ord("A"), ord("Z") + 1)


@dataclass(frozen=True, slots=True)
class TlsTerms:
    """The settings that all connections of a port share.

    A handshake that is not done within `handshake_s` has failed; then its client has `linger_s` to learn why. One that
    speaks HTTP without TLS gets `open_answer`. `room` is where all receive: each empties it at once.
    """

    handshake_s: float
    linger_s: float
    open_answer: bytes
    room: memoryview = field(default_factory=lambda: memoryview(bytearray(_ROOM_BYTES)))


# Told, once, how a handshake ended: by an exception, or None. One that failed has ended when the connection is lost.
EndHandshake = Callable[["TlsTransport", Exception | None], None]


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """To its protocol the transport, and to the socket's transport the protocol. Event loop thread only.

    The protocol learns of the connection when the handshake is done, and never of one that fails. As without TLS,
    `write_eof` ends one direction only: what the peer sends after it is read.
    """

    __slots__ = (
        "_below",
        "_end_handshake",
        "_failure",
        "_first_byte",
        "_has_ended",
        "_incoming",
        "_is_closing",
        "_is_ending",
        "_is_established",
        "_is_reading",
        "_is_told",
        "_left",
        "_loop",
        "_num_unread",
        "_outgoing",
        "_protocol",
        "_terms",
        "_timer",
        "_tls",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext, terms: TlsTerms, ended: EndHandshake
    ) -> None:
        self._loop = loop
        self._terms = terms
        # Records that were received, and those that are to be sent.
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._end_handshake: EndHandshake | None = ended
        self._failure: Exception | None = None
        self._first_byte: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._below: SocketTransport
        self._protocol: asyncio.BufferedProtocol = NOBODY
        self._is_established = False
        self._is_reading = True
        # Data that was decrypted before the protocol wanted it; rarely any.
        self._left = b""
        self._num_unread = 0
        # The peer sends no more, and the protocol knows.
        self._has_ended = self._is_told = False
        # We send no more; and take no more.
        self._is_ending = self._is_closing = False

    def begin(self, below: SocketTransport, protocol: asyncio.BufferedProtocol) -> None:
        """Take over what `below` brings, for `protocol`. Called once."""
        self._protocol = protocol
        self._timer = self._loop.call_later(self._terms.handshake_s, self._give_up)
        below.begin(self)

    # Called by the transport below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self._below = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the room has one size
        return self._terms.room

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_established:
            self._incoming.write(self._terms.room[:nbytes])
            self._read()
        elif self._failure is None:
            self._shake_hands(self._terms.room[:nbytes])

    def eof_received(self) -> bool:
        if not self._is_established:
            return False
        self._has_ended = True
        self._read()
        return True  # whether to close is the protocol's to say

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._is_reading = False
        if not self._is_established:
            self._finish_handshake(self._failure or exc or ConnectionResetError("the client has left"))
        protocol, self._protocol = self._protocol, NOBODY
        if self._is_established:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # The handshake.

    def _shake_hands(self, data: memoryview) -> None:
        if self._first_byte is None:
            self._first_byte = data[0]
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_records()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._send_records()
        self._is_established = True
        self._finish_handshake(None)
        self._protocol.connection_made(self)
        self._read()

    def _fail(self, error: ssl.SSLError) -> None:
        """Say what was wrong, and wait a little for the client to close: what of it is unread would reset the
        connection, and the reset could overtake these last words."""
        self._failure = error
        if self._first_byte in _CAPITALS:
            self._below.write(self._terms.open_answer)
        else:
            self._send_records()
        self._below.write_eof()
        self._set_timer(self._terms.linger_s, self.abort)

    def _give_up(self) -> None:
        self._failure = TimeoutError(f"it was not done within {self._terms.handshake_s:g} s")
        self.abort()

    def _finish_handshake(self, error: Exception | None) -> None:
        self._set_timer()
        ended, self._end_handshake = self._end_handshake, None
        if ended is not None:
            ended(self, error)

    def _set_timer(self, delay_s: float = 0.0, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self._loop.call_later(delay_s, then)

    # Reading.

    def pause_reading(self) -> None:
        self._is_reading = False
        self._below.pause_reading()

    def resume_reading(self) -> None:
        if not (self._is_reading or self._is_told or self.is_closing()):
            self._is_reading = True
            self._below.resume_reading()
            self._loop.call_soon(self._read_on)

    def is_reading(self) -> bool:
        return self._is_reading

    def receive_soon(self) -> None:
        """As `SocketTransport.receive_soon`."""
        self._below.receive_soon()

    def _read_on(self) -> None:
        """Read the data that arrived while reading was paused."""
        try:
            self._read()
        except Exception as error:
            self._below.fail(error)

    def _read(self) -> None:
        """Give the protocol the received data, as long as it takes it."""
        tls, incoming = self._tls, self._incoming
        while self._is_reading and (incoming.pending or tls.pending() or self._left) and not self._below.is_closing():
            # Typeshed: any buffer.
            buffer: memoryview = self._protocol.get_buffer(-1)  # type: ignore[assignment]
            if not buffer:
                raise RuntimeError("get_buffer() returned an empty buffer")
            try:
                num_bytes = self._take_left(buffer) if self._left else self._decrypt(buffer)
            except ssl.SSLError as error:
                self._send_records()  # they say what was wrong
                self._lose(error)
                return
            if not num_bytes:
                break  # the end, or part of a record
            self._protocol.buffer_updated(num_bytes)
        if self._outgoing.pending:
            self._answer_peer()
        if self._has_ended and self._is_reading and not self._below.is_closing():
            self._tell_end()

    def _answer_peer(self) -> None:
        """Send what OpenSSL has to say itself: to a peer that changes its keys, say, as often as it likes."""
        self._num_unread = self._num_unread + self._outgoing.pending if self._below.get_write_buffer_size() else 0
        if self._num_unread > _MAX_UNREAD_BYTES:
            self.abort()
        else:
            self._send_records()

    def _decrypt(self, buffer: memoryview) -> int:
        """Fill the buffer as far as there are records; the number of bytes. Raises ssl.SSLError."""
        tls, incoming = self._tls, self._incoming
        position, size = 0, len(buffer)
        try:
            while position < size:
                # Typeshed: into a bytearray.
                num_bytes: int = tls.read(size - position, buffer[position:] if position else buffer)  # type: ignore[assignment]
                position += num_bytes
                if not num_bytes:
                    self._has_ended = True
                    break
                if not incoming.pending:
                    break
        except ssl.SSLWantReadError:
            pass  # what is there is part of a record
        except ssl.SSLZeroReturnError:
            self._has_ended = True  # and so have we
        return position

    def _take_left(self, buffer: memoryview) -> int:
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _tell_end(self) -> None:
        self._is_told = True
        self.pause_reading()  # data after the end would only take memory
        if not self._protocol.eof_received():
            self.close()

    # Writing.

    def write(self, data: Buffer) -> None:
        if self._is_closing:
            return
        if self._is_ending:
            raise RuntimeError(ENDED)
        if not data:
            return
        try:
            if len(data) <= _PIECE_BYTES:
                self._tls.write(data)
                self._below.write(self._outgoing.read())
            else:
                self._below.writelines(self._records_of(memoryview(data)))
        except ssl.SSLError as error:
            # The peer has begun to change its keys, and keeps the rest of it back: OpenSSL waits for that.
            self._lose(error)

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """As `write` of all of them. They are copied: each would become a record, at the least."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Send no more than what was written. Safe to repeat."""
        if not (self._is_ending or self._is_closing):
            self._say_end()
            self._below.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Raises ValueError for limits that are the wrong way round. They are of records."""
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._below.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def _records_of(self, view: memoryview) -> Iterable[bytes]:
        for start in range(0, len(view), _PIECE_BYTES):
            self._tls.write(view[start : start + _PIECE_BYTES])
            yield self._outgoing.read()

    def _send_records(self) -> None:
        records = self._outgoing.read()
        if records and not self._is_ending:  # OpenSSL goes on answering behind our end
            self._below.write(records)

    def _say_end(self) -> None:
        """Tell the peer that the data it gets is complete (RFC 8446, 6.1)."""
        # OpenSSL looks for the peer's own end as soon as it has said ours, and what has come instead would be lost.
        records = self._incoming.read()
        if self._tls.pending():
            self._left += self._tls.read(self._tls.pending())
        with suppress(ssl.SSLError):  # the peer has not ended
            self._tls.unwrap()
        self._incoming.write(records)
        self._send_records()
        self._is_ending = True

    # The end.

    def close(self) -> None:
        """Read no more, and be lost once what was written is sent."""
        if self._is_closing:
            return
        if self._is_established and not self._is_ending:
            self._say_end()
        self._is_closing = True
        self._is_reading = False
        self._below.close()

    def abort(self) -> None:
        self._is_closing = True
        self._is_reading = False
        self._below.abort()

    def _lose(self, error: Exception) -> None:
        self._is_closing = True
        self._is_reading = False
        self._below.lose(error)

    def is_closing(self) -> bool:
        return self._is_closing or self._below.is_closing()

    # Who is who.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Raises TypeError unless it is an `asyncio.BufferedProtocol`."""
        self._protocol = buffered(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`ssl_object`, or what the socket's transport knows."""
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)
