"""TLS of a connection, the server's side, between a protocol and the transport of the socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from modelserver.core.tensor import Buffer
from modelserver.wire.sockets.transport import NOBODY, SocketTransport

# What is received in one go, at most.
ROOM_BYTES: Final = 128 * 1024
# What is encrypted in one go: the store of records keeps the memory that it grew to.
_PIECE_BYTES: Final = 128 * 1024
_ENDED: Final = "cannot write after write_eof()"

# Told how a handshake ended: by an exception, or None.
EndHandshake = Callable[["TlsTransport", Exception | None], None]


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """To its protocol the transport, and to the socket's transport the protocol. Event loop thread only.

    The protocol learns of the connection when the handshake is done, and never of one that fails. As without TLS,
    `write_eof` ends one direction only: what the peer sends after it is read.
    """

    __slots__ = (
        "_below",
        "_end_handshake",
        "_has_ended",
        "_incoming",
        "_is_closing",
        "_is_ending",
        "_is_established",
        "_is_reading",
        "_is_told",
        "_left",
        "_loop",
        "_outgoing",
        "_protocol",
        "_room",
        "_timer",
        "_tls",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        protocol: asyncio.BufferedProtocol,
        room: memoryview,
        ended: EndHandshake,
    ) -> None:
        """`room` is where records are received: it may be that of other connections too, as it is emptied at once.
        `ended` is called once."""
        self._loop = loop
        self._protocol = protocol
        self._room = room
        # Records that were received, and those that are to be sent.
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._end_handshake: EndHandshake | None = ended
        self._timer: asyncio.TimerHandle | None = None
        self._below: SocketTransport
        self._is_established = False
        self._is_reading = True
        # What was decrypted before the protocol wanted it: seldom anything.
        self._left = b""
        # The peer sends no more; the protocol knows that; we send no more; no more is taken.
        self._has_ended = self._is_told = self._is_ending = self._is_closing = False

    def begin(self, below: SocketTransport, handshake_s: float) -> None:
        """Take over what `below` brings. A handshake that is not done within `handshake_s` has failed. Called once."""
        self._timer = self._loop.call_later(handshake_s, self._give_up, handshake_s)
        below.begin(self)

    # Called by the transport below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self._below = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the room has one size
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._room[:nbytes])
        if self._is_established:
            self._read()
        elif not self._is_closing:
            self._shake_hands()

    def eof_received(self) -> bool:
        if not self._is_established:
            return False
        self._has_ended = True
        self._read()
        return True  # whether to close is the protocol's to say

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        if not self._is_established:
            self._finish_handshake(exc or ConnectionResetError("the client has left"))
        protocol, self._protocol = self._protocol, NOBODY
        if self._is_established:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # The handshake.

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_records()
            return
        except ssl.SSLError as error:
            self._send_records()  # they say what was wrong
            self._finish_handshake(error)
            self.close()
            return
        self._send_records()
        self._is_established = True
        self._finish_handshake(None)
        self._protocol.connection_made(self)
        self._read()

    def _give_up(self, handshake_s: float) -> None:
        self._finish_handshake(TimeoutError(f"it was not done within {handshake_s:g} s"))
        self.abort()

    def _finish_handshake(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._end_handshake = self._end_handshake, None
        if ended is not None:
            ended(self, error)

    def answer_openly(self, data: bytes) -> None:
        """Unencrypted last words, for a client that does not speak TLS: when its handshake has failed."""
        self._below.write(data)

    # Reading.

    def pause_reading(self) -> None:
        self._is_reading = False
        self._below.pause_reading()

    def resume_reading(self) -> None:
        if not (self._is_reading or self._is_told or self._is_closing):
            self._is_reading = True
            self._below.resume_reading()
            self._loop.call_soon(self._read_on)

    def is_reading(self) -> bool:
        return self._is_reading

    def receive_soon(self) -> None:
        """As `SocketTransport.receive_soon`."""
        self._below.receive_soon()

    def _read_on(self) -> None:
        """Read what came when it was not wanted."""
        try:
            self._read()
        except Exception as error:
            self._below.fail(error)

    def _read(self) -> None:
        """Give the protocol what has come, as long as it takes it."""
        tls, incoming = self._tls, self._incoming
        while self._is_reading and (incoming.pending or tls.pending() or self._left):
            # Typeshed: any buffer.
            buffer: memoryview = self._protocol.get_buffer(-1)  # type: ignore[assignment]
            if not buffer:
                raise RuntimeError("get_buffer() returned an empty buffer")
            try:
                num_bytes = self._take_left(buffer) if self._left else self._decrypt(buffer)
            except ssl.SSLError as error:
                self._send_records()  # they say what was wrong
                self._is_closing = True
                self._below.lose(error)
                return
            if not num_bytes:
                break  # the end, or part of a record
            self._protocol.buffer_updated(num_bytes)
        if self._outgoing.pending:
            self._send_records()  # of a peer that changes its keys, say
        if self._has_ended and self._is_reading:
            self._tell_end()

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
        self.pause_reading()  # of what comes nevertheless, too
        if not self._protocol.eof_received():
            self.close()

    # Writing.

    def write(self, data: Buffer) -> None:
        if self._is_closing:
            return
        if self._is_ending:
            raise RuntimeError(_ENDED)
        if not data:
            return
        if len(data) <= _PIECE_BYTES:
            self._tls.write(data)
            self._below.write(self._outgoing.read())
        else:
            self._below.writelines(self._records_of(memoryview(data)))

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
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())

    def _say_end(self) -> None:
        """Tell the peer that nothing is missing behind what it gets (RFC 8446, 6.1)."""
        self._is_ending = True
        # OpenSSL looks for the peer's own end at once, and what has come instead of it would be lost.
        records = self._incoming.read()
        if self._tls.pending():
            self._left += self._tls.read(self._tls.pending())
        with suppress(ssl.SSLError):  # the peer has not ended
            self._tls.unwrap()
        self._incoming.write(records)
        self._send_records()

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

    def is_closing(self) -> bool:
        return self._is_closing or self._below.is_closing()

    # Who is who.

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Raises TypeError unless it is an `asyncio.BufferedProtocol`."""
        if not isinstance(protocol, asyncio.BufferedProtocol):
            raise TypeError(f"expected an asyncio.BufferedProtocol, got {type(protocol).__name__}")
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`ssl_object`, or what the socket's transport knows."""
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)
