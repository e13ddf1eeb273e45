"""One end of the connection between the server and a child process.

A message is one datagram on a Unix socket pair: a prefix, the payload (tensors), the record. A payload or record
that is large lies in the sender's arena instead, and the prefix says where. The receiver's arrays are views of it;
when the last one dies, the lease goes back to the sender with the next message.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from modelserver.execution.process.messages import AnyMessage, Message, Trim
from modelserver.execution.process.packing import Payload
from modelserver.execution.process.shared_buffer import Arena, ByteView, Leases, SharedBuffer

# Below, two copies by the kernel cost less than a lease.
_INLINE_BYTES: Final = 24 << 10
_DATAGRAM_BYTES: Final = 64 << 10
# Payload and record: where each begins in the arena (_INLINE: in this datagram), and its length.
_PREFIX: Final = struct.Struct("<QQQQ")
_INLINE: Final = (1 << 64) - 1

# A number that one side leaves for the other at the start of its arena, readable after its end.
_MARK: Final = struct.Struct("<Q")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode

Received = tuple[AnyMessage, bytearray | ByteView]


class PeerGoneError(Exception):
    """The other process closed its end. `was_unread`: it never saw what was sent last."""

    def __init__(self, *, was_unread: bool) -> None:
        super().__init__("the other process closed the connection")
        self.was_unread = was_unread

    def __reduce__(self) -> tuple[Callable[[bool], PeerGoneError], tuple[bool]]:
        """A pool that cannot unpickle an exception of its worker waits for ever."""
        return _peer_gone, (self.was_unread,)


def _peer_gone(was_unread: bool) -> PeerGoneError:
    return PeerGoneError(was_unread=was_unread)


class Channel:
    """Sends messages with tensors, receives them.

    Any thread may send, and one at a time receive; arrays may die on any thread.
    """

    def __init__(self, connection: socket.socket, outgoing: SharedBuffer, incoming: SharedBuffer) -> None:
        self._connection = connection
        self._leases = Leases(incoming)
        self.arena = Arena(outgoing)
        self._is_closed = False
        self._buffer = memoryview(bytearray(_DATAGRAM_BYTES))
        # Guards the arena, and lets one message out at a time.
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._mark: memoryview = memoryview(bytearray(_MARK.size))

    def keep_mark(self) -> None:
        """Make room for `set_mark`: the first lease of the arena, for good."""
        offset = self.arena.allocate(_MARK.size)
        assert offset == 0, "the mark is where the peer looks for it"
        self._mark = self.arena.buffer.view(offset, _MARK.size).data

    def set_mark(self, number: int) -> None:
        """Leave a number that the peer can read even when this process dies at once."""
        _MARK.pack_into(self._mark, 0, number)

    def read_mark(self) -> int:
        """The last number of the peer's `set_mark`; 0 before the first."""
        return self._leases.peek(_MARK)

    @property
    def num_unreturned(self) -> int:
        """Leases that the peer waits to hear of."""
        return self._leases.num_returned

    @property
    def has_leases(self) -> bool:
        """Whether one side still uses memory of the other."""
        return self.arena.num_leases > 0 or self._leases.num_alive > 0

    @property
    def has_unsent(self) -> bool:
        """Whether `try_send` left messages behind for which the peer's queue has no room yet."""
        return bool(self._unsent)

    def send(self, message: Message, payload: Payload | None = None) -> None:
        """Send one message and empty `payload`; blocks while the peer's queue is full. Raises PeerGoneError."""
        with self._lock:
            datagram = self._encode(message, payload)
            try:
                self._connection.send(datagram)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGoneError(was_unread=True) from error

    def send_if_free(self, message: Message) -> bool:
        """As `send`, unless some thread, perhaps this one, is in the middle of sending: then False."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._connection.send(self._encode(message, None))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGoneError(was_unread=True) from error
        finally:
            self._lock.release()
        return True

    def try_send(self, message: Message, payload: Payload | None = None) -> None:
        """As `send`, without blocking: what finds no room is kept for `send_unsent`."""
        with self._lock:
            datagram = self._encode(message, payload)
            if not self._unsent:
                try:
                    self._connection.send(datagram, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGoneError(was_unread=True) from error
                else:
                    return
            self._unsent.append(datagram)

    def send_unsent(self) -> None:
        """Send what is left behind, as far as there is room. Raises PeerGoneError."""
        unsent = self._unsent
        with self._lock:
            while unsent:
                try:
                    self._connection.send(unsent[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGoneError(was_unread=True) from error
                unsent.popleft()

    def discard_unsent(self) -> None:
        """Forget what `try_send` left behind."""
        self._unsent.clear()

    def receive(self) -> Received:
        """The next message and its payload, out of which `packing.unpack` makes tensors.

        Raises PeerGoneError, and TimeoutError when a receive timeout is set and passes.
        """
        return self._receive(0)

    def try_receive(self) -> Received | None:
        """As `receive`; None when there is no message."""
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except TimeoutError:
            return None

    def _encode(self, message: Message, payload: Payload | None) -> bytes:
        """The datagram of a message. Called with the lock held."""
        if self._is_closed:
            raise PeerGoneError(was_unread=True)
        payload_at, payload_bytes = _INLINE, 0
        chunks = [b""]  # the prefix, whose content is known last
        if payload is not None and payload.nbytes:
            payload_bytes = payload.nbytes
            if payload_bytes <= _INLINE_BYTES:
                payload.append_to(chunks)
            else:
                payload_at = self.arena.allocate(payload_bytes)
                payload.write(self.arena.buffer.view(payload_at, payload_bytes))
            # What it held may be views of the peer's arena: their leases go back with this very message.
            payload.clear()
        if self._leases.has_returned:
            message.released = self._leases.take_returned()
        record_at, record = _INLINE, _encode(message)
        record_bytes = len(record)
        if record_bytes > _INLINE_BYTES:
            record_at = self.arena.allocate(record_bytes)
            self.arena.buffer.view(record_at, record_bytes)[:] = np.frombuffer(record, np.uint8)
        else:
            chunks.append(record)
        chunks[0] = _PREFIX.pack(payload_at, payload_bytes, record_at, record_bytes)
        return b"".join(chunks)

    def _receive(self, flags: int) -> Received:
        buffer = self._buffer
        try:
            count = self._connection.recv_into(buffer, 0, flags)
        except ConnectionResetError as error:
            # The kernel says "reset" when the peer went with datagrams in its queue.
            raise PeerGoneError(was_unread=True) from error
        except BlockingIOError as error:
            raise TimeoutError("no message within the receive timeout") from error
        except OSError as error:
            raise PeerGoneError(was_unread=False) from error
        if count == 0:
            raise PeerGoneError(was_unread=False)
        payload_at, payload_bytes, record_at, record_bytes = _PREFIX.unpack_from(buffer)
        position = _PREFIX.size
        payload: bytearray | ByteView
        if payload_at == _INLINE:
            payload = bytearray(buffer[position : position + payload_bytes])
            position += payload_bytes
        else:
            payload = self._leases.view(payload_at, payload_bytes)
        if record_at == _INLINE:
            message: AnyMessage = _decode(buffer[position:count])
        else:
            message = _decode(self._leases.view(record_at, record_bytes).data)
        if message.released:
            with self._lock:
                for offset in message.released:
                    self.arena.free(offset)
        return message, payload

    def wait(self, timeout_s: float) -> bool:
        """Whether a message, or the peer's end, is there within `timeout_s`."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def trim(self) -> None:
        """Give back memory that a quiet time does not need, here and at the peer. Raises PeerGoneError."""
        self.trim_arena()
        self.try_send(Trim())

    def trim_arena(self) -> None:
        """Give back memory here."""
        with self._lock:
            self.arena.trim()

    def set_receive_timeout(self, timeout_s: float | None) -> None:
        """Let `receive` give up after `timeout_s`, without a system call more per message."""
        seconds, fraction = divmod(timeout_s or 0.0, 1)
        value = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def shutdown(self) -> None:
        """End the connection: a blocked `receive`, here or there, raises PeerGoneError. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._connection.fileno()

    def disown(self) -> None:
        """In a forked copy of this process: leave the connection to the original. Its uses raise PeerGoneError."""
        self._lock = threading.Lock()  # a thread that was not copied may have held it
        self._is_closed = True
        self._connection.close()

    def close(self) -> None:
        """Close descriptors; arrays that were received stay valid."""
        self._is_closed = True
        self._connection.close()
        self.arena.buffer.close()
        self._leases.close()
